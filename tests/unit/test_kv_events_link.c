/* The link's stream, as a subscriber in this process adds it up, against pool and tier: tiers, clears, a
 * ring that was full, replay and snapshot. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include <unistd.h>

#include <nng/nng.h>
#include <nng/protocol/pubsub0/sub.h>
#include <nng/protocol/reqrep0/req.h>

#include "common/clock.h"
#include "engine/kv/kv_event_index.h"
#include "engine/kv/kv_event_unpack.h"
#include "engine/kv/kv_events_link.h"
#include "engine/offload/offload_manager.h"
#include "tests/unit/kv_fixture.h"
#include "tests/unit/kv_oracle.h"
#include "tests/unit/open_fds.h"

#define MAX_KNOWN 8192
#define WAIT_US   10000000

typedef struct block {
    char medium; /* its first letter */
    uint64_t group;
    uint64_t name;
} block;

typedef struct block_set {
    int32_t n;
    block blocks[MAX_KNOWN];
} block_set;

typedef struct rig {
    char dir[64];
    char url[128], replay_url[128];
    kv_events *events;
    kv_events_link *link;
    kv_manager *m;
    offload_manager *tier;
    atomic_int n_wanted;
    nng_socket sub, req;
    int32_t block_size;
    block_set known;
    uint64_t next_seq;
    int32_t n_cleared, n_removed;
} rig;

static void want_pump(void *arg)
{
    atomic_fetch_add(&((rig *)arg)->n_wanted, 1);
}

static void on_stored(void *arg, const offload_key *keys, const int32_t *ids, int32_t n_keys)
{
    (void)ids;
    kv_events_tier_stored(((rig *)arg)->events, KV_MEDIUM_HOST, keys, n_keys);
}

static void on_removed(void *arg, const offload_key *keys, const int32_t *ids, int32_t n_keys)
{
    (void)ids;
    kv_events_tier_removed(((rig *)arg)->events, KV_MEDIUM_HOST, keys, n_keys);
}

