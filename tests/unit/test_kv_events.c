/* Events of the prefix cache: what each says (EV1, EV2), when the last copy of a hash goes (EV3),
 * overflow and snapshot (EV4), and a reader on a thread of its own. */
#include <pthread.h>
#include <sched.h>

#include "engine/offload/offload_manager.h"
#include "tests/unit/kv_fixture.h"
#include "tests/unit/kv_oracle.h"

static kv_events *events;

static kv_manager *new_watched(int32_t n_blocks, const kv_group_spec *specs, int32_t n_groups,
                               int32_t hash_bs)
{
    kv_manager_opts opts = {.n_blocks = n_blocks,
                            .groups = specs,
                            .n_groups = n_groups,
                            .enable_caching = true,
                            .events = events,
                            .hash_block_size = hash_bs,
                            .max_holders = 8,
                            .max_model_len = 1024,
                            .max_unfinished_tokens = 1024};
    kv_manager *m;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_OK);
    return m;
}

static void begin(size_t capacity_bytes)
{
    assert_int_equal(kv_events_create(&events, capacity_bytes), PGD_OK);
}

static void end(kv_manager *m)
{
    kv_manager_destroy(m);
    kv_events_destroy(events);
}

static kv_cache_event expect(kv_cache_event_kind kind)
{
    kv_cache_event ev;
    assert_true(kv_events_peek(&ev, events));
    assert_int_equal(ev.kind, kind);
    return ev;
}

static void expect_nothing(void)
{
    kv_cache_event ev;
    assert_false(kv_events_peek(&ev, events));
}

static void drain(void)
{
    kv_cache_event ev;
    while (kv_events_peek(&ev, events))
        kv_events_pop(events);
}

static void expect_removed(const block_hash *hash)
{
    kv_cache_event ev = expect(KV_CACHE_REMOVED);
    assert_int_equal(ev.n_hashes, 1);
    assert_memory_equal(ev.hashes, hash, sizeof *hash);
    assert_int_equal(ev.medium, KV_MEDIUM_DEVICE);
    kv_events_pop(events);
}

static void test_kv_events_stored_says_all(void **state)
{
    (void)state;
    begin(KV_EVENTS_MIN_BYTES);
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 4, 0),
                                    spec_of(ATTENTION_SLIDING, 2, 3)};
    kv_manager *m = new_watched(40, specs, 2, 2);
    token_id tokens[13];
    for (int i = 0; i < 13; i++)
        tokens[i] = 100 + i;
    request *r = new_salted(tokens, 13, 2, "secret");
    uint8_t extra[64];
    size_t extra_bytes = block_hash_write_extra(extra, sizeof extra, NULL, NULL, 0, "secret");
    assert_true(alloc(NULL, m, r, 8));
    /* Blocks of 4 tokens, named by every second hash. */
    kv_cache_event ev = expect(KV_CACHE_STORED);
    assert_int_equal(ev.seq, 0);
    assert_int_equal(ev.group_id, 0);
    assert_string_equal(ev.attention, "full");
    assert_int_equal(ev.medium, KV_MEDIUM_DEVICE);
    assert_int_equal(ev.window, 0);
    assert_int_equal(ev.block_size, 4);
    assert_null(ev.parent);
    assert_int_equal(ev.n_hashes, 2);
    assert_memory_equal(&ev.hashes[0], &r->block_hashes[1], sizeof(block_hash));
    assert_memory_equal(&ev.hashes[1], &r->block_hashes[3], sizeof(block_hash));
    assert_int_equal(ev.n_tokens, 8);
    assert_memory_equal(ev.tokens, tokens, 8 * sizeof *tokens);
    assert_int_equal(ev.extra_bytes, extra_bytes);
    assert_memory_equal(ev.extra, extra, extra_bytes);
    kv_events_pop(events);
    /* Of each 4 tokens a window of 3 needs the last block of 2: 1 and 3, one event each, with the
     * parent of the chain although its block is not cached. */
    ev = expect(KV_CACHE_STORED);
    assert_int_equal(ev.seq, 1);
    assert_int_equal(ev.group_id, 1);
    assert_string_equal(ev.attention, "sliding window");
    assert_int_equal(ev.window, 3);
    assert_int_equal(ev.n_hashes, 1);
    assert_memory_equal(ev.parent, &r->block_hashes[0], sizeof(block_hash));
    assert_memory_equal(ev.hashes, &r->block_hashes[1], sizeof(block_hash));
    assert_memory_equal(ev.tokens, tokens + 2, 2 * sizeof *tokens);
    assert_int_equal(ev.extra_bytes, 0);
    kv_events_pop(events);
    ev = expect(KV_CACHE_STORED);
    assert_memory_equal(ev.parent, &r->block_hashes[2], sizeof(block_hash));
    assert_memory_equal(ev.hashes, &r->block_hashes[3], sizeof(block_hash));
    kv_events_pop(events);
    expect_nothing();
    /* Later blocks go on behind their parent; the window has recycled it by then. */
    assert_true(alloc(NULL, m, r, 4));
    ev = expect(KV_CACHE_STORED);
    assert_int_equal(ev.group_id, 0);
    assert_memory_equal(ev.parent, &r->block_hashes[3], sizeof(block_hash));
    assert_memory_equal(ev.hashes, &r->block_hashes[5], sizeof(block_hash));
    assert_memory_equal(ev.tokens, tokens + 8, 4 * sizeof *tokens);
    assert_int_equal(ev.extra_bytes, 0);
    kv_events_pop(events);
    ev = expect(KV_CACHE_STORED);
    assert_memory_equal(ev.parent, &r->block_hashes[4], sizeof(block_hash));
    kv_events_pop(events);
    expect_nothing();
    give_back(m, r);
    expect_nothing(); /* cached still */
    assert_true(kv_manager_reset_cache(m));
    ev = expect(KV_CACHE_CLEARED);
    assert_int_equal(ev.group_id, -1);
    assert_int_equal(ev.medium, KV_MEDIUM_DEVICE);
    kv_events_pop(events);
    expect_nothing();
    request_destroy(r);
    end(m);
}

