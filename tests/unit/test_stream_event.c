/* What is read of an event, what is not mistaken for it, and that nothing malformed is believed or
 * read beyond. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/bench/stream_event.h"

/* From a heap copy without a NUL behind it. */
static bool read_exact(stream_event *e, const char *text, size_t n)
{
    char *copy = malloc(n > 0 ? n : 1);
    assert_non_null(copy);
    memcpy(copy, text, n);
    bool ok = stream_event_read(e, copy, n);
    e->error = ok && e->error != NULL ? "" : NULL; /* a borrow of the copy */
    free(copy);
    return ok;
}

static void test_stream_event_kinds(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool has_text, is_finished, has_usage, is_error, is_done;
        int64_t n_prompt, n_completion, n_cached;
    } rows[] = {
        {"[DONE]", false, false, false, false, true},
        {"{}"},
        {"{\"choices\":[{\"index\":0,\"text\":\"a\",\"logprobs\":null,\"finish_reason\":null}]}",
         true},
        {"{\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}],\"usage\":null}", false,
         true},
        {" { \"choices\" : [ { \"text\" : \" \\\" \" } , { } ] } ", true},
        {"{\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}"},
        {"{\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":null}]}", true},
        {"{\"choices\":[{\"delta\":{\"reasoning_content\":\"x\"}}]}", true},
        {"{\"choices\":[{\"text\":\"\",\"token_ids\":[5]}]}", true},
        {"{\"choices\":[{\"text\":\"\",\"token_ids\":[ ]}]}"},
        {"{\"choices\":[{\"text\":\"\",\"token_ids\":null}]}"},
        {"{\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":12,\"total_tokens\":"
         "19,"
         "\"prompt_tokens_details\":{\"cached_tokens\":4}}}",
         false, false, true, false, false, 7, 12, 4},
        {"{\"choices\":[],\"usage\":{\"completion_tokens\":0}}", false, false, true},
        {"{\"usage\":{\"completion_tokens\":99999999999999999999999999}}", false, false, true,
         false, false, 0, 999999999999999999},
        {"{\"error\":{\"message\":\"no\",\"code\":500}}", false, false, false, true},
        {"{\"error\":\"no\"}", false, false, false, true},
        {"{\"error\":null}"},
        /* Names where they mean something else. */
        {"{\"model\":\"text\",\"x\":{\"choices\":[{\"text\":\"a\"}],\"usage\":{\"completion_"
         "tokens\":1}}}"},
        {"{\"model\":\"\\\"choices\\\":[{\\\"text\\\":\\\"a\\\"}]\"}"},
        {"{\"choices\":[{\"logprobs\":{\"text\":\"a\",\"tokens\":[\"b\"]}}]}"},
        {"{\"choices\":[{\"text\":1,\"finish_reason\":false}]}"},
        {"{\"choices\":{\"text\":\"a\"}}"},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        stream_event e;
        bool ok = read_exact(&e, rows[i].text, strlen(rows[i].text));
        if (!ok || e.has_text != rows[i].has_text || e.is_finished != rows[i].is_finished ||
            e.has_usage != rows[i].has_usage || (e.error != NULL) != rows[i].is_error ||
            e.is_done != rows[i].is_done || e.n_prompt_tokens != rows[i].n_prompt ||
            e.n_completion_tokens < rows[i].n_completion || e.n_cached_tokens != rows[i].n_cached)
            fail_msg("row %zu: %s", i, rows[i].text);
    }
}

static void test_stream_event_error_message(void **state)
{
    (void)state;
    static const char text[] = "{\"error\":{\"code\":429,\"message\":\"queue full\"}}";
    stream_event e;
    assert_true(stream_event_read(&e, text, sizeof(text) - 1));
    assert_int_equal(e.n_error_bytes, 10);
    assert_memory_equal(e.error, "queue full", 10);
}

static void test_stream_event_malformed(void **state)
{
    (void)state;
    static const char *const rows[] = {
        "",
        " ",
        "x",
        "[]",
        "\"a\"",
        "{",
        "{\"",
        "{\"a",
        "{\"a\"",
        "{\"a\":",
        "{\"a\":}",
        "{\"a\":1",
        "{\"a\":1,}",
        "{,}",
        "{\"a\":1}}",
        "{\"a\":1} x",
        "{\"a\":[1,]}",
        "{\"a\":[1 2]}",
        "{\"choices\":[",
        "{\"choices\":[{]}",
        "{\"choices\":[{\"text\":\"a]}",
        "{\"choices\":[{\"text\":\"\\",
        "[DONE",
        "[DONE] ",
        "<html></html>",
        "{\"a\":x}",
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        stream_event e;
        if (read_exact(&e, rows[i], strlen(rows[i])))
            fail_msg("believed: %s", rows[i]);
    }
}

static void test_stream_event_every_prefix(void **state)
{
    (void)state;
    static const char text[] = "{\"id\":\"cmpl-1\",\"choices\":[{\"index\":0,\"text\":"
                               "\"a\\u00e9\\\"\",\"logprobs\":{\"x\":[1.5e-3,"
                               "true,null]},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_"
                               "tokens\":3,\"completion_tokens\":5}}";
    for (size_t n = 0; n < sizeof(text) - 1; n++) {
        stream_event e;
        assert_false(read_exact(&e, text, n));
    }
    stream_event e;
    assert_true(read_exact(&e, text, sizeof(text) - 1));
    assert_true(e.has_text && e.is_finished && e.n_completion_tokens == 5);
}

static void test_stream_event_depth_is_bounded(void **state)
{
    (void)state;
    enum { DEPTH = 200000 };
    char *text = malloc(2 * DEPTH + 8);
    assert_non_null(text);
    memcpy(text, "{\"a\":", 5);
    memset(text + 5, '[', DEPTH);
    memset(text + 5 + DEPTH, ']', DEPTH);
    text[5 + 2 * DEPTH] = '}';
    stream_event e;
    assert_false(stream_event_read(&e, text, 6 + 2 * DEPTH));
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stream_event_kinds),
        cmocka_unit_test(test_stream_event_error_message),
        cmocka_unit_test(test_stream_event_malformed),
        cmocka_unit_test(test_stream_event_every_prefix),
        cmocka_unit_test(test_stream_event_depth_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
