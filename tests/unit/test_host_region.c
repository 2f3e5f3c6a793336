/* The host tier's file: who gets it, what of it is taken up again, and that its index tells the truth
 * whenever its engine is killed. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"
#include "engine/offload/host_region.h"

enum { N_BLOCKS = 8, SHARD_BYTES = 3000, N_KEYS = 32, NOT_ALLOWED = 77 };

static char dir[64];
static uint8_t seed[32] = {1, 2, 3};

static host_region_opts make_opts(bool persists)
{
    host_region_opts o = {.shape = {.n_blocks = N_BLOCKS, .n_ranks = 1, .shard_bytes = SHARD_BYTES},
                          .n_groups = 2,
                          .seed = persists ? seed : NULL,
                          .dir = dir};
    memset(o.fingerprint, 7, sizeof o.fingerprint);
    return o;
}

/* An engine: region and manager. */
typedef struct tier {
    host_region *region;
    offload_manager *m;
    int32_t n_restored;
} tier;

static void open_tier(tier *t, const host_region_opts *o)
{
    pgd_why why = {0};
    if (host_region_create(&t->region, o, &why) != PGD_OK)
        fail_msg("%s", why.text);
    offload_manager_opts m = {.capacity = o->shape.n_blocks,
                              .policy = offload_policy_lru(),
                              .on_stored = host_region_on_stored,
                              .on_removed = host_region_on_removed,
                              .on_touched = host_region_on_touched,
                              .on_reset = host_region_on_reset,
                              .arg = t->region};
    assert_int_equal(offload_manager_create(&t->m, &m), PGD_OK);
    assert_int_equal(host_region_restore(&t->n_restored, t->region, t->m), PGD_OK);
    offload_manager_check(t->m);
}

static void close_tier(tier *t)
{
    offload_manager_destroy(t->m);
    host_region_destroy(t->region);
}

static offload_key key_of(int32_t number)
{
    offload_key key = {.group_id = number % 2};
    memset(key.hash.bytes, 0x5a, sizeof key.hash.bytes);
    memcpy(key.hash.bytes, &number, sizeof number);
    return key;
}

static void fill(const tier *t, int32_t medium_id, int32_t number)
{
    const kv_region *memory = host_region_get_memory(t->region);
    memset(kv_region_get_shard(memory, medium_id, 0), number, SHARD_BYTES);
    kv_region_seal(memory, medium_id, 0, (uint64_t)number,
                   kv_region_get_shard(memory, medium_id, 0));
}

static bool store(tier *t, int32_t number)
{
    offload_key key = key_of(number);
    offload_store s;
    if (!offload_manager_prepare_store(&s, t->m, &key, 1))
        return false;
    for (int32_t i = 0; i < s.n_stored; i++)
        fill(t, s.medium_ids[i], number);
    offload_manager_complete_store(t->m, &key, 1, true, offload_manager_generation(t->m));
    return true;
}

/* Whether the tier has it; then it must be what was stored. */
static bool has(tier *t, int32_t number)
{
    const kv_region *memory = host_region_get_memory(t->region);
    offload_key key = key_of(number);
    int32_t id;
    if (!offload_manager_prepare_load(&id, t->m, &key, 1))
        return false;
    const uint8_t *shard = kv_region_get_shard(memory, id, 0);
    assert_true(kv_region_holds(memory, id, 0, (uint64_t)number, shard));
    assert_int_equal(shard[SHARD_BYTES - 1], number);
    offload_manager_complete_load(t->m, &key, 1, offload_manager_generation(t->m));
    return true;
}

static int32_t n_files(void)
{
    int32_t n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d))
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static void remove_files(void)
{
    DIR *d = opendir(dir);
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d))
        if (e->d_name[0] != '.')
            assert_int_equal(unlinkat(dirfd(d), e->d_name, 0), 0);
    closedir(d);
}

