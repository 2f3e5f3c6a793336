/* Who may talk: proofs, the token's file, addresses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/hash.h"
#include "proto/attach.h"

static attach_key key_of(const char *text)
{
    attach_key k = {.n_bytes = strlen(text)};
    memcpy(k.data, text, k.n_bytes);
    return k;
}

/* RFC 4231, test cases 1, 2 and 6; and the empty key, whose value other implementations give too. */
static void test_attach_hmac(void **state)
{
    (void)state;
    uint8_t key[131];
    uint8_t out[HASH_SHA256_BYTES];
    memset(key, 0x0b, 20);
    assert_true(hash_hmac_sha256(out, key, 20, "Hi There", 8));
    assert_memory_equal(out,
                        "\xb0\x34\x4c\x61\xd8\xdb\x38\x53\x5c\xa8\xaf\xce\xaf\x0b\xf1\x2b"
                        "\x88\x1d\xc2\x00\xc9\x83\x3d\xa7\x26\xe9\x37\x6c\x2e\x32\xcf\xf7",
                        32);
    assert_true(hash_hmac_sha256(out, "Jefe", 4, "what do ya want for nothing?", 28));
    assert_memory_equal(out,
                        "\x5b\xdc\xc1\x46\xbf\x60\x75\x4e\x6a\x04\x24\x26\x08\x95\x75\xc7"
                        "\x5a\x00\x3f\x08\x9d\x27\x39\x83\x9d\xec\x58\xb9\x64\xec\x38\x43",
                        32);
    memset(key, 0xaa, sizeof key);
    assert_true(hash_hmac_sha256(out, key, sizeof key,
                                 "Test Using Larger Than Block-Size Key - Hash Key First", 54));
    assert_memory_equal(out,
                        "\x60\xe4\x31\x59\x1e\xe0\xb6\x7f\x0d\x8a\x26\xaa\xcb\xf5\xb7\x7f"
                        "\x8e\x0b\xc6\x21\x37\x28\xc5\x14\x05\x46\x04\x0f\x0e\xe3\x7f\x54",
                        32);
    assert_true(hash_hmac_sha256(out, NULL, 0, "", 0));
    assert_memory_equal(out,
                        "\xb6\x13\x67\x9a\x08\x14\xd9\xec\x77\x2f\x95\xd7\x78\xc3\x5f\xc5"
                        "\xff\x16\x97\xc4\x93\x71\x56\x53\xc6\xc7\x12\x14\x42\x92\xc5\xad",
                        32);
    assert_true(hash_is_equal("abc", "abc", 3));
    assert_false(hash_is_equal("abc", "abd", 3));
}

static attach_terms some_terms(void)
{
    attach_terms t;
    memset(&t, 0, sizeof t);
    assert_int_equal(attach_draw_nonce(t.worker_nonce, NULL), PGD_OK);
    assert_int_equal(attach_draw_nonce(t.engine_nonce, NULL), PGD_OK);
    t.worker_epoch = 7;
    t.max_frame_bytes = 1 << 20;
    return t;
}

