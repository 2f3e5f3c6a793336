/* API keys: the file, what is open without one, both headers, and that a bad file changes nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/http/http_auth.h"

#define PATH_BYTES 64

static void write_keys(char path[PATH_BYTES], const char *text, size_t n_bytes)
{
    strcpy(path, "/tmp/paged-test-keys-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, n_bytes), (ssize_t)n_bytes);
    close(fd);
}

static pgd_err load_text(http_auth *a, const char *text, size_t n_bytes, pgd_why *why)
{
    char path[PATH_BYTES];
    write_keys(path, text, n_bytes);
    memset(why, 0, sizeof(*why));
    pgd_err err = http_auth_load(a, path, why);
    unlink(path);
    return err;
}

static bool takes(const http_auth *a, const char *authorization, const char *x_api_key)
{
    return http_auth_allows(a, "POST", "/v1/completions", authorization, x_api_key);
}

static void test_http_auth_without_keys_everything_is_allowed(void **state)
{
    (void)state;
    http_auth *a;
    pgd_why why;
    unsetenv("CREDENTIALS_DIRECTORY");
    assert_int_equal(http_auth_create(&a), PGD_OK);
    assert_int_equal(http_auth_load(a, "", &why), PGD_OK);
    assert_int_equal(http_auth_n_keys(a), 0);
    assert_true(takes(a, NULL, NULL));
    assert_true(takes(a, "Bearer whatever", NULL));
    http_auth_destroy(a);
}

static void test_http_auth_headers(void **state)
{
    (void)state;
    static const char text[] = "# the first\nalpha-1\n\n  beta\"2\\  \r\n#alpha-3\ngamma";
    static const struct {
        const char *authorization;
        const char *x_api_key;
        bool is_allowed;
    } rows[] = {
        {"Bearer alpha-1", NULL, true},
        {"bearer alpha-1", NULL, true},
        {"BEARER   gamma", NULL, true},
        {NULL, "beta\"2\\", true},
        {"Basic YWxwaGEtMQ==", "gamma", true}, /* a proxy's own header beside the key */
        {"Bearer wrong", "gamma", true},
        {NULL, NULL, false},
        {"", "", false},
        {"Bearer", NULL, false},
        {"Bearer ", NULL, false},
        {"Beareralpha-1", NULL, false},
        {"Basic alpha-1", NULL, false},
        {"alpha-1", NULL, false},
        {"Bearer alpha-", NULL, false},
        {"Bearer alpha-11", NULL, false},
        {"Bearer ALPHA-1", NULL, false},
        {"Bearer #alpha-3", NULL, false},
        {"Bearer alpha-3", NULL, false},
        {NULL, "Bearer alpha-1", false},
    };
    http_auth *a;
    pgd_why why;
    assert_int_equal(http_auth_create(&a), PGD_OK);
    if (load_text(a, text, sizeof(text) - 1, &why) != PGD_OK)
        fail_msg("%s", why.text);
    assert_int_equal(http_auth_n_keys(a), 3);
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        if (takes(a, rows[i].authorization, rows[i].x_api_key) != rows[i].is_allowed)
            fail_msg("row %zu", i);
    }
    http_auth_destroy(a);
}

static void test_http_auth_open_paths(void **state)
{
    (void)state;
    static const struct {
        const char *method, *path;
        bool is_open;
    } rows[] = {
        {"GET", "/health", true},
        {"HEAD", "/health", true},
        {"GET", "/v1/models", true},
        {"GET", "/v1/models/a/b", true},
        {"OPTIONS", "/v1/completions", true},
        {"POST", "/health", false},
        {"DELETE", "/v1/models/a", false},
        {"GET", "/v1/modelsx", false},
        {"GET", "/v1/model", false},
        {"GET", "/healthz", false},
        {"GET", "/HEALTH", false},
        {"GET", "/metrics", false},
        {"GET", "/version", false},
        {"GET", "/", false},
        {"GET", "/no/such/path", false},
        {"POST", "/v1/completions", false},
    };
    http_auth *a;
    pgd_why why;
    assert_int_equal(http_auth_create(&a), PGD_OK);
    assert_int_equal(load_text(a, "k\n", 2, &why), PGD_OK);
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        if (http_auth_allows(a, rows[i].method, rows[i].path, NULL, NULL) != rows[i].is_open)
            fail_msg("%s %s", rows[i].method, rows[i].path);
    }
    http_auth_destroy(a);
}

