/* Rules OF3-OF8 and OF12 of an offload tier, for every policy: one row per rule, run with each. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "engine/offload/offload_manager.h"

#define MAX_KEYS 8

static offload_manager *m;
static char events[256]; /* "+1,2 -3 ..." */

static int32_t number_of(const offload_key *key)
{
    int32_t n;
    memcpy(&n, key->hash.bytes, sizeof n);
    return n;
}

static void note(char sign, const offload_key *keys, int32_t n_keys)
{
    size_t n = strlen(events);
    for (int32_t i = 0; i < n_keys; i++)
        n += (size_t)snprintf(events + n, sizeof events - n, "%c%d", i == 0 ? sign : ',',
                              number_of(&keys[i]));
    (void)snprintf(events + n, sizeof events - n, " ");
}

static void on_stored(void *arg, const offload_key *keys, const int32_t *ids, int32_t n)
{
    (void)arg, (void)ids;
    note('+', keys, n);
}

static void on_removed(void *arg, const offload_key *keys, const int32_t *ids, int32_t n)
{
    (void)arg, (void)ids;
    note('-', keys, n);
}

static void expect_events(const char *want)
{
    assert_string_equal(events, want);
    events[0] = 0;
}

typedef struct key_list {
    int32_t n;
    offload_key keys[MAX_KEYS];
} key_list;

static key_list make_keys(const int32_t *numbers, int32_t n)
{
    key_list list = {.n = n};
    for (int32_t i = 0; i < n; i++)
        memcpy(list.keys[i].hash.bytes, &numbers[i], sizeof numbers[i]);
    return list;
}

#define KEYS(...)                             \
    make_keys((const int32_t[]){__VA_ARGS__}, \
              (int32_t)PGD_ARRAY_LEN(((const int32_t[]){__VA_ARGS__})))

static bool prepare(key_list keys)
{
    offload_store s;
    bool ok = offload_manager_prepare_store(&s, m, keys.keys, keys.n);
    offload_manager_check(m);
    return ok;
}

static void complete(key_list keys, bool ok)
{
    offload_manager_complete_store(m, keys.keys, keys.n, ok, offload_manager_generation(m));
    offload_manager_check(m);
}

static void store(key_list keys)
{
    assert_true(prepare(keys));
    complete(keys, true);
}

static bool load(key_list keys)
{
    int32_t ids[MAX_KEYS];
    bool ok = offload_manager_prepare_load(ids, m, keys.keys, keys.n);
    offload_manager_check(m);
    return ok;
}

static void end_load(key_list keys)
{
    offload_manager_complete_load(m, keys.keys, keys.n, offload_manager_generation(m));
    offload_manager_check(m);
}

static void forget(key_list keys)
{
    offload_manager_forget(m, keys.keys, keys.n);
    offload_manager_check(m);
}

static void expect(key_list keys, offload_lookup want)
{
    for (int32_t i = 0; i < keys.n; i++)
        assert_int_equal(offload_manager_lookup(m, &keys.keys[i]), want);
}

/* --- the rules; capacity 4 ----------------------------------------------------------------------- */

static void of3_pending_is_not_a_miss(void)
{
    assert_true(prepare(KEYS(1, 2)));
    expect(KEYS(1, 2), OFFLOAD_PENDING);
    expect(KEYS(3), OFFLOAD_MISS);
    assert_false(load(KEYS(1)));
    complete(KEYS(1, 2), true);
    expect(KEYS(1, 2), OFFLOAD_HIT);
    expect_events("+1,2 ");
}

static void of3_lookup_is_no_use(void)
{
    store(KEYS(1, 2, 3, 4));
    for (int i = 0; i < 10; i++)
        expect(KEYS(1), OFFLOAD_HIT);
    store(KEYS(5));
    expect(KEYS(1), OFFLOAD_MISS);
}

static void of4_load_needs_all_and_pins(void)
{
    store(KEYS(1, 2, 3, 4));
    assert_false(load(KEYS(1, 9)));
    assert_int_equal(offload_manager_n_evictable(m), 4);
    assert_true(load(KEYS(1, 2)));
    assert_true(load(KEYS(1)));
    assert_false(prepare(KEYS(5, 6, 7)));
    end_load(KEYS(1, 2));
    assert_int_equal(offload_manager_n_evictable(m), 3); /* 1 is read once more */
    store(KEYS(5, 6, 7));
    expect(KEYS(1), OFFLOAD_HIT);
    end_load(KEYS(1));
}

static void of5_tails_go_first(void)
{
    store(KEYS(1, 2, 3, 4));
    key_list all = KEYS(1, 2, 3, 4);
    offload_manager_touch(m, all.keys, all.n);
    store(KEYS(5, 6));
    expect(KEYS(3, 4), OFFLOAD_MISS);
    expect(KEYS(1, 2), OFFLOAD_HIT);
}