static void begin(rig *r, int32_t block_size, int32_t n_blocks, int32_t n_tier_blocks)
{
    memset(r, 0, sizeof *r);
    r->block_size = block_size;
    snprintf(r->dir, sizeof r->dir, "/tmp/paged-test-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->url, sizeof r->url, "ipc://%s/events", r->dir);
    snprintf(r->replay_url, sizeof r->replay_url, "ipc://%s/replay", r->dir);
    assert_int_equal(kv_events_create(&r->events, KV_EVENTS_MIN_BYTES), PGD_OK);
    const kv_group_spec specs[2] = {spec_of(ATTENTION_FULL, block_size, 0),
                                    spec_of(ATTENTION_FULL, block_size, 0)};
    kv_manager_opts opts = {.n_blocks = n_blocks,
                            .groups = specs,
                            .n_groups = 2,
                            .enable_caching = true,
                            .events = r->events,
                            .hash_block_size = block_size,
                            .max_holders = 8,
                            .max_model_len = 1024,
                            .max_unfinished_tokens = 1024};
    assert_int_equal(kv_manager_create(&r->m, &opts), PGD_OK);
    offload_manager_opts tier = {.capacity = n_tier_blocks,
                                 .policy = offload_policy_lru(),
                                 .on_stored = on_stored,
                                 .on_removed = on_removed,
                                 .arg = r};
    assert_int_equal(offload_manager_create(&r->tier, &tier), PGD_OK);
    kv_events_set_tier(r->events, KV_MEDIUM_HOST, offload_manager_list, r->tier);
    kv_events_link_opts link = {.events = r->events,
                                .url = r->url,
                                .replay_url = r->replay_url,
                                .topic = "t",
                                .buffer_batches = 1000,
                                .want_pump = want_pump,
                                .arg = r};
    pgd_why why = {0};
    if (kv_events_link_open(&r->link, &link, &why) != PGD_OK)
        fail_msg("%s", why.text);
    assert_int_equal(nng_sub0_open(&r->sub), 0);
    assert_int_equal(nng_socket_set(r->sub, NNG_OPT_SUB_SUBSCRIBE, "t", 2), 0);
    assert_int_equal(nng_socket_set_int(r->sub, NNG_OPT_RECVBUF, 4096), 0);
    assert_int_equal(nng_dial(r->sub, r->url, NULL, 0), 0);
    assert_int_equal(nng_req0_open(&r->req), 0);
    assert_int_equal(nng_dial(r->req, r->replay_url, NULL, 0), 0);
    usleep(20000); /* the connection stands on this side; the other needs a moment more */
}

static void end(rig *r)
{
    kv_events_link_close(r->link);
    nng_close(r->sub);
    nng_close(r->req);
    kv_manager_destroy(r->m);
    offload_manager_destroy(r->tier);
    kv_events_destroy(r->events);
    assert_int_equal(rmdir(r->dir), 0); /* no socket is left behind */
}

/* --- the subscriber --------------------------------------------------------------------------- */

static int32_t find(const block_set *s, char medium, uint64_t group, uint64_t name)
{
    for (int32_t i = 0; i < s->n; i++) {
        const block *b = &s->blocks[i];
        if (b->medium == medium && b->group == group && b->name == name)
            return i;
    }
    return -1;
}

static void add(block_set *s, char medium, uint64_t group, uint64_t name)
{
    assert_true(s->n < MAX_KNOWN);
    if (find(s, medium, group, name) < 0)
        s->blocks[s->n++] = (block){medium, group, name};
}

static void apply(rig *r, block_set *s, const uint8_t *batch, size_t n_bytes, bool is_strict)
{
    kv_event_unpack u;
    pgd_why why = {0};
    if (kv_event_unpack_begin(&u, batch, n_bytes, &why) != PGD_OK)
        fail_msg("%s", why.text);
    while (u.n_left > 0) {
        kv_unpacked_event ev;
        uint64_t name;
        assert_int_equal(kv_event_unpack_next(&ev, &u, &why), PGD_OK);
        r->n_cleared += ev.tag == KV_EVENT_TAG_CLEARED;
        if (ev.tag == KV_EVENT_TAG_CLEARED)
            s->n = 0;
        while (kv_event_unpack_next_number(&name, &ev.names)) {
            int32_t at = find(s, ev.medium.text[0], ev.group, name);
            if (is_strict) /* each event changes something */
                assert_int_equal(at >= 0, ev.tag == KV_EVENT_TAG_REMOVED);
            if (ev.tag == KV_EVENT_TAG_STORED) {
                add(s, ev.medium.text[0], ev.group, name);
            } else {
                r->n_removed++;
                s->blocks[at] = s->blocks[--s->n];
            }
        }
    }
}

static uint64_t big(const uint8_t *bytes, int n)
{
    uint64_t value = 0;
    for (int i = 0; i < n; i++)
        value = value << 8 | bytes[i];
    return value;
}

static void take_stream(rig *r)
{
    nng_msg *msg;
    while (nng_recvmsg(r->sub, &msg, NNG_FLAG_NONBLOCK) == 0) {
        const uint8_t *body = nng_msg_body(msg);
        size_t n = nng_msg_len(msg);
        assert_true(n > 2 + KV_EVENTS_LINK_HEAD_BYTES - 1);
        assert_memory_equal(body, "t", 2);
        assert_true(big(body + 2, 8) == r->next_seq);
        r->next_seq++;
        apply(r, &r->known, body + 18, n - 18, true);
        nng_msg_free(msg);
    }
}

static bool is_same(const rig *r, const block_set *s)
{
    static block_set held;
    const block_pool *pool = kv_manager_get_pool(r->m);
    held.n = 0;
    for (block_id id = 1; id < block_pool_n_blocks(pool); id++) {
        const block_hash *hash = block_pool_get_hash(pool, id);
        if (hash != NULL)
            add(&held, 'G', (uint64_t)block_pool_get_group(pool, id), kv_event_index_name(hash));
    }
    offload_key keys[64];
    for (int32_t cursor = 0; cursor >= 0;) {
        int32_t n = offload_manager_list(keys, r->tier, 64, &cursor);
        for (int32_t i = 0; i < n; i++)
            add(&held, 'C', (uint64_t)keys[i].group_id, kv_event_index_name(&keys[i].hash));
    }
    for (int32_t i = 0; i < held.n; i++) {
        if (find(s, held.blocks[i].medium, held.blocks[i].group, held.blocks[i].name) < 0)
            return false;
    }
    return held.n == s->n;
}

/* What the core thread does in its turns, until the subscriber knows all. */
static void settle(rig *r)
{
    uint64_t end_us = clock_now_us() + WAIT_US;
    for (int n_same = 0; n_same < 5;) {
        assert_true(clock_now_us() < end_us);
        if (atomic_exchange(&r->n_wanted, 0) > 0)
            kv_manager_pump_events(r->m);
        kv_events_link_poke(r->link);
        usleep(1000);
        take_stream(r);
        bool is_quiet = kv_events_is_empty(r->events) && !kv_events_is_lost(r->events);
        n_same = is_quiet && is_same(r, &r->known) ? n_same + 1 : 0;
    }
}

/* --- changes ---------------------------------------------------------------------------------- */

static void use(rig *r, token_id from, int32_t n_tokens)
{
    request *q = new_range(from, n_tokens, r->block_size);
    assert_true(alloc(NULL, r->m, q, n_tokens));
    give_back(r->m, q);
    request_destroy(q);
}

/* Copies what the pool holds in the first blocks to the tier. */
static void store(rig *r, int32_t n_blocks)
{
    const block_pool *pool = kv_manager_get_pool(r->m);
    for (block_id id = 1; id <= n_blocks; id++) {
        const block_hash *hash = block_pool_get_hash(pool, id);
        offload_store s;
        if (hash == NULL)
            continue;
        offload_key key = {*hash, block_pool_get_group(pool, id)};
        assert_true(offload_manager_prepare_store(&s, r->tier, &key, 1));
        offload_manager_complete_store(r->tier, &key, 1, true, offload_manager_generation(r->tier));
    }
}

static void test_kv_events_link_tells_pool_and_tier(void **state)
{
    (void)state;
    static rig r;
    begin(&r, 2, 100, 30);
    use(&r, 0, 60);
    settle(&r);
    assert_int_equal(r.known.n, 60);
    store(&r, 40); /* more than it holds */
    settle(&r);
    assert_int_equal(r.known.n, 90);
    /* The device's blocks alone: removed one by one, for cleared means all. */
    assert_true(kv_manager_reset_cache(r.m));
    settle(&r);
    assert_int_equal(r.known.n, 30);
    assert_int_equal(r.n_cleared, 0);
    offload_manager_reset(r.tier);
    kv_events_cleared(r.events, KV_MEDIUM_HOST);
    settle(&r);
    assert_int_equal(r.known.n, 0);
    use(&r, 0, 60);
    settle(&r);
    int32_t n_removed = r.n_removed, n_cleared = r.n_cleared;
    assert_true(kv_manager_reset_cache(r.m));
    settle(&r);
    assert_int_equal(r.n_removed, n_removed);
    assert_int_equal(r.n_cleared, n_cleared + 1);
    kv_events_link_stats stats;
    kv_events_link_get_stats(r.link, &stats);
    assert_true(stats.n_batches == r.next_seq && stats.n_dropped == 0);
    end(&r);
}

/* What others do to a tier is told by walking that tier alone. */
static void test_kv_events_link_walks_one_tier(void **state)
{
    (void)state;
    static rig r;
    begin(&r, 2, 100, 30);
    use(&r, 0, 60);
    store(&r, 20);
    settle(&r);
    assert_int_equal(r.known.n, 80);
    uint64_t next_seq = r.next_seq;
    assert_true(kv_events_walk_tier(r.events, KV_MEDIUM_HOST));
    assert_false(kv_events_walk_tier(r.events, KV_MEDIUM_HOST));
    kv_manager_pump_events(r.m);
    settle(&r);
    assert_true(r.next_seq == next_seq); /* nothing has changed */
    /* Blocks come and go unheard. */
    kv_events_set_tier(r.events, KV_MEDIUM_HOST, NULL, NULL);
    assert_true(kv_events_walk_tier(r.events, KV_MEDIUM_HOST));
    kv_manager_pump_events(r.m);
    offload_manager_reset(r.tier);
    settle(&r);
    assert_int_equal(r.known.n, 60);
    assert_int_equal(r.n_removed, 20);
    end(&r);
}

/* Far more than the ring holds, without a pause: what was missed is told as a difference. */
static void test_kv_events_link_makes_good_what_the_ring_dropped(void **state)
{
    (void)state;
    static rig r;
    uint64_t seed = 4;
    begin(&r, 2, 1500, 600);
    for (int i = 0; i < 4; i++)
        use(&r, i * 1000, 250);
    store(&r, 600);
    settle(&r);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 60; i++) {
            use(&r, (token_id)oracle_random(&seed, 40) * 1000, 250);
            if (i % 10 == 0)
                store(&r, 300);
        }
        settle(&r);
    }
    kv_events_link_stats stats;
    kv_events_link_get_stats(r.link, &stats);
    assert_true(stats.n_dropped > 0);
    assert_int_equal(r.n_cleared, 0);
    assert_true(stats.n_blocks[KV_MEDIUM_DEVICE] + stats.n_blocks[KV_MEDIUM_HOST] ==
                (uint64_t)r.known.n);
    end(&r);
}