/* Every fault names the line, never what is in it, and leaves the old keys in force. */
static void test_http_auth_bad_files_keep_the_old_keys(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t n_bytes;
        const char *told;
    } rows[] = {
        {"", 0, "got no key"},
        {"\n\n# only words\n   \n", 19, "got no key"},
        {"good\nhas SECRET blank\n", 22, "line 2: expected visible ASCII, got another byte at col"},
        {"SECRET\0x\n", 9, "line 1: expected visible ASCII"},
        {"SECRET\x7F\n", 8, "line 1: expected visible ASCII"},
        {"SECRET\xC3\xA9\n", 9, "line 1: expected visible ASCII"},
    };
    http_auth *a;
    pgd_why why;
    assert_int_equal(http_auth_create(&a), PGD_OK);
    assert_int_equal(load_text(a, "old\n", 4, &why), PGD_OK);
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        assert_int_equal(load_text(a, rows[i].text, rows[i].n_bytes, &why), PGD_EINVAL);
        if (strstr(why.text, rows[i].told) == NULL || strstr(why.text, "SECRET") != NULL ||
            strstr(why.text, "api_key_file: /tmp/paged-test-keys-") == NULL)
            fail_msg("row %zu: %s", i, why.text);
        assert_true(takes(a, "Bearer old", NULL));
        assert_false(takes(a, "Bearer good", NULL));
    }
    assert_int_equal(http_auth_load(a, "/no/such/file", &why), PGD_EINVAL);
    assert_non_null(strstr(why.text, "/no/such/file"));
    assert_int_equal(http_auth_load(a, "/tmp", &why), PGD_EINVAL);
    assert_int_equal(http_auth_load(a, "", &why), PGD_OK); /* none named: not a way to open it */
    assert_int_equal(http_auth_n_keys(a), 1);
    http_auth_destroy(a);
}

static void test_http_auth_bounds(void **state)
{
    (void)state;
    http_auth *a;
    pgd_why why;
    static char text[(HTTP_AUTH_MAX_KEYS + 1) * 8];
    char key[HTTP_AUTH_MAX_KEY_BYTES + 2];
    size_t n = 0;
    assert_int_equal(http_auth_create(&a), PGD_OK);
    for (int i = 0; i < HTTP_AUTH_MAX_KEYS; i++)
        n += (size_t)snprintf(text + n, sizeof(text) - n, "k%05d\n", i);
    assert_int_equal(load_text(a, text, n, &why), PGD_OK);
    assert_int_equal(http_auth_n_keys(a), HTTP_AUTH_MAX_KEYS);
    assert_true(takes(a, "Bearer k00000", NULL));
    assert_true(takes(a, "Bearer k01023", NULL));
    assert_false(takes(a, "Bearer k01024", NULL));
    n += (size_t)snprintf(text + n, sizeof(text) - n, "k%05d\n", HTTP_AUTH_MAX_KEYS);
    assert_int_equal(load_text(a, text, n, &why), PGD_EINVAL);
    assert_non_null(strstr(why.text, "line 1025: expected at most 1024 keys"));

    memset(key, 'a', sizeof(key));
    assert_int_equal(load_text(a, key, HTTP_AUTH_MAX_KEY_BYTES, &why), PGD_OK);
    assert_int_equal(load_text(a, key, HTTP_AUTH_MAX_KEY_BYTES + 1, &why), PGD_EINVAL);
    key[HTTP_AUTH_MAX_KEY_BYTES] = '\0';
    assert_true(takes(a, NULL, key));
    http_auth_destroy(a);
}

static void test_http_auth_systemd_credential(void **state)
{
    (void)state;
    http_auth *a;
    pgd_why why;
    char dir[] = "/tmp/paged-test-cred-XXXXXX";
    char path[128], named[PATH_BYTES];
    assert_non_null(mkdtemp(dir));
    setenv("CREDENTIALS_DIRECTORY", dir, 1);
    assert_int_equal(http_auth_create(&a), PGD_OK);
    assert_int_equal(http_auth_load(a, "", &why), PGD_OK); /* no such credential */
    assert_int_equal(http_auth_n_keys(a), 0);
    snprintf(path, sizeof(path), "%s/api-keys", dir);
    FILE *f = fopen(path, "w");
    fputs("from-systemd\n", f);
    fclose(f);
    assert_int_equal(http_auth_load(a, "", &why), PGD_OK);
    assert_true(takes(a, "Bearer from-systemd", NULL));
    write_keys(named, "from-file\n", 10);
    assert_int_equal(http_auth_load(a, named, &why), PGD_OK); /* what is named goes first */
    assert_false(takes(a, "Bearer from-systemd", NULL));
    assert_true(takes(a, "Bearer from-file", NULL));
    f = fopen(path, "w");
    fclose(f);
    assert_int_equal(http_auth_load(a, "", &why), PGD_EINVAL); /* there, but empty */
    unlink(path);
    /* There but out of reach is a fault, not a server without keys (root may read everything, so a
     * loop of links stands for "permission denied"). */
    assert_int_equal(symlink("api-keys", path), 0);
    assert_int_equal(http_auth_load(a, "", &why), PGD_EINVAL);
    assert_non_null(strstr(why.text, path));
    unlink(path);
    setenv("CREDENTIALS_DIRECTORY", named, 1); /* a file */
    assert_int_equal(http_auth_load(a, "", &why), PGD_EINVAL);
    unsetenv("CREDENTIALS_DIRECTORY");
    unlink(named);
    rmdir(dir);
    http_auth_destroy(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_http_auth_without_keys_everything_is_allowed),
        cmocka_unit_test(test_http_auth_headers),
        cmocka_unit_test(test_http_auth_open_paths),
        cmocka_unit_test(test_http_auth_bad_files_keep_the_old_keys),
        cmocka_unit_test(test_http_auth_bounds),
        cmocka_unit_test(test_http_auth_systemd_credential),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
