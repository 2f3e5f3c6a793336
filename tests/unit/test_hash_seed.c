/* One secret for all who share a file, whoever comes first and wherever one of them ends. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/hash_seed.h"

static char dir[64];
static char path[96];

static int setup(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/paged-test-seed-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/seed", dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(dir);
}

static void write_file(const char *text, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0400);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, n), n);
    close(fd);
}

static void test_hash_seed_is_made_and_kept(void **state)
{
    (void)state;
    uint8_t a[32] = {0}, b[32] = {0};
    struct stat st;
    assert_int_equal(hash_seed_load(a, "", NULL), PGD_OK);
    assert_int_equal(hash_seed_load(b, "", NULL), PGD_OK);
    assert_memory_not_equal(a, b, 32);
    assert_int_equal(hash_seed_load(a, path, NULL), PGD_OK);
    assert_int_equal(hash_seed_load(b, path, NULL), PGD_OK);
    assert_memory_equal(a, b, 32);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(st.st_size, 32);
}

static void test_hash_seed_of_a_file_that_is_there(void **state)
{
    (void)state;
    static const char text[] = "0123456789abcdef0123456789ABCDEF and more";
    uint8_t a[32];
    write_file(text, sizeof text - 1);
    assert_int_equal(hash_seed_load(a, path, NULL), PGD_OK);
    assert_memory_equal(a, text, 32);
}

/* What an engine leaves that is killed as soon as it has made the file. */
static void test_hash_seed_fills_an_empty_file(void **state)
{
    (void)state;
    uint8_t a[32], b[32], zeros[32] = {0};
    write_file("", 0);
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(hash_seed_load(a, path, NULL), PGD_OK);
    assert_int_equal(hash_seed_load(b, path, NULL), PGD_OK);
    assert_memory_equal(a, b, 32);
    assert_memory_not_equal(a, zeros, 32);
}

enum { STARTERS = 8, ROUNDS = 50 };

static void test_hash_seed_is_one_for_all_who_start_together(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        int go[2], told[2];
        uint8_t first[32], other[32];
        assert_int_equal(pipe(go), 0);
        assert_int_equal(pipe(told), 0);
        for (int i = 0; i < STARTERS; i++) {
            if (fork() != 0)
                continue;
            uint8_t seed[32];
            char byte;
            close(go[1]);
            (void)!read(go[0], &byte, 1); /* all at once: its end */
            pgd_err err = hash_seed_load(seed, path, NULL);
            _exit(err == PGD_OK && write(told[1], seed, 32) == 32 ? 0 : 1);
        }
        close(go[0]);
        close(go[1]);
        close(told[1]);
        for (int i = 0; i < STARTERS; i++) {
            int status;
            assert_true(wait(&status) > 0);
            assert_int_equal(status, 0);
        }
        assert_int_equal(read(told[0], first, 32), 32);
        for (int i = 1; i < STARTERS; i++) {
            assert_int_equal(read(told[0], other, 32), 32);
            assert_memory_equal(first, other, 32);
        }
        close(told[0]);
        unlink(path);
    }
}

static void expect(pgd_err wanted, const char *at, const char *text)
{
    uint8_t a[32];
    pgd_why why = {{0}};
    assert_int_equal(hash_seed_load(a, at, &why), wanted);
    if (strncmp(why.text, "kv_hash_seed_file: ", 19) != 0 || strstr(why.text, text) == NULL)
        fail_msg("%s", why.text);
}

static void test_hash_seed_refuses(void **state)
{
    (void)state;
    char beyond[128];
    write_file("too short", 9);
    expect(PGD_EINVAL, path, "expected 32 bytes, got 9");
    expect(PGD_EINVAL, dir, "expected a regular file");
    snprintf(beyond, sizeof beyond, "%s/none/seed", dir);
    expect(PGD_EIO, beyond, "No such file or directory");
    snprintf(beyond, sizeof beyond, "%s/seed", path);
    expect(PGD_EIO, beyond, "Not a directory");
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0); /* nobody would ever write to it */
    expect(PGD_EINVAL, path, "expected a regular file");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hash_seed_is_made_and_kept, setup, teardown),
        cmocka_unit_test_setup_teardown(test_hash_seed_of_a_file_that_is_there, setup, teardown),
        cmocka_unit_test_setup_teardown(test_hash_seed_fills_an_empty_file, setup, teardown),
        cmocka_unit_test_setup_teardown(test_hash_seed_is_one_for_all_who_start_together, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_hash_seed_refuses, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