static void test_kv_events_removed_with_the_last_copy(void **state)
{
    (void)state;
    begin(KV_EVENTS_MIN_BYTES);
    const kv_group_spec spec = spec_of(ATTENTION_FULL, 2, 0);
    kv_manager *m = new_watched(6, &spec, 1, 2);
    request *r0 = new_range(0, 4, 2);
    request *r1 = new_range(0, 4, 2);
    r1->skip_prefix_lookup = true;      /* computes the same again, HS8 */
    assert_true(alloc(NULL, m, r0, 4)); /* blocks 1, 2 */
    kv_cache_event ev = expect(KV_CACHE_STORED);
    assert_int_equal(ev.n_hashes, 2);
    kv_events_pop(events);
    assert_true(alloc(NULL, m, r1, 4)); /* blocks 3, 4: the second copies are no news */
    expect_nothing();
    give_back(m, r0);
    give_back(m, r1); /* free: 5, 2, 1, 4, 3 */
    request *r2 = new_range(500, 5, 2);
    assert_true(alloc(NULL, m, r2, 5)); /* takes 5, 2, 1: copies are left */
    ev = expect(KV_CACHE_STORED);
    assert_int_equal(ev.n_hashes, 2);
    kv_events_pop(events);
    expect_nothing();
    request *r3 = new_range(700, 3, 2);
    assert_true(alloc(NULL, m, r3, 3)); /* takes 4, 3: the last ones */
    expect_removed(&r0->block_hashes[1]);
    expect_removed(&r0->block_hashes[0]);
    expect(KV_CACHE_STORED);
    kv_events_pop(events);
    /* What was never computed is taken back. */
    kv_manager_free(m, r3, 1);
    expect_removed(&r3->block_hashes[0]);
    /* Distrust reaches what others hold. */
    kv_manager_forget(m, r2);
    expect_removed(&r2->block_hashes[0]);
    expect_removed(&r2->block_hashes[1]);
    expect_nothing();
    give_back(m, r2);
    request *all[] = {r0, r1, r2, r3};
    for (size_t i = 0; i < PGD_ARRAY_LEN(all); i++)
        request_destroy(all[i]);
    end(m);
}

/* What a reader knows, by (group, hash): built from events, compared with the pool. */
#define MODEL_MAX 4096

typedef struct reader {
    int32_t n_known;
    int32_t groups[MODEL_MAX];
    block_hash hashes[MODEL_MAX];
    uint64_t next_seq;
    uint64_t n_missed;
    int32_t n_snapshots;
    bool is_in_snapshot;
} reader;

