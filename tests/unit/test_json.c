/* What json_parse takes, what it refuses, and U+0000. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/json.h"
#include "common/mem.h"

static pgd_err parse(cJSON **out, const char *text, size_t n)
{
    pgd_why why = {0};
    pgd_err err = json_parse(out, text, n, JSON_MAX_DEPTH, &why);
    assert_true((err == PGD_OK) == (*out != NULL));
    assert_true(err == PGD_OK || why.text[0] != '\0');
    return err;
}

static void test_json_refuses(void **state)
{
    (void)state;
    static const char *const bad[] = {"",
                                      " ",
                                      "{",
                                      "[1\x07]",
                                      "\x0c{}",
                                      "}",
                                      "[1,]",
                                      "{\"a\":}",
                                      "{\"a\" 1}",
                                      "nul",
                                      "NaN",
                                      "[Infinity]",
                                      "[-Infinity]",
                                      "[1e999]",
                                      "[-1e999]",
                                      "[01]",
                                      "[1.]",
                                      "[.5]",
                                      "[+1]",
                                      "[1e]",
                                      "[1e+]",
                                      "[0x10]",
                                      "[1.2.3]",
                                      "{} x",
                                      "[1] [2]",
                                      "'a'",
                                      "\"a",
                                      "\"\\",
                                      "\"\\x\"",
                                      "\"\\u12\"",
                                      "\"\\ud800\"",
                                      "\"\x01\"",
                                      "\"\xff\"",
                                      "\"\xc0\x80\"",
                                      "\"\xed\xa0\x80\"",
                                      "{\"a\":1,}",
                                      "{1:2}",
                                      "[\"a\\\"]"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++) {
        cJSON *tree = NULL;
        if (parse(&tree, bad[i], strlen(bad[i])) == PGD_OK)
            fail_msg("taken: %s", bad[i]);
    }
    cJSON *tree = NULL;
    assert_int_not_equal(parse(&tree, "[1\0]", 4), PGD_OK);
}

static void test_json_takes(void **state)
{
    (void)state;
    static const char *const good[] = {"0",
                                       "-0",
                                       "[]",
                                       "{}",
                                       " [1 , 2.5e-3, -7E+2] \n",
                                       "\"\\u00e9\\ud83d\\ude00\"",
                                       "\"\xf0\x9f\x98\x80\"",
                                       "{\"a\":[true,false,null]}",
                                       "\"[[[{{{\"",
                                       "[1e-999]",
                                       "\"\\\\u0000\""};
    for (size_t i = 0; i < PGD_ARRAY_LEN(good); i++) {
        cJSON *tree = NULL;
        if (parse(&tree, good[i], strlen(good[i])) != PGD_OK)
            fail_msg("refused: %s", good[i]);
        cJSON_Delete(tree);
    }
}

static void test_json_depth(void **state)
{
    (void)state;
    char text[2 * 70];
    for (int depth = 60; depth < 70; depth++) {
        cJSON *tree = NULL;
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        assert_int_equal(parse(&tree, text, 2 * (size_t)depth) == PGD_OK, depth <= JSON_MAX_DEPTH);
        cJSON_Delete(tree);
    }
}

static void test_json_nul_survives(void **state)
{
    (void)state;
    cJSON *tree = NULL;
    size_t n;
    const char *text = "{\"p\":\"a\\u0000b\\\\u0000\\u0000\"}";
    assert_int_equal(parse(&tree, text, strlen(text)), PGD_OK);
    for (int i = 0; i < 2; i++) { /* the tree is not changed by reading it */
        char *s = json_string_dup(json_get(tree, "p"), &n);
        assert_int_equal(n, 10);
        assert_memory_equal(s, "a\0b\\u0000\0", 10);
        mem_free(s);
    }
    cJSON_Delete(tree);
}

static void test_json_getters(void **state)
{
    (void)state;
    cJSON *tree = NULL;
    pgd_why why;
    const char *text = "{\"i\":7,\"f\":7.5,\"s\":\"x\",\"b\":true,\"n\":null,\"big\":1e30,\"i\":8}";
    assert_int_equal(parse(&tree, text, strlen(text)), PGD_OK);
    int64_t i = -1;
    double f = 0;
    bool b = false;
    assert_int_equal(json_get_i64(&i, tree, "i", 0, 10, &why), PGD_OK);
    assert_int_equal(i, 7);
    assert_int_equal(json_get_i64(&i, tree, "i", 0, 6, &why), PGD_ERANGE);
    assert_int_equal(json_get_i64(&i, tree, "f", 0, 10, &why), PGD_EINVAL);
    assert_int_equal(json_get_i64(&i, tree, "s", 0, 10, &why), PGD_EINVAL);
    assert_int_equal(json_get_i64(&i, tree, "big", INT64_MIN, INT64_MAX, &why), PGD_ERANGE);
    assert_int_equal(json_get_i64(&i, tree, "absent", 0, 10, &why), PGD_OK);
    assert_int_equal(json_get_i64(&i, tree, "n", 0, 10, &why), PGD_OK);
    assert_int_equal(i, 7);
    assert_int_equal(json_get_f64(&f, tree, "f", &why), PGD_OK);
    assert_true(f == 7.5);
    assert_int_equal(json_get_bool(&b, tree, "b", &why), PGD_OK);
    assert_true(b);
    assert_int_equal(json_get_bool(&b, tree, "i", &why), PGD_EINVAL);
    assert_null(json_get(tree, "n"));
    cJSON_Delete(tree);
}

static void test_json_bounded(void **state)
{
    (void)state;
    cJSON *tree;
    pgd_why why = {0};
    static const struct {
        const char *text;
        size_t n_values;
    } rows[] = {{"1", 1}, {"[1,2,3]", 4}, {"{\"a\":[1],\"b\":\"x,[{y\"}", 4}};
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        size_t n = strlen(rows[i].text);
        assert_int_equal(json_parse_bounded(&tree, rows[i].text, n, 8, rows[i].n_values, &why),
                         PGD_OK);
        cJSON_Delete(tree);
        if (rows[i].n_values == 1)
            continue;
        assert_int_equal(json_parse_bounded(&tree, rows[i].text, n, 8, rows[i].n_values - 1, &why),
                         PGD_ERANGE);
        assert_null(tree);
        assert_non_null(strstr(why.text, "values"));
    }
}

/* A child with little memory left: what cannot be parsed for want of it is no syntax error. */
static void test_json_out_of_memory(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* it reserves more address space than any limit allows */
#endif
    pid_t pid = fork();
    if (pid == 0) {
        enum { N = 4 << 20 };
        char *text = malloc(N);
        memset(text, ',', N);
        for (size_t i = 1; i < N - 1; i += 2)
            text[i] = '1';
        text[0] = '[';
        text[N - 1] = ']';
        text[N - 2] = ' ';
        struct rlimit limit = {(rlim_t)48 << 20, (rlim_t)48 << 20};
        cJSON *tree;
        _exit(setrlimit(RLIMIT_AS, &limit) != 0 ||
              json_parse(&tree, text, N, 8, NULL) != PGD_ENOMEM);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_json_refuses),       cmocka_unit_test(test_json_takes),
        cmocka_unit_test(test_json_depth),         cmocka_unit_test(test_json_nul_survives),
        cmocka_unit_test(test_json_getters),       cmocka_unit_test(test_json_bounded),
        cmocka_unit_test(test_json_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
