/* Which key of a file is sent, and what is none. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <unistd.h>

#include <cmocka.h>

#include "engine/http/client_key.h"

static pgd_err read_key(const char *text, size_t n, char out[CLIENT_KEY_HEADER_BYTES], pgd_why *why)
{
    char path[] = "/tmp/paged-test-key-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, n), n);
    close(fd);
    pgd_err err = client_key_header(out, path, why);
    unlink(path);
    return err;
}

static void test_client_key_lines(void **state)
{
    (void)state;
    static const char *const files[] = {"sk-1",
                                        "sk-1\n",
                                        "sk-1\r\nsk-2\n",
                                        "  sk-1 \nsk-2",
                                        "\n\n# a comment\n  # another\nsk-1\n",
                                        "#\n\t\r\nsk-1"};
    char out[CLIENT_KEY_HEADER_BYTES];
    for (size_t i = 0; i < PGD_ARRAY_LEN(files); i++) {
        assert_int_equal(read_key(files[i], strlen(files[i]), out, NULL), PGD_OK);
        assert_string_equal(out, "Authorization: Bearer sk-1\r\n");
    }
    assert_int_equal(client_key_header(out, "", NULL), PGD_OK);
    assert_string_equal(out, "");
}

static void test_client_key_refuses(void **state)
{
    (void)state;
    static const char *const files[] = {"",
                                        "\n",
                                        "# only\n",
                                        "   ",
                                        "k\xc3\xa9y\n",
                                        "a\x01"
                                        "b"};
    char out[CLIENT_KEY_HEADER_BYTES];
    char longer[600];
    for (size_t i = 0; i < PGD_ARRAY_LEN(files); i++) {
        pgd_why why = {0};
        assert_int_equal(read_key(files[i], strlen(files[i]), out, &why), PGD_EINVAL);
        assert_string_equal(out, "");
        assert_non_null(strstr(why.text, "expected a key"));
    }
    memset(longer, 'k', sizeof(longer));
    assert_int_equal(read_key(longer, 512, out, NULL), PGD_OK);
    assert_int_equal(read_key(longer, 513, out, NULL), PGD_EINVAL);
    assert_int_equal(client_key_header(out, "/nowhere/key", NULL), PGD_ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_client_key_lines),
        cmocka_unit_test(test_client_key_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