/* Every bit of key, terms and proof counts, and so does the role. */
static void test_attach_proof(void **state)
{
    (void)state;
    attach_key key = key_of("0123456789abcdef0123456789abcdef");
    attach_terms terms = some_terms();
    uint8_t proof[CONTROL_PROOF_BYTES];
    pgd_why why = {0};
    assert_int_equal(attach_prove(proof, &key, ATTACH_ENGINE, &terms), PGD_OK);
    assert_int_equal(attach_check(proof, &key, ATTACH_ENGINE, &terms, &why), PGD_OK);
    assert_int_equal(attach_check(proof, &key, ATTACH_WORKER, &terms, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "expected the proof of the same worker token"));
    assert_null(strstr(why.text, "0123"));
    for (size_t bit = 0; bit < 8 * sizeof proof; bit++) {
        proof[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(attach_check(proof, &key, ATTACH_ENGINE, &terms, NULL), PGD_EPROTO);
        proof[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (size_t bit = 0; bit < 8 * key.n_bytes; bit++) {
        key.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(attach_check(proof, &key, ATTACH_ENGINE, &terms, NULL), PGD_EPROTO);
        key.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    uint8_t *raw = (uint8_t *)&terms;
    static_assert(sizeof terms == 2 * CONTROL_NONCE_BYTES + 8, "no padding");
    for (size_t bit = 0; bit < 8 * sizeof terms; bit++) {
        raw[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(attach_check(proof, &key, ATTACH_ENGINE, &terms, NULL), PGD_EPROTO);
        raw[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    attach_key none = {0};
    assert_int_equal(attach_check(proof, &none, ATTACH_ENGINE, &terms, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "having no worker token"));
    assert_int_equal(attach_prove(proof, &none, ATTACH_ENGINE, &terms), PGD_OK);
    assert_int_equal(attach_check(proof, &none, ATTACH_ENGINE, &terms, NULL), PGD_OK);
    assert_int_equal(attach_check(proof, &key, ATTACH_ENGINE, &terms, NULL), PGD_EPROTO);
}

static void test_attach_nonces_differ(void **state)
{
    (void)state;
    attach_terms a = some_terms();
    attach_terms b = some_terms();
    assert_memory_not_equal(a.worker_nonce, b.worker_nonce, CONTROL_NONCE_BYTES);
    assert_memory_not_equal(a.worker_nonce, a.engine_nonce, CONTROL_NONCE_BYTES);
}

/* --- the token's file ------------------------------------------------------------------------- */

static char path_[64];

static void write_file(const void *data, size_t n_bytes, mode_t mode)
{
    snprintf(path_, sizeof path_, "/tmp/paged-test-token-%ld", (long)getpid());
    (void)unlink(path_);
    int fd = open(path_, O_WRONLY | O_CREAT | O_EXCL, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, n_bytes), n_bytes);
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static void expect_refused(pgd_err expected, const char *text)
{
    attach_key key;
    pgd_why why = {0};
    assert_int_equal(attach_read_key(&key, path_, &why), expected);
    if (strstr(why.text, text) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", text, why.text);
}

static void test_attach_key_file(void **state)
{
    (void)state;
    attach_key key;
    static char big[ATTACH_MAX_KEY_BYTES + 3];
    memset(big, 'k', sizeof big);
    write_file("0123456789abcdef0123456789abcdef\n", 33, 0600);
    assert_int_equal(attach_read_key(&key, path_, NULL), PGD_OK);
    assert_int_equal(key.n_bytes, 32);
    assert_memory_equal(key.data, "0123456789abcdef0123456789abcdef", 32);
    write_file("0123456789abcdef0123456789abcdef\r\n", 34, 0400);
    assert_int_equal(attach_read_key(&key, path_, NULL), PGD_OK);
    assert_int_equal(key.n_bytes, 32);
    write_file(big, ATTACH_MAX_KEY_BYTES, 0600);
    assert_int_equal(attach_read_key(&key, path_, NULL), PGD_OK);
    assert_int_equal(key.n_bytes, ATTACH_MAX_KEY_BYTES);
    write_file(big, ATTACH_MAX_KEY_BYTES + 1, 0600);
    expect_refused(PGD_EINVAL, "expected 32 to 1024 bytes");
    write_file(big, sizeof big, 0600);
    expect_refused(PGD_EINVAL, "expected 32 to 1024 bytes, got at least");
    write_file(big, 31, 0600);
    expect_refused(PGD_EINVAL, "got 31");
    write_file("\n", 1, 0600);
    expect_refused(PGD_EINVAL, "got 0");
    write_file("", 0, 0600);
    expect_refused(PGD_EINVAL, "got 0");
    static const mode_t open_modes[] = {0640, 0604, 0660, 0620, 0602, 0610, 0601, 0777};
    for (size_t i = 0; i < PGD_ARRAY_LEN(open_modes); i++) {
        write_file(big, 64, open_modes[i]);
        expect_refused(PGD_EINVAL, "expected mode 0600");
    }
    /* As systemd hands them out. */
    assert_int_equal(setenv("CREDENTIALS_DIRECTORY", "/tmp", 1), 0);
    write_file(big, 64, 0440);
    assert_int_equal(attach_read_key(&key, path_, NULL), PGD_OK);
    write_file(big, 64, 0444);
    expect_refused(PGD_EINVAL, "expected mode 0600, got 0444");
    unsetenv("CREDENTIALS_DIRECTORY");
    (void)unlink(path_);
    expect_refused(PGD_ENOENT, "cannot open");
    assert_int_equal(mkdir(path_, 0700), 0);
    expect_refused(PGD_EINVAL, "expected a regular file");
    assert_int_equal(rmdir(path_), 0);
    assert_int_equal(mkfifo(path_, 0600), 0);
    expect_refused(PGD_EINVAL, "expected a regular file");
    (void)unlink(path_);
}

/* --- addresses -------------------------------------------------------------------------------- */

static void test_attach_urls(void **state)
{
    (void)state;
    static const char *const good[] = {"ipc:///run/paged-worker/0.sock", "tcp://127.0.0.1:7000",
                                       "tcp://127.9.9.9:1", "tcp://localhost:65535",
                                       "tcp://[::1]:7000"};
    static const char *const far[] = {"tcp://10.0.0.1:7000",  "tcp://0.0.0.0:7000",
                                      "tcp://*:7000",         "tcp://[::]:7000",
                                      "tcp://gpu1:7000",      "tcp://[2001:db8::1]:7",
                                      "tcp://128.0.0.1:7000", "tcp://127.0.0.1.example.org:7000"};
    static const char *const bad[] = {"",
                                      "0.sock",
                                      "/run/0.sock",
                                      "ipc://0.sock",
                                      "ipc://",
                                      "ipc:///",
                                      "tcp://",
                                      "tcp://127.0.0.1",
                                      "tcp://:7000",
                                      "tcp://127.0.0.1:0",
                                      "tcp://::1:7",
                                      "tcp://127.0.0.1:65536",
                                      "tcp://127.0.0.1:70x",
                                      "tcp://127.0.0.1:",
                                      "udp://127.0.0.1:7000",
                                      "tcp://127.0.0.1:-1",
                                      "tcp://127.0.0.1: 7",
                                      "TCP://127.0.0.1:7",
                                      "inproc://x",
                                      "ws://127.0.0.1:7"};
    static const char *const unbuilt[] = {"tls+tcp://127.0.0.1:7000",
                                          "ipc:///run/0.sock,ipc:///run/1.sock"};
    pgd_why why = {0};
    for (size_t i = 0; i < PGD_ARRAY_LEN(good); i++)
        if (attach_check_url(good[i], false, &why) != PGD_OK || !attach_is_local(good[i]))
            fail_msg("%s: %s", good[i], why.text);
    for (size_t i = 0; i < PGD_ARRAY_LEN(far); i++) {
        assert_int_equal(attach_check_url(far[i], false, &why), PGD_EINVAL);
        assert_non_null(
            strstr(why.text, "expected a worker_token_file for an address beyond loopback"));
        if (attach_check_url(far[i], true, &why) != PGD_OK || attach_is_local(far[i]))
            fail_msg("%s: %s", far[i], why.text);
    }
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++)
        if (attach_check_url(bad[i], true, &why) != PGD_EINVAL)
            fail_msg("%s passed", bad[i]);
    for (size_t i = 0; i < PGD_ARRAY_LEN(unbuilt); i++) {
        assert_int_equal(attach_check_url(unbuilt[i], true, &why), PGD_EUNSUPPORTED);
        assert_non_null(strstr(why.text, "not built into this version"));
    }
    char path[200] = "ipc:///";
    memset(path + 7, 'x', 106); /* with the slash the longest that a socket can have */
    assert_int_equal(attach_check_url(path, false, &why), PGD_OK);
    path[7 + 106] = 'x';
    assert_int_equal(attach_check_url(path, false, &why), PGD_EINVAL);
    assert_string_equal(attach_ipc_path("ipc:///a/b"), "/a/b");
    assert_null(attach_ipc_path("tcp://127.0.0.1:1"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attach_hmac),          cmocka_unit_test(test_attach_proof),
        cmocka_unit_test(test_attach_nonces_differ), cmocka_unit_test(test_attach_key_file),
        cmocka_unit_test(test_attach_urls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