static int32_t find_known(const reader *k, int32_t group_id, const block_hash *hash)
{
    for (int32_t i = 0; i < k->n_known; i++) {
        if (k->groups[i] == group_id && memcmp(&k->hashes[i], hash, sizeof *hash) == 0)
            return i;
    }
    return -1;
}

static void apply(reader *k, const kv_cache_event *ev)
{
    k->n_missed += ev->seq - k->next_seq;
    k->next_seq = ev->seq + 1;
    if (ev->kind == KV_CACHE_CLEARED || ev->kind == KV_CACHE_SNAPSHOT_BEGIN)
        k->n_known = 0;
    if (ev->kind == KV_CACHE_SNAPSHOT_BEGIN || ev->kind == KV_CACHE_SNAPSHOT_END)
        k->is_in_snapshot = ev->kind == KV_CACHE_SNAPSHOT_BEGIN;
    k->n_snapshots += ev->kind == KV_CACHE_SNAPSHOT_END;
    for (int32_t i = 0; i < ev->n_hashes; i++) {
        int32_t at = find_known(k, ev->group_id, &ev->hashes[i]);
        if (ev->kind == KV_CACHE_STORED && at < 0) {
            assert_true(k->n_known < MODEL_MAX);
            k->groups[k->n_known] = ev->group_id;
            k->hashes[k->n_known++] = ev->hashes[i];
        } else if (ev->kind == KV_CACHE_REMOVED && at >= 0) {
            k->n_known--;
            k->groups[at] = k->groups[k->n_known];
            k->hashes[at] = k->hashes[k->n_known];
        }
    }
}

static void read_all(reader *k)
{
    kv_cache_event ev;
    while (kv_events_peek(&ev, events)) {
        apply(k, &ev);
        kv_events_pop(events);
    }
}

static void check_known(const reader *k, const kv_manager *m)
{
    const block_pool *pool = kv_manager_get_pool(m);
    for (int32_t i = 0; i < k->n_known; i++)
        assert_true(block_pool_lookup(pool, &k->hashes[i], k->groups[i]) >= 0);
    for (block_id id = 1; id < block_pool_n_blocks(pool); id++) {
        const block_hash *hash = block_pool_get_hash(pool, id);
        if (hash != NULL)
            assert_true(find_known(k, block_pool_get_group(pool, id), hash) >= 0);
    }
}

/* One random change of the cache. */
static void change(kv_manager *m, request **r, uint64_t *seed)
{
    int32_t k = (int32_t)oracle_random(seed, 4);
    if (r[k] != NULL && oracle_random(seed, 40) == 0)
        kv_manager_forget(m, r[k]);
    if (r[k] != NULL) {
        kv_manager_free(m, r[k], (int32_t)oracle_random(seed, 100));
        request_destroy(r[k]);
        r[k] = NULL;
        return;
    }
    r[k] =
        new_range((token_id)oracle_random(seed, 8) * 10, 1 + (int32_t)oracle_random(seed, 100), 2);
    r[k]->skip_prefix_lookup = oracle_random(seed, 4) == 0;
    const kv_hit *hit = kv_manager_lookup(m, r[k]);
    kv_alloc a = {.n_new_tokens = r[k]->n_tokens - hit->n_tokens, .hit = hit};
    if (!kv_manager_allocate(NULL, m, r[k], &a)) {
        request_destroy(r[k]);
        r[k] = NULL;
    }
}

static void release(kv_manager *m, request **r)
{
    for (int k = 0; k < 4; k++) {
        if (r[k] != NULL)
            kv_manager_free(m, r[k], 1000);
        request_destroy(r[k]);
        r[k] = NULL;
    }
}

/* A reader that keeps up knows the cache exactly; one that does not is told, and a snapshot, read in
 * pieces while the cache changes, makes it right again. */
