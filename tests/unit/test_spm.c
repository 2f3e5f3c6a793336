/* Merging by score: order, ties, symbols that are no pieces, control pieces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/text/spm.h"

#define ALLOWED 1

typedef struct piece {
    const char *text;
    float score;
    uint8_t attrs;
} piece;

typedef struct model {
    vocab texts;
    float scores[16];
    uint8_t attrs[16];
} model;

static void make_model(model *m, const piece *pieces, int32_t n)
{
    *m = (model){0};
    assert_int_equal(vocab_reserve(&m->texts, n, 64), PGD_OK);
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(vocab_add(&m->texts, pieces[i].text, strlen(pieces[i].text), true),
                         PGD_OK);
        m->scores[i] = pieces[i].score;
        m->attrs[i] = pieces[i].attrs;
    }
}

/* want: the texts of the symbols with '|' between, '?' before one without an id. */
static void expect(const model *m, const char *text, const char *want)
{
    spm_pieces p = {&m->texts, m->scores, m->attrs, ALLOWED};
    bpe_work w = {0};
    char got[256];
    size_t n = 0;
    assert_int_equal(spm_merge(&w, &p, text, strlen(text)), PGD_OK);
    for (int32_t i = w.n_symbols > 0 ? 0 : -1; i >= 0; i = w.symbols[i].next) {
        const bpe_symbol *s = &w.symbols[i];
        if (n > 0)
            got[n++] = '|';
        if (s->id < 0) {
            got[n++] = '?';
        } else {
            size_t n_piece;
            const char *piece_text = vocab_text(&m->texts, s->id, &n_piece);
            assert_int_equal(n_piece, s->n_bytes);
            assert_memory_equal(piece_text, text + s->at, n_piece);
        }
        memcpy(got + n, text + s->at, s->n_bytes);
        n += s->n_bytes;
    }
    got[n] = '\0';
    assert_string_equal(got, want);
    bpe_work_deinit(&w);
}

static void test_spm_takes_best_score_first(void **state)
{
    (void)state;
    const piece pieces[] = {{"a", -10, 1}, {"b", -11, 1}, {"c", -12, 1},
                            {"ab", -2, 1}, {"bc", -1, 1}, {"abc", -3, 1}};
    model m;
    make_model(&m, pieces, 6);
    expect(&m, "abc", "abc"); /* bc first, then a + bc is a piece too */
    expect(&m, "ab", "ab");
    expect(&m, "aabc", "a|abc");
    expect(&m, "", "");
    vocab_deinit(&m.texts);
}

static void test_spm_takes_leftmost_of_equal_score(void **state)
{
    (void)state;
    const piece pieces[] = {
        {"a", -1, 1}, {"aa", -1, 1}, {"b", 0, 1}, {"ab", -0.0f, 1}, {"ba", 0.0f, 1}};
    model m;
    make_model(&m, pieces, 5);
    expect(&m, "aaa", "aa|a");
    expect(&m, "aba", "ab|a"); /* -0 and +0 are equal scores */
    expect(&m, "bab", "ba|b");
    vocab_deinit(&m.texts);
}

static void test_spm_joins_symbols_that_are_no_pieces(void **state)
{
    (void)state;
    const piece pieces[] = {{"xy", -1, 1}, {"z", -2, 1}, {"xyz", -3, 1}};
    model m;
    make_model(&m, pieces, 3);
    expect(&m, "xyz", "xyz");
    expect(&m, "yxz", "?y|?x|z");
    vocab_deinit(&m.texts);
}

static void test_spm_never_makes_control_pieces(void **state)
{
    (void)state;
    const piece pieces[] = {
        {"<", -1, 1}, {"s", -2, 1}, {">", -3, 1}, {"<s", -4, 1}, {"<s>", -5, 0}};
    model m;
    make_model(&m, pieces, 5);
    expect(&m, "<s>", "<s|>");
    vocab_deinit(&m.texts);
}

static void test_spm_symbols_are_characters(void **state)
{
    (void)state;
    const piece pieces[] = {{"\xC3\xA9", -1, 1}, {"\xE4\xB8\xAD", -2, 1}};
    model m;
    make_model(&m, pieces, 2);
    expect(&m, "\xC3\xA9\xE4\xB8\xAD", "\xC3\xA9|\xE4\xB8\xAD");
    expect(&m, "\xC3\xC3\xA9\xE4\xB8",
           "?\xC3|\xC3\xA9|?\xE4|?\xB8"); /* invalid bytes stand alone */
    vocab_deinit(&m.texts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spm_takes_best_score_first),
        cmocka_unit_test(test_spm_takes_leftmost_of_equal_score),
        cmocka_unit_test(test_spm_joins_symbols_that_are_no_pieces),
        cmocka_unit_test(test_spm_never_makes_control_pieces),
        cmocka_unit_test(test_spm_symbols_are_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