static nng_msg *ask(rig *r, const void *question, size_t n_bytes)
{
    nng_msg *msg;
    assert_int_equal(nng_msg_alloc(&msg, 0), 0);
    assert_int_equal(nng_msg_append(msg, question, n_bytes), 0);
    assert_int_equal(nng_sendmsg(r->req, msg, 0), 0);
    assert_int_equal(nng_recvmsg(r->req, &msg, 0), 0);
    return msg;
}

/* Adds up what a late subscriber knows: removed but unknown is nothing. */
static void apply_late(block_set *late, const uint8_t *batch, size_t n_bytes)
{
    kv_event_unpack u;
    kv_unpacked_event ev;
    uint64_t name;
    assert_int_equal(kv_event_unpack_begin(&u, batch, n_bytes, NULL), PGD_OK);
    while (u.n_left > 0) {
        assert_int_equal(kv_event_unpack_next(&ev, &u, NULL), PGD_OK);
        while (kv_event_unpack_next_number(&name, &ev.names)) {
            int32_t at = find(late, ev.medium.text[0], ev.group, name);
            if (ev.tag == KV_EVENT_TAG_STORED)
                add(late, ev.medium.text[0], ev.group, name);
            else if (at >= 0)
                late->blocks[at] = late->blocks[--late->n];
        }
    }
}