static void test_kv_events_reader_knows_the_cache(void **state)
{
    (void)state;
    const kv_group_spec specs[3] = {spec_of(ATTENTION_FULL, 4, 0), spec_of(ATTENTION_SLIDING, 2, 9),
                                    spec_of(ATTENTION_CHUNKED, 2, 8)};
    static reader k;
    uint64_t seed = 6;
    int32_t n_losses = 0;
    for (int lazy = 0; lazy < 2; lazy++) {
        begin(KV_EVENTS_MIN_BYTES);
        kv_manager *m = new_watched(700, specs, 3, 2);
        request *r[4] = {0};
        memset(&k, 0, sizeof k);
        for (int turn = 0; turn < 3000; turn++) {
            change(m, r, &seed);
            kv_manager_pump_events(m);
            if (turn % 1000 == 999) {
                release(m, r);
                assert_true(kv_manager_reset_cache(m));
            }
            if (lazy && oracle_random(&seed, 60) != 0 && !k.is_in_snapshot)
                continue;
            read_all(&k);
            if (kv_events_is_lost(events)) {
                n_losses++;
                assert_int_equal(lazy, 1);
                kv_events_request_snapshot(events);
                k.is_in_snapshot = true;
            } else if (!k.is_in_snapshot && turn % 7 == 0) {
                check_known(&k, m);
            }
        }
        /* Asked for at any time. */
        kv_events_request_snapshot(events);
        for (int i = 0; i < 10; i++) {
            kv_manager_pump_events(m);
            read_all(&k);
        }
        assert_false(k.is_in_snapshot);
        assert_false(kv_events_is_lost(events));
        check_known(&k, m);
        assert_int_equal(k.n_missed, kv_events_n_dropped(events));
        assert_int_equal(k.n_snapshots >= 1 + 5 * lazy, true);
        release(m, r);
        end(m);
    }
    assert_true(n_losses > 5);
}

static void test_kv_events_overflow_drops_until_the_snapshot(void **state)
{
    (void)state;
    begin(KV_EVENTS_MIN_BYTES);
    const kv_group_spec spec = spec_of(ATTENTION_FULL, 2, 0);
    kv_manager *m = new_watched(1000, &spec, 1, 2);
    int n_requests = 0;
    for (; !kv_events_is_lost(events); n_requests++) {
        request *r = new_request(0, 100, 2);
        assert_true(alloc(NULL, m, r, 100));
        give_back(m, r);
        request_destroy(r);
    }
    assert_true(n_requests > 20);
    uint64_t n_dropped = kv_events_n_dropped(events);
    assert_true(n_dropped >= 1);
    drain();
    /* There is room again, but the stream has a hole. */
    request *r = new_request(0, 100, 2);
    assert_true(alloc(NULL, m, r, 100));
    expect_nothing();
    assert_true(kv_events_n_dropped(events) > n_dropped);
    kv_manager_pump_events(m);
    expect_nothing();
    kv_events_request_snapshot(events);
    kv_manager_pump_events(m);
    assert_false(kv_events_is_lost(events));
    expect(KV_CACHE_SNAPSHOT_BEGIN);
    kv_events_pop(events);
    kv_cache_event ev = expect(KV_CACHE_STORED);
    assert_null(ev.parent);
    assert_null(ev.tokens);
    assert_int_equal(ev.n_tokens, 0);
    assert_int_equal(ev.block_size, 2);
    give_back(m, r);
    request_destroy(r);
    end(m);
}

/* While the walk of a snapshot has not come to the only copy of a hash, another is published behind the
 * walk, and the first goes. */
static void test_kv_events_snapshot_tells_copies_behind_the_walk(void **state)
{
    (void)state;
    begin(KV_EVENTS_MIN_BYTES);
    const kv_group_spec spec = spec_of(ATTENTION_FULL, 1, 0);
    kv_manager *m = new_watched(600, &spec, 1, 1);
    request *low = new_range(1000, 250, 1);
    request *middle = new_range(2000, 250, 1);
    request *r0 = new_range(0, 4, 1);
    request *r1 = new_range(0, 4, 1);
    assert_true(alloc(NULL, m, low, 250));
    assert_true(alloc(NULL, m, middle, 250));
    assert_true(alloc(NULL, m, r0, 4));
    EXPECT_TABLE(m, r0, 501, 502, 503, 504);
    kv_manager_free(m, low, 0);
    kv_events_request_snapshot(events);
    kv_manager_pump_events(m);
    r1->skip_prefix_lookup = true;
    assert_true(alloc(NULL, m, r1, 4));
    EXPECT_TABLE(m, r1, 250, 249, 248, 247);
    kv_manager_free(m, r0, 0);
    bool is_told[4] = {false};
    bool is_begun = false;
    for (bool is_ended = false; !is_ended; kv_manager_pump_events(m)) {
        for (kv_cache_event ev; kv_events_peek(&ev, events); kv_events_pop(events)) {
            is_begun = is_begun || ev.kind == KV_CACHE_SNAPSHOT_BEGIN;
            is_ended = is_ended || ev.kind == KV_CACHE_SNAPSHOT_END;
            for (int32_t i = 0; is_begun && i < ev.n_hashes; i++) {
                for (int32_t k = 0; k < 4; k++) {
                    if (memcmp(&ev.hashes[i], &r1->block_hashes[k], sizeof(block_hash)) == 0)
                        is_told[k] = ev.kind == KV_CACHE_STORED;
                }
            }
        }
    }
    for (int32_t k = 0; k < 4; k++)
        assert_true(is_told[k]);
    give_back(m, r1);
    give_back(m, middle);
    request *all[] = {low, middle, r0, r1};
    for (size_t i = 0; i < PGD_ARRAY_LEN(all); i++)
        request_destroy(all[i]);
    end(m);
}

