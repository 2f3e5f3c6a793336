/* CORS: which lines which page gets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/http/http_cors.h"

static const char expose[] = "Access-Control-Expose-Headers: X-Request-Id, Retry-After\r\n";

static void check(const char *allowed, const http_cors_request *req, const char *wanted_begin,
                  const char *wanted_end)
{
    strbuf b, wanted;
    strbuf_init(&b);
    strbuf_init(&wanted);
    http_cors_append(&b, allowed, req);
    strbuf_appendf(&wanted, "%s%s", wanted_begin, wanted_end);
    assert_string_equal(b.data != NULL ? b.data : "", wanted.data);
    strbuf_deinit(&b);
    strbuf_deinit(&wanted);
}

static void test_http_cors_answers(void **state)
{
    (void)state;
    static const char list[] = "https://a.example,http://b.example:81 , https://c.example";
    http_cors_request none = {0};
    http_cors_request a = {.origin = "https://a.example"};
    http_cors_request b = {.origin = "http://b.example:81"};
    http_cors_request other = {.origin = "https://a.example.evil"};
    http_cors_request null_origin = {.origin = "null"};
    check("", &a, "", "");
    check(list, &none, "Vary: Origin\r\n", "");
    check(list, &other, "Vary: Origin\r\n", "");
    check(list, &(http_cors_request){.origin = "https://a.exampl"}, "Vary: Origin\r\n", "");
    check(list, &(http_cors_request){.origin = ""}, "Vary: Origin\r\n", "");
    check(list, &null_origin, "Vary: Origin\r\n", "");
    check(list, &a, "Vary: Origin\r\nAccess-Control-Allow-Origin: https://a.example\r\n", expose);
    check(list, &b, "Vary: Origin\r\nAccess-Control-Allow-Origin: http://b.example:81\r\n", expose);
    check("*", &none, "", "");
    check("*", &other, "Access-Control-Allow-Origin: *\r\n", expose);
}

static void test_http_cors_preflight(void **state)
{
    (void)state;
    static const char methods[] = "Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS\r\n"
                                  "Access-Control-Max-Age: 600\r\n";
    char long_list[4000];
    http_cors_request req = {
        .origin = "https://a.example", .requested_method = "POST", .is_options = true};
    check("https://b.example", &req, "Vary: Origin\r\n", "");
    check("*", &req, "Access-Control-Allow-Origin: *\r\n", methods);
    memset(long_list, 'x', sizeof(long_list));
    long_list[sizeof(long_list) - 1] = '\0';
    req.requested_headers = long_list; /* not echoed */
    check("*", &req, "Access-Control-Allow-Origin: *\r\n", methods);
    req.is_options = false; /* the header alone makes no preflight */
    check("*", &req, "Access-Control-Allow-Origin: *\r\n", expose);
    req.is_options = true;
    req.requested_headers = "authorization,x-stainless-os";
    strbuf b;
    strbuf_init(&b);
    http_cors_append(&b, "https://a.example", &req);
    assert_non_null(
        strstr(b.data, "\r\nAccess-Control-Allow-Headers: authorization,x-stainless-os\r\n"));
    strbuf_deinit(&b);
}

static void test_http_cors_check(void **state)
{
    (void)state;
    static const char *const good[] = {
        "", "*", " , ", "https://a", "http://[::1]:80, *", "app://x,https://y"};
    static const char *const bad[] = {"a.example",   "https://",        "https://a/", "https://a/b",
                                      "://a",        "https://a b",     "**",         "*.example",
                                      "https://a,b", "b,https://a.com", "https://a\n"};
    pgd_why why;
    for (size_t i = 0; i < PGD_ARRAY_LEN(good); i++) {
        if (http_cors_check(good[i], &why) != PGD_OK)
            fail_msg("%s: %s", good[i], why.text);
    }
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++) {
        if (http_cors_check(bad[i], &why) != PGD_EINVAL)
            fail_msg("\"%s\" was taken", bad[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_http_cors_answers),
        cmocka_unit_test(test_http_cors_preflight),
        cmocka_unit_test(test_http_cors_check),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