static void test_host_region_ends_with_its_engine(void **state)
{
    (void)state;
    host_region_opts o = make_opts(false);
    tier t;
    pgd_why why = {0};
    kv_region worker = {0};
    open_tier(&t, &o);
    assert_int_equal(t.n_restored, 0);
    assert_false(host_region_is_persistent(t.region));
    assert_int_equal(n_files(), 0);
    /* A worker finds what the engine's side holds, and the other way round. */
    if (kv_region_open(&worker, host_region_get_path(t.region), &o.shape, &why) != PGD_OK)
        fail_msg("%s", why.text);
    offload_key key = key_of(5);
    offload_store s;
    assert_true(offload_manager_prepare_store(&s, t.m, &key, 1));
    memset(kv_region_get_shard(&worker, s.medium_ids[0], 0), 5, SHARD_BYTES);
    kv_region_seal(&worker, s.medium_ids[0], 0, 5,
                   kv_region_get_shard(&worker, s.medium_ids[0], 0));
    offload_manager_complete_store(t.m, &key, 1, true, 0);
    assert_true(has(&t, 5));
    /* Nobody can cut it short. */
    assert_true(truncate(host_region_get_path(t.region), 4096) != 0);
    kv_region_unmap(&worker);
    close_tier(&t);
    open_tier(&t, &o);
    assert_int_equal(t.n_restored, 0);
    close_tier(&t);
}

static void test_host_region_persists_in_order(void **state)
{
    (void)state;
    host_region_opts o = make_opts(true);
    tier t;
    open_tier(&t, &o);
    assert_true(host_region_is_persistent(t.region));
    assert_int_equal(n_files(), 1);
    for (int32_t i = 0; i < N_BLOCKS; i++)
        assert_true(store(&t, i));
    offload_key touched[] = {key_of(1), key_of(0)};
    offload_manager_touch(t.m, touched, 2);
    store(&t, 20); /* 2 gives way */
    assert_false(has(&t, 2));
    close_tier(&t);

    open_tier(&t, &o);
    assert_int_equal(t.n_restored, N_BLOCKS);
    for (int32_t i = 0; i < N_BLOCKS; i++)
        assert_int_equal(has(&t, i), i != 2);
    static const int32_t order[] = {3, 4, 5, 6, 7, 0, 1, 20};
    for (int32_t i = 0; i < N_BLOCKS; i++) {
        assert_true(has(&t, order[i]));
        store(&t, 21 + i);
        assert_false(has(&t, order[i]));
    }
    /* A failed store and one under way are not there later. */
    offload_key failed = key_of(1), pending = key_of(2);
    offload_store s;
    assert_true(offload_manager_prepare_store(&s, t.m, &failed, 1));
    offload_manager_complete_store(t.m, &failed, 1, false, 0);
    assert_true(offload_manager_prepare_store(&s, t.m, &pending, 1));
    close_tier(&t);
    open_tier(&t, &o);
    assert_int_equal(t.n_restored, N_BLOCKS - 1);
    assert_false(has(&t, 1) || has(&t, 2));
    /* What comes after a restart is more recent than all from before it. */
    assert_true(store(&t, 40));
    close_tier(&t);
    open_tier(&t, &o);
    for (int32_t i = 41; i < 40 + N_BLOCKS; i++)
        assert_true(store(&t, i));
    assert_true(has(&t, 40));
    assert_true(store(&t, 50));
    assert_false(has(&t, 40));
    offload_manager_reset(t.m);
    close_tier(&t);
    open_tier(&t, &o);
    assert_int_equal(t.n_restored, 0);
    close_tier(&t);
    remove_files();
}

static void test_host_region_of_another_fingerprint_is_emptied(void **state)
{
    (void)state;
    tier t;
    for (int32_t i = 0; i < 4; i++) {
        host_region_opts o = make_opts(true);
        open_tier(&t, &o);
        store(&t, 3);
        char path[512];
        snprintf(path, sizeof path, "%s", host_region_get_path(t.region));
        close_tier(&t);
        switch (i) {
        case 0:
            o.fingerprint[31]++;
            break;
        case 1:
            o.shape.n_blocks--;
            break;
        case 2:
            o.shape.shard_bytes++;
            break;
        default:
            assert_int_equal(truncate(path, 5000), 0);
        }
        open_tier(&t, &o);
        assert_true(host_region_is_persistent(t.region));
        assert_int_equal(t.n_restored, 0);
        store(&t, 4);
        close_tier(&t);
        open_tier(&t, &o);
        assert_int_equal(t.n_restored, 1);
        assert_true(has(&t, 4));
        /* While it is open: the worker has become another. */
        assert_true(host_region_has_fingerprint(t.region, o.fingerprint));
        o.fingerprint[0]++;
        assert_false(host_region_has_fingerprint(t.region, o.fingerprint));
        host_region_set_fingerprint(t.region, o.fingerprint);
        assert_true(host_region_has_fingerprint(t.region, o.fingerprint));
        close_tier(&t);
        open_tier(&t, &o);
        assert_int_equal(t.n_restored, 0);
        close_tier(&t);
        remove_files();
    }
}