/* A record that does not fit before the end needs its room at the front: what was left at the end is
 * lost to it, and unread records stay as they are. */
static void test_kv_events_wrap_spares_unread_records(void **state)
{
    (void)state;
    begin(KV_EVENTS_MIN_BYTES);
    const kv_group_spec spec = spec_of(ATTENTION_FULL, 256, 0);
    static token_id tokens[256];
    block_hash hashes[4096];
    int32_t n_written = 0;
    assert_int_equal(kv_events_set_groups(events, &spec, 1), PGD_OK);
    oracle_hashes(hashes, 4096);
    for (; !kv_events_is_lost(events); n_written++)
        kv_events_removed(events, 0, &hashes[n_written]);
    int32_t n_all = n_written - 1; /* small records that fill the ring */
    kv_events_destroy(events);
    for (int32_t n_left = 10; n_left < 16; n_left++) {
        begin(KV_EVENTS_MIN_BYTES);
        assert_int_equal(kv_events_set_groups(events, &spec, 1), PGD_OK);
        for (int32_t i = 0; i < n_all - n_left; i++)
            kv_events_removed(events, 0, &hashes[i]);
        expect_removed(&hashes[0]);
        const kv_stored big = {.end = 1, .hashes = hashes, .hashes_per_block = 1, .tokens = tokens};
        kv_events_stored(events, &big);
        for (int32_t i = 1; i < n_all - n_left; i++)
            expect_removed(&hashes[i]);
        if (!kv_events_is_lost(events)) {
            expect(KV_CACHE_STORED);
            kv_events_pop(events);
        }
        expect_nothing();
        kv_events_destroy(events);
    }
}

/* EV1: a long store is told in pieces, each with its parent, together all of it. */
static void test_kv_events_long_store_is_told_in_pieces(void **state)
{
    (void)state;
    begin(1 << 20);
    const kv_group_spec spec = spec_of(ATTENTION_FULL, 1, 0);
    kv_manager *m = new_watched(400, &spec, 1, 1);
    request *r = new_range(0, 250, 1);
    assert_true(alloc(NULL, m, r, 250));
    int32_t n_told = 0;
    int32_t n_pieces = 0;
    for (kv_cache_event ev; kv_events_peek(&ev, events); kv_events_pop(events), n_pieces++) {
        assert_int_equal(ev.kind, KV_CACHE_STORED);
        assert_int_equal(ev.parent != NULL, n_told > 0);
        if (ev.parent != NULL)
            assert_memory_equal(ev.parent, &r->block_hashes[n_told - 1], sizeof(block_hash));
        for (int32_t i = 0; i < ev.n_hashes; i++, n_told++) {
            assert_memory_equal(&ev.hashes[i], &r->block_hashes[n_told], sizeof(block_hash));
            assert_int_equal(ev.tokens[i], n_told);
        }
    }
    assert_int_equal(n_told, 250);
    assert_true(n_pieces > 1);
    give_back(m, r);
    request_destroy(r);
    end(m);
}

static void tell_host_stored(void *arg, const offload_key *keys, const int32_t *medium_ids,
                             int32_t n_keys)
{
    (void)medium_ids;
    kv_events_tier_stored(arg, KV_MEDIUM_HOST, keys, n_keys);
}

static void tell_host_removed(void *arg, const offload_key *keys, const int32_t *medium_ids,
                              int32_t n_keys)
{
    (void)medium_ids;
    kv_events_tier_removed(arg, KV_MEDIUM_HOST, keys, n_keys);
}

