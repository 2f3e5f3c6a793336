/* What an offload tier holds: traces H25 (LRU) and H26 (ARC), and the rules OF. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/hash.h"
#include "engine/offload/offload_manager.h"

#define MAX_KEYS 16

static char events[512]; /* "+1,2 -3 ..." */

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

static int32_t held[64]; /* number of the key that was told to be in a medium block, 0 = none */

static void on_stored(void *arg, const offload_key *keys, const int32_t *medium_ids, int32_t n_keys)
{
    (void)arg;
    note('+', keys, n_keys);
    for (int32_t i = 0; i < n_keys; i++) {
        assert_int_equal(held[medium_ids[i]], 0);
        held[medium_ids[i]] = number_of(&keys[i]);
    }
}

static void on_removed(void *arg, const offload_key *keys, const int32_t *medium_ids,
                       int32_t n_keys)
{
    (void)arg;
    note('-', keys, n_keys);
    for (int32_t i = 0; i < n_keys; i++) {
        assert_int_equal(held[medium_ids[i]], number_of(&keys[i]));
        held[medium_ids[i]] = 0;
    }
}

static int32_t touched[64];
static int32_t n_touched;

static void on_touched(void *arg, int32_t medium_id)
{
    (void)arg;
    touched[n_touched++ % 64] = held[medium_id];
}

static void expect_events(const char *want)
{
    assert_string_equal(events, want);
    events[0] = 0;
}

static void on_reset(void *arg)
{
    (void)arg;
    memset(held, 0, sizeof held);
}