static void test_host_region_has_one_engine(void **state)
{
    (void)state;
    host_region_opts o = make_opts(true);
    tier a, b;
    open_tier(&a, &o);
    store(&a, 1);
    open_tier(&b, &o);
    assert_false(host_region_is_persistent(b.region));
    assert_false(has(&b, 1));
    store(&b, 2);
    assert_false(has(&a, 2));
    close_tier(&a);
    close_tier(&b);
    open_tier(&a, &o);
    assert_int_equal(a.n_restored, 1);
    uint8_t first = seed[0]++; /* another secret, another file */
    open_tier(&b, &o);
    assert_true(host_region_is_persistent(b.region));
    assert_int_equal(b.n_restored, 0);
    seed[0] = first;
    close_tier(&a);
    close_tier(&b);
    remove_files();
}

/* Who else could have put there what has our name is not trusted with our memory. */
static void test_host_region_takes_no_foreign_file(void **state)
{
    (void)state;
    host_region_opts o = make_opts(true);
    char path[512], other[512];
    tier t;
    open_tier(&t, &o);
    snprintf(path, sizeof path, "%s", host_region_get_path(t.region));
    snprintf(other, sizeof other, "%s/other", dir);
    close_tier(&t);
    for (int32_t i = 0; i < 4; i++) {
        assert_true(i == 0 || mknod(other, S_IFREG | 0600, 0) == 0);
        if (i == 0)
            assert_int_equal(chmod(path, 0640), 0);
        else if (i == 1)
            assert_int_equal(symlink(other, path), 0);
        else if (i == 2)
            assert_int_equal(link(other, path), 0);
        else
            assert_int_equal(mkfifo(path, 0600), 0);
        open_tier(&t, &o);
        assert_false(host_region_is_persistent(t.region));
        close_tier(&t);
        remove_files();
    }
}

static void test_host_region_with_a_name_for_a_worker_apart(void **state)
{
    (void)state;
    host_region_opts o = make_opts(false);
    o.is_named = true;
    char stale[512];
    tier a, b;
    snprintf(stale, sizeof stale, "%s/paged-kv-%lu-tmp-1-0", dir, (unsigned long)geteuid());
    assert_int_equal(mknod(stale, S_IFREG | 0600, 0), 0);
    open_tier(&a, &o);
    assert_int_equal(n_files(), 1); /* the stale one is gone */
    assert_int_equal(strncmp(host_region_get_path(a.region), dir, strlen(dir)), 0);
    open_tier(&b, &o);
    assert_int_equal(n_files(), 2);
    assert_string_not_equal(host_region_get_path(a.region), host_region_get_path(b.region));
    store(&a, 1);
    assert_true(has(&a, 1) && !has(&b, 1));
    close_tier(&a);
    close_tier(&b);
    assert_int_equal(n_files(), 0);
}

