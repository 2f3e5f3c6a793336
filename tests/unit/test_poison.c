/* The search for a poison request, played without processes: a worker "dies" whenever the culprit
 * runs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/core/poison.h"

#define MAX_REQUESTS 64

static request reqs_[MAX_REQUESTS];
static bool is_gone_[MAX_REQUESTS];
static int32_t done_[MAX_REQUESTS]; /* furthest position ever acknowledged */

static request *find(void *arg, uint64_t id)
{
    (void)arg;
    return id < MAX_REQUESTS && !is_gone_[id] ? &reqs_[id] : NULL;
}

static poison *start(int n)
{
    poison *p;
    memset(reqs_, 0, sizeof reqs_);
    memset(is_gone_, 0, sizeof is_gone_);
    memset(done_, 0, sizeof done_);
    for (int i = 0; i < MAX_REQUESTS; i++) {
        reqs_[i].id = (uint64_t)i;
        is_gone_[i] = i >= n;
    }
    assert_int_equal(poison_create(&p, MAX_REQUESTS, find, NULL), PGD_OK);
    return p;
}

static bool may_run(const poison *p, int i)
{
    int32_t n;
    const uint64_t *only = poison_get_only(p, &n);
    for (int32_t k = 0; k < n; k++)
        if (only[k] == (uint64_t)i)
            return true;
    return only == NULL;
}

typedef struct outcome {
    int n_deaths;
    int n_failed;
    int most_barren; /* deaths in a row without an acknowledged step */
} outcome;

/* Runs until no culprit is left and all others have come past position 50. Each life: some steps of
 * 10 tokens for everybody who may run, from 0; a culprit kills when it would pass kill_at. */
static outcome play(poison *p, int n, const bool *is_culprit, int32_t kill_at)
{
    outcome o = {0};
    int n_barren = 0;
    for (int life = 0; life < 500; life++) {
        int32_t at[MAX_REQUESTS] = {0};
        bool is_dead = false;
        while (!is_dead) {
            poison_suspect s[MAX_REQUESTS];
            int n_s = 0;
            bool all_past = true;
            for (int i = 0; i < n; i++) {
                if (is_gone_[i])
                    continue;
                all_past &= !is_culprit[i] && done_[i] > 50;
                if (!may_run(p, i))
                    continue;
                s[n_s++] = (poison_suspect){(uint64_t)i, at[i]};
                is_dead |= is_culprit[i] && at[i] + 10 > kill_at;
            }
            if (all_past)
                return o;
            assert_true(n_s > 0); /* never stuck */
            if (!is_dead) {
                n_barren = 0;
                for (int k = 0; k < n_s; k++) {
                    at[s[k].id] += 10;
                    done_[s[k].id] = PGD_MAX(done_[s[k].id], at[s[k].id]);
                }
                for (int k = 0; k < n_s; k++)
                    poison_note_progress(p, s[k].id, at[s[k].id]);
                continue;
            }
            uint64_t culprit;
            o.n_deaths++;
            n_barren++;
            o.most_barren = PGD_MAX(o.most_barren, n_barren);
            if (poison_note_death(p, s, n_s, &culprit) == POISON_FOUND) {
                assert_true(is_culprit[culprit]); /* only a culprit is ever failed */
                is_gone_[culprit] = true;
                poison_forget(p, culprit);
                o.n_failed++;
            }
        }
    }
    fail_msg("not found in 500 lives");
    return o;
}

/* Every place of the culprit, every size, at its first step and later. */
static void test_poison_finds_one(void **state)
{
    (void)state;
    for (int n = 1; n <= 33; n++) {
        for (int c = 0; c < n; c++) {
            for (int32_t kill_at = 0; kill_at <= 40; kill_at += 40) {
                bool is_culprit[MAX_REQUESTS] = {false};
                is_culprit[c] = true;
                poison *p = start(n);
                outcome o = play(p, n, is_culprit, kill_at);
                assert_int_equal(o.n_failed, 1);
                /* two deaths of all, one a halving, two alone */
                assert_true(o.n_deaths <= 2 + 6 + 2);
                assert_true(o.most_barren <= 4); /* five would be the end of the engine */
                poison_destroy(p);
            }
        }
    }
}