static offload_manager *new_manager(const char *policy, int32_t capacity)
{
    offload_manager_opts opts = {.capacity = capacity,
                                 .policy = offload_policy_find(policy),
                                 .on_stored = on_stored,
                                 .on_removed = on_removed,
                                 .on_touched = on_touched,
                                 .on_reset = on_reset};
    offload_manager *m;
    assert_int_equal(offload_manager_create(&m, &opts), PGD_OK);
    events[0] = 0;
    memset(held, 0, sizeof held);
    n_touched = 0;
    return m;
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

static void expect_numbers(const offload_key *keys, int32_t n, key_list want)
{
    assert_int_equal(n, want.n);
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(number_of(&keys[i]), number_of(&want.keys[i]));
}

/* ids: of the stored keys, in order. */
static void expect_store(offload_manager *m, key_list keys, key_list stored, key_list ids,
                         key_list evicted)
{
    offload_store s;
    assert_true(offload_manager_prepare_store(&s, m, keys.keys, keys.n));
    expect_numbers(s.stored, s.n_stored, stored);
    expect_numbers(s.evicted, s.n_evicted, evicted);
    for (int32_t i = 0; i < s.n_stored; i++)
        assert_int_equal(s.medium_ids[i], number_of(&ids.keys[i]));
    offload_manager_check(m);
}

static void expect_refusal(offload_manager *m, key_list keys)
{
    offload_store s;
    assert_false(offload_manager_prepare_store(&s, m, keys.keys, keys.n));
    assert_int_equal(s.n_stored + s.n_evicted, 0);
    offload_manager_check(m);
}

static void complete(offload_manager *m, key_list keys, bool ok)
{
    offload_manager_complete_store(m, keys.keys, keys.n, ok, offload_manager_generation(m));
    offload_manager_check(m);
}

static void store(offload_manager *m, key_list keys)
{
    offload_store s;
    assert_true(offload_manager_prepare_store(&s, m, keys.keys, keys.n));
    complete(m, keys, true);
}

static void touch(offload_manager *m, key_list keys)
{
    offload_manager_touch(m, keys.keys, keys.n);
    offload_manager_check(m);
}

static void expect_lookup(const offload_manager *m, key_list keys, offload_lookup want)
{
    for (int32_t i = 0; i < keys.n; i++)
        assert_int_equal(offload_manager_lookup(m, &keys.keys[i]), want);
}

static const key_list NONE = {0};

static void test_offload_manager_h25_lru(void **state)
{
    (void)state;
    offload_manager *m = new_manager("lru", 4);
    expect_store(m, KEYS(1, 2), KEYS(1, 2), KEYS(0, 1), NONE);
    expect_lookup(m, KEYS(1, 2), OFFLOAD_PENDING);
    expect_events("");
    complete(m, KEYS(1, 2), true);
    expect_events("+1,2 ");
    expect_lookup(m, KEYS(1, 2), OFFLOAD_HIT);
    expect_lookup(m, KEYS(3), OFFLOAD_MISS);
    expect_store(m, KEYS(2, 3, 4, 5), KEYS(3, 4, 5), KEYS(2, 3, 0), KEYS(1));
    expect_events("-1 ");
    expect_refusal(m, KEYS(1, 6));
    complete(m, KEYS(2, 3, 4, 5), true);
    expect_lookup(m, KEYS(2, 3, 4, 5), OFFLOAD_HIT);
    expect_lookup(m, KEYS(1, 0), OFFLOAD_MISS);
    key_list load = KEYS(2, 3);
    int32_t ids[2];
    assert_true(offload_manager_prepare_load(ids, m, load.keys, 2));
    assert_int_equal(ids[0], 1);
    assert_int_equal(ids[1], 2);
    expect_refusal(m, KEYS(6, 7, 8));
    offload_manager_complete_load(m, load.keys, 2, offload_manager_generation(m));
    expect_store(m, KEYS(6, 7, 8), KEYS(6, 7, 8), KEYS(3, 2, 1), KEYS(2, 3, 4));
    complete(m, KEYS(6, 7, 8), true);
    touch(m, KEYS(5, 6, 7));
    expect_store(m, KEYS(9), KEYS(9), KEYS(1), KEYS(8));
    complete(m, KEYS(7, 9), false);
    expect_lookup(m, KEYS(7), OFFLOAD_HIT);
    expect_lookup(m, KEYS(9), OFFLOAD_MISS);
    expect_events("+3,4,5 -2,3,4 +6,7,8 -8 ");
    offload_manager_destroy(m);
}

static void expect_list(const offload_manager *m, int32_t list_idx, key_list want)
{
    const list_node *end = &offload_manager_get_policy(m)->lists[list_idx];
    int32_t n = 0;
    for (const list_node *node = end->next; node != end; node = node->next) {
        assert_true(n < want.n);
        assert_int_equal(number_of(&LIST_ENTRY(node, offload_entry, node)->key),
                         number_of(&want.keys[n++]));
    }
    assert_int_equal(n, want.n);
}

enum { T1, T2, B1, B2 };

static void test_offload_manager_h26_arc(void **state)
{
    (void)state;
    offload_manager *m = new_manager("arc", 4);
    store(m, KEYS(1));
    expect_list(m, T1, KEYS(1));
    touch(m, KEYS(1));
    expect_list(m, T1, NONE);
    expect_list(m, T2, KEYS(1));
    offload_manager_destroy(m);

    m = new_manager("arc", 4);
    store(m, KEYS(1, 2, 3, 4));
    touch(m, KEYS(3, 4));
    ((offload_policy *)offload_manager_get_policy(m))->target = 1;
    expect_store(m, KEYS(5), KEYS(5), KEYS(0), KEYS(1));
    expect_list(m, B1, KEYS(1));
    expect_list(m, T1, KEYS(2, 5));
    offload_manager_destroy(m);

    m = new_manager("arc", 2);
    store(m, KEYS(1, 2));
    store(m, KEYS(3));
    expect_lookup(m, KEYS(1), OFFLOAD_MISS);
    assert_true(offload_manager_get_policy(m)->target == 0);
    touch(m, KEYS(1));
    assert_true(offload_manager_get_policy(m)->target == 1);
    offload_manager_destroy(m);

    m = new_manager("arc", 2);
    for (int32_t i = 1; i < 20; i++) {
        store(m, KEYS(i));
        assert_true(offload_manager_get_policy(m)->n_entries[B1] <= 2);
        assert_true(offload_manager_get_policy(m)->n_entries[B2] <= 2);
    }
    expect_list(m, B1, KEYS(16, 17));
    expect_list(m, T1, KEYS(18, 19));
    offload_manager_destroy(m);
}

/* A scan of blocks that are wanted once takes nothing from those wanted again. */
static void test_offload_manager_arc_survives_a_scan(void **state)
{
    (void)state;
    offload_manager *m = new_manager("arc", 4);
    store(m, KEYS(1, 2));
    touch(m, KEYS(1, 2));
    for (int32_t i = 100; i < 150; i++)
        store(m, KEYS(i));
    expect_lookup(m, KEYS(1, 2), OFFLOAD_HIT);
    offload_manager_destroy(m);
    m = new_manager("lru", 4);
    store(m, KEYS(1, 2));
    touch(m, KEYS(1, 2));
    for (int32_t i = 100; i < 150; i++)
        store(m, KEYS(i));
    expect_lookup(m, KEYS(1, 2), OFFLOAD_MISS);
    offload_manager_destroy(m);
}

/* A key lost from T2 and asked for again shortens T1; the step is the ratio of the lists. */
static void test_offload_manager_arc_adapts_both_ways(void **state)
{
    (void)state;
    offload_manager *m = new_manager("arc", 2);
    store(m, KEYS(1, 2));
    touch(m, KEYS(1, 2));
    store(m, KEYS(3)); /* T2 gives: 2, the less recent */
    expect_list(m, B2, KEYS(2));
    store(m, KEYS(4)); /* T1 gives: 3 */
    expect_list(m, B1, KEYS(3));
    touch(m, KEYS(3));
    assert_true(offload_manager_get_policy(m)->target == 1);
    touch(m, KEYS(2));
    assert_true(offload_manager_get_policy(m)->target == 0);
    /* Stored again, a lost key starts in T2. */
    store(m, KEYS(3));
    expect_lookup(m, KEYS(3), OFFLOAD_HIT);
    expect_list(m, T1, NONE);
    expect_list(m, T2, KEYS(1, 3));
    offload_manager_destroy(m);
}

/* OF10 by the letter of each case: T1 gives when it is as long as the target, the step is the ratio of
 * the ghost lists, what is still being written is not seen again. */
static void test_offload_manager_arc_borders(void **state)
{
    (void)state;
    offload_manager *m = new_manager("arc", 4);
    store(m, KEYS(1, 2, 3, 4));
    touch(m, KEYS(3, 4));
    ((offload_policy *)offload_manager_get_policy(m))->target = 2;
    expect_store(m, KEYS(5), KEYS(5), KEYS(0), KEYS(1));
    touch(m, KEYS(5));
    expect_list(m, T1, KEYS(2, 5));
    offload_manager_destroy(m);

    m = new_manager("arc", 4);
    store(m, KEYS(1, 2, 3, 4));
    touch(m, KEYS(1, 2, 3, 4));
    store(m, KEYS(5));
    store(m, KEYS(6));
    touch(m, KEYS(6));
    store(m, KEYS(7));
    expect_list(m, B1, KEYS(5));
    expect_list(m, B2, KEYS(4, 3));
    touch(m, KEYS(5));
    assert_true(offload_manager_get_policy(m)->target == 2);
    offload_manager_destroy(m);
}

/* A target as long as the tier, which lost keys that are asked for again and again lead to, must not
 * stop stores of several blocks for ever when T2 has nothing to give. */
static void test_offload_manager_arc_gives_from_t1_when_t2_cannot(void **state)
{
    (void)state;
    offload_manager *m = new_manager("arc", 4);
    store(m, KEYS(1, 2, 3, 4));
    store(m, KEYS(5, 6, 7, 8));
    for (int i = 0; i < 4; i++)
        touch(m, KEYS(1));
    assert_true(offload_manager_get_policy(m)->target == 4);
    expect_store(m, KEYS(9, 10, 11), KEYS(9, 10, 11), KEYS(1, 2, 3), KEYS(5, 6, 7));
    offload_manager_destroy(m);
}

static void test_offload_manager_protects_its_keys(void **state)
{
    (void)state;
    const char *const policies[] = {"lru", "arc"};
    for (int32_t i = 0; i < 2; i++) {
        offload_manager *m = new_manager(policies[i], 3);
        store(m, KEYS(1, 2, 3));
        /* 1 would go first, but this call names it. */
        expect_store(m, KEYS(1, 4), KEYS(4), KEYS(1), KEYS(2));
        complete(m, KEYS(4), true);
        /* Two are needed, one may go: nothing happens. */
        expect_refusal(m, KEYS(3, 4, 5, 6));
        expect_lookup(m, KEYS(1, 3, 4), OFFLOAD_HIT);
        /* Nothing to store is a success. */
        expect_store(m, KEYS(1, 3), NONE, NONE, NONE);
        /* More than there is room for at all. */
        expect_refusal(m, KEYS(10, 11, 12, 13));
        offload_manager_destroy(m);
    }
}

static void test_offload_manager_load_needs_all(void **state)
{
    (void)state;
    offload_manager *m = new_manager("lru", 3);
    store(m, KEYS(1, 2));
    offload_store s;
    key_list three = KEYS(3), load = KEYS(1, 3), both = KEYS(1, 2);
    int32_t ids[2];
    assert_true(offload_manager_prepare_store(&s, m, three.keys, 1));
    assert_false(offload_manager_prepare_load(ids, m, load.keys, 2));
    assert_int_equal(offload_manager_n_evictable(m), 2);
    /* Two loads of one block: it stays until both are done. */
    assert_true(offload_manager_prepare_load(ids, m, both.keys, 2));
    assert_true(offload_manager_prepare_load(ids, m, both.keys, 1));
    offload_manager_complete_load(m, both.keys, 2, 0);
    assert_int_equal(offload_manager_n_evictable(m), 1);
    offload_manager_complete_load(m, both.keys, 1, 0);
    assert_int_equal(offload_manager_n_evictable(m), 2);
    offload_manager_check(m);
    offload_manager_destroy(m);
}

static void load(offload_manager *m, key_list keys)
{
    int32_t ids[MAX_KEYS];
    assert_true(offload_manager_prepare_load(ids, m, keys.keys, keys.n));
    offload_manager_check(m);
}

static void end_load(offload_manager *m, key_list keys)
{
    offload_manager_complete_load(m, keys.keys, keys.n, 0);
    offload_manager_check(m);
}

/* Blocks that are read are passed by, and have their place when that is over, whatever was looked for
 * meanwhile. */
static void test_offload_manager_order_after_loads(void **state)
{
    (void)state;
    const char *const policies[] = {"lru", "arc"};
    for (int32_t i = 0; i < 2; i++) {
        offload_manager *m = new_manager(policies[i], 5);
        store(m, KEYS(1, 2, 3, 4, 5));
        load(m, KEYS(1, 2, 4));
        expect_store(m, KEYS(6), KEYS(6), KEYS(2), KEYS(3));
        end_load(m, KEYS(2));
        expect_store(m, KEYS(7), KEYS(7), KEYS(1), KEYS(2));
        expect_store(m, KEYS(8), KEYS(8), KEYS(4), KEYS(5));
        expect_refusal(m, KEYS(9)); /* all that is left is read or written */
        complete(m, KEYS(8), true);
        end_load(m, KEYS(4));
        end_load(m, KEYS(1));
        complete(m, KEYS(6, 7), true);
        expect_store(m, KEYS(11, 12, 13, 14), KEYS(11, 12, 13, 14), KEYS(1, 2, 3, 0),
                     KEYS(1, 4, 6, 7));
        offload_manager_destroy(m);
    }
}

static void test_offload_manager_reset(void **state)
{
    (void)state;
    offload_manager *m = new_manager("arc", 2);
    store(m, KEYS(1));
    offload_store s;
    key_list one = KEYS(1), two = KEYS(2);
    int32_t id;
    assert_true(offload_manager_prepare_load(&id, m, one.keys, 1));
    assert_true(offload_manager_prepare_store(&s, m, two.keys, 1));
    uint32_t before = offload_manager_generation(m);
    offload_manager_reset(m);
    assert_int_equal(offload_manager_n_blocks(m), 0);
    expect_lookup(m, KEYS(1, 2), OFFLOAD_MISS);
    assert_true(offload_manager_prepare_store(&s, m, two.keys, 1));
    /* What was under way completes into the void, the new store is still pending. */
    offload_manager_complete_load(m, one.keys, 1, before);
    offload_manager_complete_store(m, two.keys, 1, true, before);
    expect_lookup(m, KEYS(2), OFFLOAD_PENDING);
    complete(m, KEYS(2), true);
    expect_lookup(m, KEYS(2), OFFLOAD_HIT);
    offload_manager_destroy(m);
}

/* Only loadable blocks are told, the head of a prefix last. */
static void test_offload_manager_tells_touches(void **state)
{
    (void)state;
    offload_manager *m = new_manager("arc", 3);
    offload_store s;
    key_list three = KEYS(3);
    store(m, KEYS(1, 2));
    assert_true(offload_manager_prepare_store(&s, m, three.keys, 1));
    touch(m, KEYS(1, 2, 3, 4));
    assert_int_equal(n_touched, 2);
    assert_int_equal(touched[0], 2);
    assert_int_equal(touched[1], 1);
    offload_manager_destroy(m);
}

static void test_offload_manager_restores(void **state)
{
    (void)state;
    const char *const policies[] = {"lru", "arc"};
    for (int32_t i = 0; i < 2; i++) {
        offload_manager *m = new_manager(policies[i], 6);
        key_list keys = KEYS(5, 6, 5, 7);
        int32_t ids[] = {4, 3, 1, 0};
        offload_manager_restore(m, keys.keys, ids, keys.n);
        assert_int_equal(ids[0], -1); /* the older copy */
        assert_int_equal(ids[2], 1);
        for (int32_t k = 1; k < 4; k++)
            held[ids[k]] = number_of(&keys.keys[k]);
        offload_manager_check(m);
        assert_int_equal(offload_manager_n_blocks(m), 3);
        assert_int_equal(offload_manager_n_evictable(m), 3);
        expect_lookup(m, KEYS(5, 6, 7), OFFLOAD_HIT);
        /* Never used ids, then the holes; then the least recent one goes. */
        expect_store(m, KEYS(10, 11, 12), KEYS(10, 11, 12), KEYS(4, 5, 2), NONE);
        expect_store(m, KEYS(13, 14), KEYS(13, 14), KEYS(1, 3), KEYS(6, 5));
        complete(m, KEYS(10, 11, 12, 13, 14), true);
        key_list load = KEYS(7);
        assert_true(offload_manager_prepare_load(ids, m, load.keys, 1));
        assert_int_equal(ids[0], 0);
        offload_manager_destroy(m);
    }
    /* Nothing, and all of it. */
    offload_manager *m = new_manager("arc", 2);
    key_list both = KEYS(1, 2);
    int32_t ids[] = {1, 0};
    offload_manager_restore(m, NULL, NULL, 0);
    offload_manager_check(m);
    offload_manager_restore(m, both.keys, ids, 2);
    memcpy(held, (int32_t[]){2, 1}, 2 * sizeof *held);
    expect_store(m, KEYS(3), KEYS(3), KEYS(1), KEYS(1));
    offload_manager_destroy(m);
}

static void test_offload_manager_groups_are_apart(void **state)
{
    (void)state;
    offload_manager *m = new_manager("lru", 2);
    key_list one = KEYS(1);
    store(m, one);
    one.keys[0].group_id = 1;
    assert_int_equal(offload_manager_lookup(m, &one.keys[0]), OFFLOAD_MISS);
    offload_manager_destroy(m);
}

static void test_offload_manager_refuses(void **state)
{
    (void)state;
    offload_manager *m;
    offload_manager_opts opts = {.capacity = 0, .policy = offload_policy_lru()};
    assert_int_equal(offload_manager_create(&m, &opts), PGD_EINVAL);
    opts = (offload_manager_opts){.capacity = 1};
    assert_int_equal(offload_manager_create(&m, &opts), PGD_EINVAL);
    assert_null(offload_policy_find("fifo"));
    offload_manager_destroy(NULL);
}

/* Random calls against a plain list of what must be there. */
static void test_offload_manager_random(void **state)
{
    (void)state;
    enum { N = 24, CAPACITY = 7 };
    for (int32_t policy = 0; policy < 2; policy++) {
        offload_manager *m = new_manager(policy == 0 ? "lru" : "arc", CAPACITY);
        int32_t ref[N]; /* INT32_MIN = absent */
        int32_t id_of[N];
        for (int32_t i = 0; i < N; i++)
            ref[i] = INT32_MIN;
        uint64_t rng = 7;
        for (int32_t step = 0; step < 20000; step++) {
            rng = hash_u64(rng + 1);
            key_list keys = {0};
            int32_t first = (int32_t)((rng >> 8) % N), n = 1 + (int32_t)((rng >> 20) % 5);
            for (int32_t i = 0; i < n && first + i < N; i++, keys.n++) {
                int32_t number = first + i;
                memcpy(keys.keys[i].hash.bytes, &number, sizeof number);
            }
            int32_t ids[MAX_KEYS];
            offload_store s;
            bool all_ready = true, all_loading = true;
            for (int32_t i = 0; i < keys.n; i++) {
                all_ready &= ref[first + i] >= 0;
                all_loading &= ref[first + i] > 0;
            }
            switch (rng % 5) {
            case 0:
                if (!offload_manager_prepare_store(&s, m, keys.keys, keys.n))
                    break;
                for (int32_t i = 0; i < s.n_evicted; i++) {
                    int32_t k = number_of(&s.evicted[i]);
                    assert_int_equal(ref[k], 0);
                    assert_false(k >= first && k < first + keys.n);
                    ref[k] = INT32_MIN;
                }
                for (int32_t i = 0; i < s.n_stored; i++) {
                    int32_t k = number_of(&s.stored[i]);
                    assert_int_equal(ref[k], INT32_MIN);
                    ref[k] = -1;
                    id_of[k] = s.medium_ids[i];
                    for (int32_t other = 0; other < N; other++)
                        assert_true(other == k || ref[other] == INT32_MIN ||
                                    id_of[other] != id_of[k]);
                }
                break;
            case 1:
                assert_int_equal(offload_manager_prepare_load(ids, m, keys.keys, keys.n),
                                 all_ready);
                for (int32_t i = 0; all_ready && i < keys.n; i++) {
                    assert_int_equal(ids[i], id_of[first + i]);
                    ref[first + i]++;
                }
                break;
            case 2:
                if (!all_loading)
                    break;
                offload_manager_complete_load(m, keys.keys, keys.n, 0);
                for (int32_t i = 0; i < keys.n; i++)
                    ref[first + i]--;
                break;
            case 3: {
                bool ok = (rng >> 40) % 4 != 0;
                offload_manager_complete_store(m, keys.keys, keys.n, ok, 0);
                for (int32_t i = 0; i < keys.n; i++) {
                    if (ref[first + i] == -1)
                        ref[first + i] = ok ? 0 : INT32_MIN;
                }
                break;
            }
            default:
                offload_manager_touch(m, keys.keys, keys.n);
            }
            events[0] = 0;
            for (int32_t i = 0; i < N; i++) {
                key_list one = KEYS(i);
                expect_lookup(m, one,
                              ref[i] == INT32_MIN ? OFFLOAD_MISS
                              : ref[i] < 0        ? OFFLOAD_PENDING
                                                  : OFFLOAD_HIT);
            }
            offload_manager_check(m);
        }
        offload_manager_destroy(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_manager_h25_lru),
        cmocka_unit_test(test_offload_manager_h26_arc),
        cmocka_unit_test(test_offload_manager_arc_survives_a_scan),
        cmocka_unit_test(test_offload_manager_arc_adapts_both_ways),
        cmocka_unit_test(test_offload_manager_arc_borders),
        cmocka_unit_test(test_offload_manager_arc_gives_from_t1_when_t2_cannot),
        cmocka_unit_test(test_offload_manager_protects_its_keys),
        cmocka_unit_test(test_offload_manager_load_needs_all),
        cmocka_unit_test(test_offload_manager_order_after_loads),
        cmocka_unit_test(test_offload_manager_reset),
        cmocka_unit_test(test_offload_manager_tells_touches),
        cmocka_unit_test(test_offload_manager_restores),
        cmocka_unit_test(test_offload_manager_groups_are_apart),
        cmocka_unit_test(test_offload_manager_refuses),
        cmocka_unit_test(test_offload_manager_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