/* Whatever an index says, the manager stays sound. */
static void test_host_region_index_is_outside_data(void **state)
{
    (void)state;
    host_region_opts o = make_opts(true);
    uint64_t rng = 11;
    for (int32_t round = 0; round < 200; round++) {
        tier t;
        open_tier(&t, &o);
        for (int32_t i = 0; i < N_BLOCKS; i++)
            store(&t, i);
        kv_region_entry *first = kv_region_get_entry(host_region_get_memory(t.region), 0);
        for (int32_t i = 0; i < 3; i++) {
            rng = hash_u64(rng + 1);
            size_t at = (size_t)(rng % (N_BLOCKS * sizeof *first));
            if (rng >> 63 != 0)
                ((uint8_t *)first)[at] ^= (uint8_t)(1u << (rng >> 32) % 8);
            else /* two blocks of one key */
                first[at / sizeof *first] = first[rng >> 40 & (N_BLOCKS - 1)];
        }
        close_tier(&t);
        open_tier(&t, &o);
        assert_true(t.n_restored <= N_BLOCKS);
        for (int32_t i = 0; i < N_KEYS; i++)
            assert_true(store(&t, i));
        offload_manager_check(t.m);
        for (int32_t i = 0; i < N_KEYS; i++)
            assert_int_equal(has(&t, i), i >= N_KEYS - N_BLOCKS);
        close_tier(&t);
    }
    remove_files();
}

/* Stores, failures, touches and a rare reset, until it is killed. */
static void work(const host_region_opts *o, int ready_fd, uint64_t rng)
{
    tier t;
    open_tier(&t, o);
    if (write(ready_fd, "x", 1) != 1)
        _exit(1);
    for (;;) {
        rng = hash_u64(rng + 1);
        offload_key keys[3];
        int32_t first = (int32_t)(rng % (N_KEYS - 3));
        for (int32_t i = 0; i < 3; i++)
            keys[i] = key_of(first + i);
        offload_store s;
        if (!offload_manager_prepare_store(&s, t.m, keys, 3))
            _exit(1);
        for (int32_t i = 0; i < s.n_stored; i++) {
            int32_t number;
            memcpy(&number, s.stored[i].hash.bytes, sizeof number);
            fill(&t, s.medium_ids[i], number);
        }
        offload_manager_complete_store(t.m, keys, 3, rng >> 60 != 0,
                                       offload_manager_generation(t.m));
        offload_manager_touch(t.m, keys, (int32_t)(rng >> 40) % 3);
        if ((rng >> 20 & 0xfff) == 0)
            offload_manager_reset(t.m);
    }
}

static void test_host_region_killed_at_any_moment(void **state)
{
    (void)state;
    host_region_opts o = make_opts(true);
    const char *wanted = getenv("PGD_KILLS");
    int32_t n_kills = wanted != NULL ? atoi(wanted) : 100, n_found = 0;
    for (int32_t i = 0; i < n_kills; i++) {
        int fds[2];
        char byte;
        assert_int_equal(pipe(fds), 0);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0)
            work(&o, fds[1], hash_u64((uint64_t)i));
        close(fds[1]);
        assert_int_equal(read(fds[0], &byte, 1), 1);
        close(fds[0]);
        usleep((useconds_t)(hash_u64((uint64_t)i) % 2000));
        int status;
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        tier t;
        open_tier(&t, &o);
        assert_true(host_region_is_persistent(t.region));
        int32_t n_held = 0;
        for (int32_t k = 0; k < N_KEYS; k++)
            n_held += has(&t, k);
        assert_int_equal(n_held, t.n_restored);
        n_found += n_held;
        close_tier(&t);
    }
    assert_true(n_found > n_kills);
    remove_files();
}

static void test_host_region_room(void **state)
{
    (void)state;
    pgd_why why = {0};
    assert_int_equal(host_region_check_room(1 << 20, 2 << 20, NULL, &why), PGD_OK);
    assert_int_equal(host_region_check_room(1 << 20, 2 << 20, dir, &why), PGD_OK);
    assert_int_equal(host_region_check_room(3 << 20, 2 << 20, NULL, &why), PGD_ERANGE);
    assert_non_null(
        strstr(why.text,
               "at most 2 MB, the memory of this machine or the limit of this service, got 3 MB"));
    assert_int_equal(host_region_check_room((uint64_t)1 << 62, UINT64_MAX, dir, &why), PGD_ERANGE);
    assert_non_null(strstr(why.text, dir));
    assert_int_equal(host_region_check_room(1, 2, "/nonexistent", &why), PGD_EIO);
    host_region *r;
    host_region_opts o = make_opts(true);
    o.shape.n_blocks = 0;
    assert_int_equal(host_region_create(&r, &o, &why), PGD_EINVAL);
    remove_files();
}