static void put_big(uint8_t *out, uint64_t value, int n)
{
    for (int i = 0; i < n; i++)
        out[i] = (uint8_t)(value >> (8 * (n - 1 - i)));
}

/* Batches [from, end), by replay. */
static void replay(rig *r, block_set *late, uint64_t from, uint64_t end)
{
    while (from < end) {
        uint8_t question[9] = {'R'};
        put_big(question + 1, from, 8);
        nng_msg *msg = ask(r, question, sizeof question);
        const uint8_t *at = (const uint8_t *)nng_msg_body(msg) + 9;
        const uint8_t *last = (const uint8_t *)nng_msg_body(msg) + nng_msg_len(msg);
        assert_true(at < last && nng_msg_len(msg) < 1 << 20);
        for (; at < last && from < end; at += 12 + big(at + 8, 4), from++) {
            assert_true(big(at, 8) == from);
            apply_late(late, at + 12, big(at + 8, 4));
        }
        nng_msg_free(msg);
    }
}

/* Who comes late takes pieces, between which the cache changes; each holds up to its own number. */
static void test_kv_events_link_snapshot_in_pieces(void **state)
{
    (void)state;
    static rig r;
    static block_set late;
    begin(&r, 16, 2600, 100);
    for (int i = 0; i < 80; i++) {
        use(&r, 100000 + i * 1000, 250);
        while (!kv_events_is_empty(r.events))
            usleep(200);
    }
    store(&r, 100);
    settle(&r);
    late.n = 0;
    uint64_t next_seq = 0;
    uint32_t cursor = 0;
    int n_pieces = 0;
    for (; cursor != UINT32_MAX; n_pieces++) {
        uint8_t question[5] = {'S'};
        put_big(question + 1, cursor, 4);
        if (n_pieces > 0) {
            for (int i = 0; i < 5; i++)
                use(&r, 500000 + (n_pieces * 5 + i) * 1000, 250);
            settle(&r);
        }
        nng_msg *msg = ask(&r, question, sizeof question);
        const uint8_t *body = nng_msg_body(msg);
        assert_true(body[0] == 'S' && nng_msg_len(msg) > 21 && nng_msg_len(msg) < 1 << 20);
        uint64_t seq = big(body + 9, 8);
        if (n_pieces > 0)
            replay(&r, &late, next_seq, seq);
        next_seq = seq;
        cursor = (uint32_t)big(body + 17, 4);
        apply_late(&late, body + 21, nng_msg_len(msg) - 21);
        nng_msg_free(msg);
    }
    assert_true(n_pieces > 1);
    assert_true(next_seq == r.next_seq);
    assert_true(is_same(&r, &late));
    end(&r);
}