static void test_poison_finds_two(void **state)
{
    (void)state;
    for (int n = 2; n <= 16; n++) {
        for (int c = 1; c < n; c++) {
            bool is_culprit[MAX_REQUESTS] = {false};
            is_culprit[0] = is_culprit[c] = true;
            poison *p = start(n);
            outcome o = play(p, n, is_culprit, 20);
            assert_int_equal(o.n_failed, 2);
            poison_destroy(p);
        }
    }
}

/* Deaths that have nothing to do with requests: as long as they get further in between, nobody is
 * even suspected. */
static void test_poison_progress_clears(void **state)
{
    (void)state;
    poison *p = start(4);
    for (int life = 0; life < 50; life++) {
        poison_suspect s[4];
        uint64_t culprit;
        for (int i = 0; i < 4; i++)
            s[i] = (poison_suspect){(uint64_t)i, 10 * life + i};
        int32_t n_only;
        assert_null(poison_get_only(p, &n_only));
        assert_int_not_equal(POISON_FOUND, poison_note_death(p, s, 4, &culprit));
    }
    poison_destroy(p);
}

/* A worker that is killed while a search is on, by somebody else: the one that ran alone fails only
 * if that happens twice in a row without progress. */
static void test_poison_random_kill_during_search(void **state)
{
    (void)state;
    poison *p = start(2);
    uint64_t culprit;
    int32_t n_only;
    poison_suspect both[2] = {{0, 5}, {1, 5}};
    assert_int_not_equal(POISON_FOUND, poison_note_death(p, both, 2, &culprit));
    assert_int_not_equal(POISON_FOUND, poison_note_death(p, both, 2, &culprit));
    assert_int_equal(poison_get_only(p, &n_only)[0], 0);
    assert_int_equal(n_only, 1);
    assert_int_not_equal(POISON_FOUND,
                         poison_note_death(p, both, 1, &culprit)); /* 0 dies alone, once */
    assert_int_equal(poison_get_only(p, &n_only)[0], 1);
    assert_int_not_equal(
        POISON_FOUND, poison_note_death(p, NULL, 0, &culprit)); /* idle death: nothing is learned */
    assert_int_equal(poison_get_only(p, &n_only)[0], 1);
    poison_note_progress(p, 1, 5); /* no further than before */
    assert_int_equal(poison_get_only(p, &n_only)[0], 1);
    poison_note_progress(p, 1, 6);
    assert_int_equal(poison_get_only(p, &n_only)[0], 0);
    poison_note_progress(p, 0, 6); /* it was not it */
    assert_null(poison_get_only(p, &n_only));
    assert_int_equal(reqs_[0].n_strikes, 0);
    poison_destroy(p);
}

/* Suspects that finish or are aborted in the middle do not block the search. */
static void test_poison_forget(void **state)
{
    (void)state;
    poison *p = start(4);
    uint64_t culprit;
    int32_t n_only;
    poison_suspect all[4] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};
    for (int i = 0; i < 2; i++)
        assert_int_not_equal(POISON_FOUND, poison_note_death(p, all, 4, &culprit));
    assert_int_equal((poison_get_only(p, &n_only), n_only), 2);
    for (uint64_t id = 0; id < 4; id++) {
        is_gone_[id] = true;
        poison_forget(p, id);
    }
    assert_null(poison_get_only(p, &n_only));
    poison_forget(p, 77);
    poison_destroy(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_poison_finds_one),
        cmocka_unit_test(test_poison_finds_two),
        cmocka_unit_test(test_poison_progress_clears),
        cmocka_unit_test(test_poison_random_kill_during_search),
        cmocka_unit_test(test_poison_forget),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