static void store_in(offload_manager *m, const offload_key *keys, int32_t n_keys, bool ok)
{
    offload_store s;
    assert_true(offload_manager_prepare_store(&s, m, keys, n_keys));
    offload_manager_complete_store(m, keys, n_keys, ok, offload_manager_generation(m));
}

/* A tier tells what can be loaded from it, by its own medium; a snapshot walks all of them, in pieces,
 * and what is being stored is not there yet. */
static void test_kv_events_of_tiers(void **state)
{
    (void)state;
    enum { N = 700 };
    begin(1 << 20);
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 2, 0), spec_of(ATTENTION_FULL, 2, 0)};
    kv_manager *m = new_watched(300, specs, 2, 2);
    const offload_manager_opts opts = {.capacity = N,
                                       .policy = offload_policy_arc(),
                                       .on_stored = tell_host_stored,
                                       .on_removed = tell_host_removed,
                                       .arg = events};
    offload_manager *tier;
    static offload_key keys[N + 1];
    static block_hash hashes[N + 1];
    oracle_hashes(hashes, N + 1);
    for (int32_t i = 0; i <= N; i++)
        keys[i] = (offload_key){hashes[i], i >= 100};
    assert_int_equal(offload_manager_create(&tier, &opts), PGD_OK);
    kv_events_set_tier(events, KV_MEDIUM_HOST, offload_manager_list, tier);
    store_in(tier, keys, N - 1, true);
    int32_t n_told = 0;
    for (kv_cache_event ev; kv_events_peek(&ev, events); kv_events_pop(events)) {
        assert_int_equal(ev.kind, KV_CACHE_STORED);
        assert_int_equal(ev.medium, KV_MEDIUM_HOST);
        assert_null(ev.tokens);
        assert_null(ev.parent);
        assert_int_equal(ev.block_size, 2);
        for (int32_t i = 0; i < ev.n_hashes; i++, n_told++) {
            assert_memory_equal(&ev.hashes[i], &hashes[n_told], sizeof(block_hash));
            assert_int_equal(ev.group_id, n_told >= 100);
        }
    }
    assert_int_equal(n_told, N - 1);
    store_in(tier, &keys[N - 1], 1, false); /* a store that fails is told by nobody */
    expect_nothing();
    offload_store s;
    assert_true(offload_manager_prepare_store(&s, tier, &keys[N - 1], 1));
    /* One is evicted behind the walk's back, its place taken by the one that comes. */
    request *r = new_range(0, 40, 2);
    assert_true(alloc(NULL, m, r, 40));
    drain();
    kv_events_request_snapshot(events);
    static bool is_known[N + 1];
    int32_t n_device = 0;
    bool is_ended = false;
    for (int32_t turn = 0; !is_ended; turn++) {
        kv_manager_pump_events(m);
        if (turn == 3) {
            offload_manager_complete_store(tier, &keys[N - 1], 1, true, 0);
            store_in(tier, &keys[N], 1, true);
        }
        for (kv_cache_event ev; kv_events_peek(&ev, events); kv_events_pop(events)) {
            is_ended = ev.kind == KV_CACHE_SNAPSHOT_END;
            if (ev.medium == KV_MEDIUM_DEVICE && ev.kind == KV_CACHE_STORED)
                n_device += ev.n_hashes;
            for (int32_t i = 0; ev.medium == KV_MEDIUM_HOST && i < ev.n_hashes; i++) {
                int32_t k = 0;
                while (memcmp(&hashes[k], &ev.hashes[i], sizeof(block_hash)) != 0)
                    k++;
                is_known[k] = ev.kind == KV_CACHE_STORED;
            }
        }
        assert_true(turn < 20);
    }
    assert_int_equal(n_device, 40); /* 20 in each group */
    for (int32_t k = 0; k <= N; k++)
        assert_int_equal(is_known[k], offload_manager_lookup(tier, &keys[k]) == OFFLOAD_HIT);
    /* The device's blocks may go while the tier's stay, and the other way round. */
    give_back(m, r);
    assert_true(kv_manager_reset_cache(m));
    kv_cache_event ev = expect(KV_CACHE_CLEARED);
    assert_int_equal(ev.medium, KV_MEDIUM_DEVICE);
    kv_events_pop(events);
    offload_manager_reset(tier);
    kv_events_cleared(events, KV_MEDIUM_HOST);
    ev = expect(KV_CACHE_CLEARED);
    assert_int_equal(ev.medium, KV_MEDIUM_HOST);
    kv_events_pop(events);
    int32_t cursor = 0;
    while (cursor >= 0)
        assert_int_equal(offload_manager_list(keys, tier, 64, &cursor), 0);
    kv_events_set_tier(events, KV_MEDIUM_HOST, NULL, NULL);
    kv_events_request_snapshot(events);
    for (int32_t i = 0; i < 5; i++)
        kv_manager_pump_events(m);
    expect(KV_CACHE_SNAPSHOT_BEGIN);
    kv_events_pop(events);
    expect(KV_CACHE_SNAPSHOT_END);
    kv_events_pop(events);
    request_destroy(r);
    offload_manager_destroy(tier);
    end(m);
}