/* What there is no room for is told at once, not by death later. */
static void test_host_region_takes_its_space(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 2; i++) {
        pgd_why why = {0};
        struct stat st;
        struct rlimit limit, small;
        host_region *r;
        host_region_opts o = make_opts(i == 0);
        o.is_named = true;
        o.shape.n_blocks = 100;
        if (host_region_create(&r, &o, &why) != PGD_OK)
            fail_msg("%s", why.text);
        assert_int_equal(stat(host_region_get_path(r), &st), 0);
        assert_true((uint64_t)st.st_blocks * 512 >= host_region_get_memory(r)->n_bytes);
        host_region_destroy(r);
        o.shape.n_blocks = 1000;
        assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
        small = (struct rlimit){(rlim_t)1 << 20, limit.rlim_max};
        assert_true(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        assert_int_equal(host_region_create(&r, &o, &why), PGD_EIO);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        assert_int_equal(n_files(), i == 0); /* the empty one that persists */
        remove_files();
    }
}

/* --- a file system of its own ------------------------------------------------------------------- */

static bool write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0)
        close(fd);
    return ok;
}

/* False: we are not allowed to. */
static bool mount_small(void)
{
    char map[32];
    snprintf(map, sizeof map, "0 %ld 1", (long)geteuid());
    if (unshare(CLONE_NEWNS) != 0 &&
        (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 || !write_file("/proc/self/uid_map", map)))
        return false;
    return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("tmpfs", dir, "tmpfs", 0, "size=256k") == 0;
}

static bool fill_up(void)
{
    static const char page[4096];
    char path[128];
    snprintf(path, sizeof path, "%s/filler", dir);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0)
        return false;
    while (write(fd, page, sizeof page) > 0)
        ;
    close(fd);
    return errno == ENOSPC;
}

/* In a child: no assertions. 0: every create was refused for want of space. */
static int create_where_nothing_is_free(void)
{
    host_region *r;
    pgd_why why = {0};
    struct stat st;
    host_region_opts o = make_opts(true);
    o.is_named = true;
    if (host_region_create(&r, &o, &why) != PGD_OK)
        return 1;
    /* One that an engine left at its full length, and nothing in it. */
    int fd = open(host_region_get_path(r), O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0)
        return 2;
    host_region_destroy(r);
    if (ftruncate(fd, 0) != 0 || ftruncate(fd, st.st_size) != 0 || close(fd) != 0 || !fill_up())
        return 3;
    if (host_region_create(&r, &o, &why) != PGD_ENOMEM)
        return 4;
    if (host_region_create(&r, &o, &why) != PGD_ENOMEM) /* now it is empty */
        return 5;
    o.seed = NULL;
    return host_region_create(&r, &o, &why) == PGD_ENOMEM ? 0 : 6;
}

/* No space at all, not even for the first page: a refusal, not death by a signal. */
static void test_host_region_on_a_full_file_system(void **state)
{
    (void)state;
    int status;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0 && signal(SIGBUS, SIG_DFL) != SIG_ERR)
        _exit(mount_small() ? create_where_nothing_is_free() : NOT_ALLOWED);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_ALLOWED)
        skip();
    assert_int_equal(status, 0);
}

static int setup(void **state)
{
    (void)state;
    log_set_level(LOG_ERROR);
    strcpy(dir, "/dev/shm/paged-test-region-XXXXXX");
    return mkdtemp(dir) != NULL ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host_region_ends_with_its_engine),
        cmocka_unit_test(test_host_region_persists_in_order),
        cmocka_unit_test(test_host_region_of_another_fingerprint_is_emptied),
        cmocka_unit_test(test_host_region_has_one_engine),
        cmocka_unit_test(test_host_region_takes_no_foreign_file),
        cmocka_unit_test(test_host_region_with_a_name_for_a_worker_apart),
        cmocka_unit_test(test_host_region_index_is_outside_data),
        cmocka_unit_test(test_host_region_killed_at_any_moment),
        cmocka_unit_test(test_host_region_room),
        cmocka_unit_test(test_host_region_takes_its_space),
        cmocka_unit_test(test_host_region_on_a_full_file_system),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