static void test_kv_events_link_refuses(void **state)
{
    (void)state;
    kv_events *events;
    int n_fds = 0;
    assert_int_equal(kv_events_create(&events, KV_EVENTS_MIN_BYTES), PGD_OK);
    static const char *const rows[][4] = {
        /* url, replay url, topic, what is told */
        {"http://x", "", "", "kv_events_url: "},
        {"ipc:///nowhere/x", "", "", "kv_events_url: cannot listen at ipc:///nowhere/x"},
        {"ipc:///tmp/paged-test-events-refused", "tcp://", "", "kv_events_replay_url: "},
        {"ipc:///tmp/paged-test-events-refused", "", "a\nb", "kv_events_topic: "},
    };
    for (size_t k = 0; k < 2 * PGD_ARRAY_LEN(rows); k++) {
        size_t i = k % PGD_ARRAY_LEN(rows);
        if (k == PGD_ARRAY_LEN(rows)) /* NNG has its own by now */
            n_fds = n_open_fds();
        kv_events_link *link;
        pgd_why why = {0};
        kv_events_link_opts o = {.events = events,
                                 .url = rows[i][0],
                                 .replay_url = rows[i][1],
                                 .topic = rows[i][2],
                                 .buffer_batches = 1,
                                 .want_pump = want_pump};
        assert_int_not_equal(kv_events_link_open(&link, &o, &why), PGD_OK);
        assert_null(link);
        assert_memory_equal(why.text, rows[i][3], strlen(rows[i][3]));
    }
    kv_events_destroy(events);
    for (int i = 0; i < 1000 && n_open_fds() > n_fds; i++) /* NNG closes some of them later */
        usleep(1000);
    assert_true(n_open_fds() <= n_fds);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_events_link_refuses),
        cmocka_unit_test(test_kv_events_link_tells_pool_and_tier),
        cmocka_unit_test(test_kv_events_link_walks_one_tier),
        cmocka_unit_test(test_kv_events_link_makes_good_what_the_ring_dropped),
        cmocka_unit_test(test_kv_events_link_snapshot_in_pieces),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