static void test_kv_events_create_refuses(void **state)
{
    (void)state;
    assert_int_equal(kv_events_create(&events, KV_EVENTS_MIN_BYTES - 1), PGD_EINVAL);
    assert_null(events);
    begin(KV_EVENTS_MIN_BYTES);
    /* A block whose tokens do not fit the ring could never be told. */
    const kv_group_spec spec = spec_of(ATTENTION_FULL, 8192, 0);
    kv_manager_opts opts = {.n_blocks = 4,
                            .groups = &spec,
                            .n_groups = 1,
                            .enable_caching = true,
                            .events = events,
                            .hash_block_size = 8192,
                            .max_holders = 1,
                            .max_model_len = 8192};
    kv_manager *m;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_EINVAL);
    opts.enable_caching = false; /* nothing to tell */
    assert_int_equal(kv_manager_create(&m, &opts), PGD_OK);
    end(m);
}

typedef struct thread_reader {
    reader known;
    bool is_bad;
} thread_reader;

static void *read_in_thread(void *arg)
{
    thread_reader *t = arg;
    kv_cache_event ev;
    for (;;) {
        if (!kv_events_peek(&ev, events)) {
            if (kv_events_is_lost(events))
                kv_events_request_snapshot(events);
            sched_yield();
            continue;
        }
        bool is_end = ev.kind == KV_CACHE_CLEARED;
        t->is_bad =
            t->is_bad || (ev.n_tokens > 0 && ev.tokens[0] < 0) || ev.seq < t->known.next_seq;
        apply(&t->known, &ev);
        kv_events_pop(events);
        if (is_end)
            return NULL;
    }
}

static void test_kv_events_reader_in_another_thread(void **state)
{
    (void)state;
    static thread_reader t;
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, 4, 0),
                                    spec_of(ATTENTION_SLIDING, 2, 9)};
    uint64_t seed = 9;
    pthread_t thread;
    request *r[4] = {0};
    memset(&t, 0, sizeof t);
    begin(KV_EVENTS_MIN_BYTES);
    kv_manager *m = new_watched(300, specs, 2, 2);
    assert_int_equal(pthread_create(&thread, NULL, read_in_thread, &t), 0);
    for (int turn = 0; turn < 4000; turn++) {
        change(m, r, &seed);
        kv_manager_pump_events(m);
    }
    release(m, r);
    /* Until the reader has been made whole, and has the end. */
    while (kv_events_is_lost(events)) {
        kv_manager_pump_events(m);
        sched_yield();
    }
    assert_true(kv_manager_reset_cache(m));
    while (kv_events_is_lost(events)) {
        kv_manager_pump_events(m);
        assert_true(kv_manager_reset_cache(m));
        sched_yield();
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_false(t.is_bad);
    assert_int_equal(t.known.n_known, 0);
    end(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_events_stored_says_all),
        cmocka_unit_test(test_kv_events_removed_with_the_last_copy),
        cmocka_unit_test(test_kv_events_reader_knows_the_cache),
        cmocka_unit_test(test_kv_events_overflow_drops_until_the_snapshot),
        cmocka_unit_test(test_kv_events_snapshot_tells_copies_behind_the_walk),
        cmocka_unit_test(test_kv_events_wrap_spares_unread_records),
        cmocka_unit_test(test_kv_events_long_store_is_told_in_pieces),
        cmocka_unit_test(test_kv_events_of_tiers),
        cmocka_unit_test(test_kv_events_create_refuses),
        cmocka_unit_test(test_kv_events_reader_in_another_thread),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