/* The same order without a use: what was seen once stays that. */
static void refresh_orders_without_use(void)
{
    store(KEYS(1, 2, 3, 4));
    key_list all = KEYS(1, 2, 3, 9);
    int32_t lengths[OFFLOAD_POLICY_MAX_LISTS];
    memcpy(lengths, offload_manager_get_policy(m)->n_entries, sizeof lengths);
    offload_manager_refresh(m, all.keys, all.n);
    assert_memory_equal(lengths, offload_manager_get_policy(m)->n_entries, sizeof lengths);
    store(KEYS(5, 6));
    expect(KEYS(3, 4), OFFLOAD_MISS);
    expect(KEYS(1, 2), OFFLOAD_HIT);
}

static void of6_protects_the_keys_of_the_call(void)
{
    store(KEYS(1, 2, 3, 4));
    assert_true(prepare(KEYS(1, 5))); /* 1 would go first */
    expect(KEYS(2), OFFLOAD_MISS);
    expect(KEYS(1), OFFLOAD_HIT);
    complete(KEYS(5), true);
}

static void of6_all_or_nothing(void)
{
    store(KEYS(1, 2, 3, 4));
    assert_true(load(KEYS(1, 2, 3)));
    events[0] = 0;
    assert_false(prepare(KEYS(5, 6)));
    expect(KEYS(1, 2, 3, 4), OFFLOAD_HIT);
    expect_events("");
    assert_true(prepare(KEYS(1, 2, 3, 4))); /* nothing to store is a success */
    end_load(KEYS(1, 2, 3));
    assert_false(prepare(KEYS(11, 12, 13, 14, 15)));
    assert_true(prepare(KEYS(5, 6)));
    expect_events("-1,2 ");
    complete(KEYS(5, 6), true);
}

static void of6_what_is_written_is_not_evicted_nor_stored_twice(void)
{
    assert_true(prepare(KEYS(1, 2, 3, 4)));
    assert_false(prepare(KEYS(5)));
    offload_store s;
    key_list again = KEYS(1, 2);
    assert_true(offload_manager_prepare_store(&s, m, again.keys, again.n));
    assert_int_equal(s.n_stored, 0);
    complete(KEYS(1, 2, 3, 4), true);
}

static void of7_failed_store_vanishes(void)
{
    store(KEYS(1));
    assert_true(prepare(KEYS(1, 2)));
    complete(KEYS(1, 2), false); /* a superset does no harm */
    expect(KEYS(1), OFFLOAD_HIT);
    expect(KEYS(2), OFFLOAD_MISS);
    assert_int_equal(offload_manager_n_blocks(m), 1);
    expect_events("+1 ");
    store(KEYS(2));
}

static void of8_events(void)
{
    store(KEYS(1, 2, 3, 4));
    assert_true(prepare(KEYS(5)));
    expect_events("+1,2,3,4 -1 "); /* before the store has ended */
    complete(KEYS(5), false);
    expect_events("");
}

static void of12_reset_with_jobs_under_way(void)
{
    store(KEYS(1));
    assert_true(load(KEYS(1)));
    assert_true(prepare(KEYS(2)));
    uint32_t before = offload_manager_generation(m);
    key_list one = KEYS(1), two = KEYS(2);
    offload_manager_reset(m);
    offload_manager_check(m);
    expect(KEYS(1, 2), OFFLOAD_MISS);
    assert_int_equal(offload_manager_n_blocks(m), 0);
    assert_true(prepare(two));
    offload_manager_complete_load(m, one.keys, 1, before);
    offload_manager_complete_store(m, two.keys, 1, false, before);
    expect(two, OFFLOAD_PENDING);
    complete(two, true);
    expect(two, OFFLOAD_HIT);
    assert_true(prepare(KEYS(3, 4, 5)));
    complete(KEYS(3, 4, 5), true);
}

/* --- what is not right ----------------------------------------------------------------------------- */

static void forget_what_is_there(void)
{
    store(KEYS(1, 2));
    events[0] = 0;
    forget(KEYS(1, 9));
    expect_events("-1 ");
    expect(KEYS(1), OFFLOAD_MISS);
    assert_int_equal(offload_manager_n_blocks(m), 1);
    store(KEYS(1, 3, 4));
    expect(KEYS(1, 2, 3, 4), OFFLOAD_HIT);
}

