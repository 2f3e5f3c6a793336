/* Events are the same however the stream is cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/http/sse_reader.h"

static bool collect(void *arg, const char *data, size_t n_bytes)
{
    strbuf *b = arg;
    strbuf_append_char(b, '<');
    strbuf_append(b, data, n_bytes);
    strbuf_append_char(b, '>');
    return true;
}

/* Fed in pieces of `size` bytes. Pieces are copied to the heap, so that a read over an end shows. */
static bool feed_pieces(sse_reader *r, const char *text, size_t n, size_t size, strbuf *out)
{
    for (size_t at = 0; at < n; at += size) {
        size_t n_piece = PGD_MIN(size, n - at);
        char *piece = malloc(n_piece);
        assert_non_null(piece);
        memcpy(piece, text + at, n_piece);
        bool ok = sse_reader_feed(r, piece, n_piece, collect, out);
        free(piece);
        if (!ok)
            return false;
    }
    return true;
}

static void test_sse_reader_any_cut(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        const char *want;
    } rows[] = {
        {"data: a\n\ndata: b\n\n", "<a><b>"},
        {"data: a\r\n\r\ndata: b\r\n\r\n", "<a><b>"},
        {"data:a\n\n", "<a>"},
        {"data:  a\n\n", "< a>"},
        {"data: a\ndata: b\n\n", "<a\nb>"},
        {"data\n\n", "<>"},
        {"data:\n\n", "<>"},
        {"data:\ndata:\n\n", "<\n>"},
        {": comment\n\nevent: x\nid: 4\ndata: a\nretry: 1\n\n", "<a>"},
        {"\n\n\ndata: a\n\n\n\n", "<a>"},
        {"database: a\n\n", ""},
        {"dat: a\n\n", ""},
        {"data: unfinished", ""},
        {"data: unfinished\n", ""},
        {"data: {\"a\": \"b: c\"}\n\n", "<{\"a\": \"b: c\"}>"},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        size_t n = strlen(rows[i].text);
        for (size_t size = 1; size <= n; size++) {
            sse_reader r;
            strbuf out;
            sse_reader_init(&r, 1000);
            strbuf_init(&out);
            strbuf_append_str(&out, "");
            assert_true(feed_pieces(&r, rows[i].text, n, size, &out));
            assert_string_equal(out.data, rows[i].want);
            strbuf_deinit(&out);
            sse_reader_deinit(&r);
        }
    }
}

static void test_sse_reader_is_bounded(void **state)
{
    (void)state;
    char text[400];
    memset(text, 'x', sizeof(text));
    memcpy(text, "data: ", 6);
    for (size_t size = 1; size <= sizeof(text); size += 57) {
        sse_reader r;
        strbuf out;
        sse_reader_init(&r, 100);
        strbuf_init(&out);
        assert_false(feed_pieces(&r, text, sizeof(text), size, &out));
        assert_true(r.line.cap_bytes <= 1024);
        assert_false(sse_reader_feed(&r, "data: a\n\n", 9, collect, &out)); /* for good */
        sse_reader_reset(&r);
        assert_true(sse_reader_feed(&r, "data: a\n\n", 9, collect, &out));
        assert_string_equal(out.data, "<a>");
        strbuf_deinit(&out);
        sse_reader_deinit(&r);
    }
    /* Short lines of one event without end. */
    sse_reader r;
    strbuf out;
    sse_reader_init(&r, 100);
    strbuf_init(&out);
    bool ok = true;
    for (int i = 0; i < 100 && ok; i++)
        ok = sse_reader_feed(&r, "data: 1234\n", 11, collect, &out);
    assert_false(ok);
    assert_int_equal(out.n_bytes, 0);
    strbuf_deinit(&out);
    sse_reader_deinit(&r);
}

static bool refuse(void *arg, const char *data, size_t n_bytes)
{
    (void)data;
    (void)n_bytes;
    return ++*(int *)arg < 2;
}

static void test_sse_reader_stops_when_told(void **state)
{
    (void)state;
    static const char text[] = "data: a\n\ndata: b\n\ndata: c\n\n";
    sse_reader r;
    int n = 0;
    sse_reader_init(&r, 100);
    assert_false(sse_reader_feed(&r, text, sizeof(text) - 1, refuse, &n));
    assert_int_equal(n, 2);
    sse_reader_deinit(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sse_reader_any_cut),
        cmocka_unit_test(test_sse_reader_is_bounded),
        cmocka_unit_test(test_sse_reader_stops_when_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