static void forget_what_is_written(void)
{
    assert_true(prepare(KEYS(1)));
    forget(KEYS(1));
    forget(KEYS(1));
    expect(KEYS(1), OFFLOAD_MISS);
    assert_int_equal(offload_manager_n_blocks(m), 1); /* somebody writes to it */
    complete(KEYS(1), true);
    expect(KEYS(1), OFFLOAD_MISS);
    assert_int_equal(offload_manager_n_blocks(m), 0);
    expect_events("");
    store(KEYS(1));
    expect_events("+1 ");
}

static void forget_what_is_read(void)
{
    store(KEYS(1, 2));
    events[0] = 0;
    assert_true(load(KEYS(1)));
    assert_true(load(KEYS(1)));
    forget(KEYS(1));
    expect_events("-1 ");
    assert_false(load(KEYS(1)));
    assert_false(prepare(KEYS(3, 4, 5, 6)));
    end_load(KEYS(1));
    assert_int_equal(offload_manager_n_blocks(m), 2);
    end_load(KEYS(1));
    assert_int_equal(offload_manager_n_blocks(m), 1);
    int32_t cursor = 0;
    offload_key listed[4];
    assert_int_equal(offload_manager_list(listed, m, 100, &cursor), 1);
    expect_events("");
}

static void answers_hold_while_their_blocks_stay(void)
{
    store(KEYS(1, 2, 3, 4));
    key_list two = KEYS(2, 3), four = KEYS(4);
    uint64_t old = offload_manager_next_stamp(m);
    offload_manager_watch(m, &two.keys[0], old);
    offload_manager_watch(m, &two.keys[1], old);
    uint64_t young = offload_manager_next_stamp(m);
    offload_manager_watch(m, &four.keys[0], young);
    store(KEYS(5)); /* evicts 1 */
    assert_true(offload_manager_is_intact(m, old));
    assert_int_equal(offload_manager_n_evicted(m), 1);
    store(KEYS(6)); /* evicts 2 */
    assert_false(offload_manager_is_intact(m, old));
    assert_true(offload_manager_is_intact(m, young));
    offload_manager_end_watch(m, &four.keys[0]);
    assert_false(offload_manager_is_intact(m, young));
    uint64_t last = offload_manager_next_stamp(m);
    offload_manager_watch(m, &four.keys[0], last);
    assert_true(offload_manager_is_intact(m, last));
    forget(four);
    assert_false(offload_manager_is_intact(m, last));
    last = offload_manager_next_stamp(m);
    offload_manager_reset(m);
    assert_false(offload_manager_is_intact(m, last));
}

static void keys_and_ids(void)
{
    store(KEYS(1, 2));
    key_list keys = KEYS(2, 9);
    assert_int_equal(offload_manager_get_id(m, &keys.keys[0]), 1);
    assert_int_equal(offload_manager_get_id(m, &keys.keys[1]), -1);
    assert_int_equal(number_of(offload_manager_get_key(m, 1)), 2);
    assert_null(offload_manager_get_key(m, 3));
    forget(KEYS(2));
    assert_null(offload_manager_get_key(m, 1));
}

static void test_offload_rules_hold_for_every_policy(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        void (*run)(void);
    } rules[] = {
        {"OF3 pending is not a miss", of3_pending_is_not_a_miss},
        {"OF3 a lookup is no use", of3_lookup_is_no_use},
        {"OF4 a load needs all and pins", of4_load_needs_all_and_pins},
        {"OF5 tails go first", of5_tails_go_first},
        {"refresh orders without use", refresh_orders_without_use},
        {"OF6 protects the keys of the call", of6_protects_the_keys_of_the_call},
        {"OF6 all or nothing", of6_all_or_nothing},
        {"OF6 what is written", of6_what_is_written_is_not_evicted_nor_stored_twice},
        {"OF7 a failed store vanishes", of7_failed_store_vanishes},
        {"OF8 events", of8_events},
        {"OF12 reset with jobs under way", of12_reset_with_jobs_under_way},
        {"forget what is there", forget_what_is_there},
        {"forget what is written", forget_what_is_written},
        {"forget what is read", forget_what_is_read},
        {"answers hold while their blocks stay", answers_hold_while_their_blocks_stay},
        {"keys and ids", keys_and_ids},
    };
    const char *const policies[] = {"lru", "arc"};
    for (size_t p = 0; p < PGD_ARRAY_LEN(policies); p++) {
        for (size_t i = 0; i < PGD_ARRAY_LEN(rules); i++) {
            print_message("%s: %s\n", policies[p], rules[i].name);
            offload_manager_opts opts = {.capacity = 4,
                                         .policy = offload_policy_find(policies[p]),
                                         .on_stored = on_stored,
                                         .on_removed = on_removed};
            events[0] = 0;
            assert_int_equal(offload_manager_create(&m, &opts), PGD_OK);
            rules[i].run();
            offload_manager_check(m);
            offload_manager_destroy(m);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_rules_hold_for_every_policy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
