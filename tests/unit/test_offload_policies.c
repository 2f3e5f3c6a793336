/* ARC against LRU: the real manager and policies under workloads whose hit rates are printed side by
 * side.
 *
 * A request names its blocks in order. It touches them, reads the leading ones that are there, and has
 * the others stored a step's worth at a time, each store being under way until the next one. The hit
 * rate is the share of looked up blocks that were read; scans, which can hit nothing, are not counted.
 * Keys are chained hashes as requests have them; the multi-turn workload is
 * tests/data/offload_trace.txt. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/hash.h"
#include "common/mem.h"
#include "engine/offload/offload_manager.h"

enum { BLOCK_TOKENS = 16, STEP_BLOCKS = 16 };

typedef struct access {
    const offload_key *keys; /* [n_stored], the leading n_wanted are looked up */
    int32_t n_wanted;
    int32_t n_stored;
} access;

typedef struct workload {
    offload_key *keys;
    access *accesses;
    int32_t n_accesses;
} workload;

/* --- the simulator ---------------------------------------------------------------------------- */

static int32_t read_leading(offload_manager *m, const access *a)
{
    static int32_t ids[4096];
    int32_t n = 0;
    while (n < a->n_wanted && offload_manager_lookup(m, &a->keys[n]) == OFFLOAD_HIT)
        n++;
    assert_true(n <= (int32_t)PGD_ARRAY_LEN(ids));
    assert_true(offload_manager_prepare_load(ids, m, a->keys, n));
    offload_manager_complete_load(m, a->keys, n, 0);
    return n;
}

static double hit_rate(const workload *w, const char *policy, int32_t capacity)
{
    offload_manager_opts opts = {.capacity = capacity, .policy = offload_policy_find(policy)};
    offload_manager *m;
    assert_int_equal(offload_manager_create(&m, &opts), PGD_OK);
    int64_t n_wanted = 0, n_read = 0;
    for (int32_t i = 0; i < w->n_accesses; i++) {
        const access *a = &w->accesses[i];
        const offload_key *under_way = NULL;
        int32_t n_under_way = 0;
        offload_manager_touch(m, a->keys, a->n_wanted);
        n_wanted += a->n_wanted;
        n_read += read_leading(m, a);
        for (int32_t at = 0; at < a->n_stored; at += n_under_way) {
            offload_store store;
            int32_t n = PGD_MIN(STEP_BLOCKS, a->n_stored - at);
            assert_true(offload_manager_prepare_store(&store, m, a->keys + at, n));
            offload_manager_complete_store(m, under_way, n_under_way, true, 0);
            under_way = a->keys + at;
            n_under_way = n;
        }
        offload_manager_complete_store(m, under_way, n_under_way, true, 0);
    }
    offload_manager_check(m);
    offload_manager_destroy(m);
    return 100.0 * (double)n_read / (double)n_wanted;
}

typedef struct rates {
    double lru, arc;
} rates;

/* Whatever the workload: ARC is at most two points worse. */
static rates compare(const workload *w, const char *name, int32_t capacity)
{
    rates r = {hit_rate(w, "lru", capacity), hit_rate(w, "arc", capacity)};
    print_message("%-24s %6d blocks: lru %5.1f %%  arc %5.1f %%  %+5.1f\n", name, capacity, r.lru,
                  r.arc, r.arc - r.lru);
    assert_true(r.arc >= r.lru - 2);
    return r;
}

/* --- workloads -------------------------------------------------------------------------------- */

static block_hasher *new_hasher(void)
{
    static const uint8_t seed[HASH_SHA256_BYTES] = {1};
    block_hasher *h;
    assert_int_equal(block_hasher_create(&h, seed), PGD_OK);
    return h;
}

enum { SCANNED = 1000000 }; /* numbers from here on are parts of scans */

/* Requests of one block each; numbers: [n]. */
static workload single_blocks(const int32_t *numbers, int32_t n)
{
    workload w = {.keys = mem_calloc((size_t)n, sizeof *w.keys),
                  .accesses = mem_calloc((size_t)n, sizeof *w.accesses),
                  .n_accesses = n};
    assert_true(w.keys != NULL && w.accesses != NULL);
    block_hasher *h = new_hasher();
    for (int32_t i = 0; i < n; i++) {
        block_hasher_hash(&w.keys[i].hash, h, NULL, (const token_id *)&numbers[i], 1, NULL, 0);
        w.accesses[i] = (access){&w.keys[i], numbers[i] < SCANNED, 1};
    }
    block_hasher_destroy(h);
    return w;
}

static void free_workload(workload *w)
{
    mem_free(w->keys);
    mem_free(w->accesses);
}

typedef struct dice {
    uint64_t state;
    int32_t n;
    double *sums; /* [n] of 1 / rank */
} dice;

static dice new_zipf(int32_t n)
{
    dice d = {.n = n, .sums = mem_calloc((size_t)n, sizeof *d.sums)};
    assert_non_null(d.sums);
    for (int32_t i = 0; i < n; i++)
        d.sums[i] = (i > 0 ? d.sums[i - 1] : 0) + 1.0 / (i + 1);
    return d;
}

static int32_t roll_zipf(dice *d)
{
    d->state = hash_u64(d->state + 1);
    double at = (double)(d->state >> 11) * 0x1p-53 * d->sums[d->n - 1];
    int32_t low = 0, high = d->n - 1;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (d->sums[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

enum { N_NUMBERS = 60000, CAPACITY = 500 };

static void test_offload_policies_scan(void **state)
{
    (void)state;
    static int32_t numbers[N_NUMBERS];
    for (int32_t i = 0; i < N_NUMBERS; i++)
        numbers[i] = i;
    workload w = single_blocks(numbers, N_NUMBERS);
    rates r = compare(&w, "scan", CAPACITY);
    assert_true(r.lru == 0 && r.arc == 0);
    free_workload(&w);
}

static void test_offload_policies_loop(void **state)
{
    (void)state;
    static int32_t numbers[N_NUMBERS];
    static const int32_t lengths[] = {90, 101, 120, 190, 400}; /* hundredths of the capacity */
    for (size_t l = 0; l < PGD_ARRAY_LEN(lengths); l++) {
        char name[32];
        for (int32_t i = 0; i < N_NUMBERS; i++)
            numbers[i] = i % (CAPACITY * lengths[l] / 100);
        workload w = single_blocks(numbers, N_NUMBERS);
        snprintf(name, sizeof name, "loop of %d %%", lengths[l]);
        rates r = compare(&w, name, CAPACITY);
        if (lengths[l] < 100)
            assert_true(r.lru > 99 && r.arc > 99);
        free_workload(&w);
    }
}

static void test_offload_policies_zipf(void **state)
{
    (void)state;
    static int32_t numbers[N_NUMBERS];
    dice d = new_zipf(20 * CAPACITY);
    for (int32_t i = 0; i < N_NUMBERS; i++)
        numbers[i] = roll_zipf(&d);
    workload w = single_blocks(numbers, N_NUMBERS);
    compare(&w, "zipf", CAPACITY / 4);
    compare(&w, "zipf", CAPACITY);
    compare(&w, "zipf", 4 * CAPACITY);
    free_workload(&w);
    mem_free(d.sums);
}

/* Every 2000 requests for popular blocks as many pass by that nobody wants again: what LRU loses by
 * those, ARC must keep. */
static void test_offload_policies_zipf_with_scans(void **state)
{
    (void)state;
    static int32_t numbers[N_NUMBERS];
    dice d = new_zipf(20 * CAPACITY);
    for (int32_t i = 0; i < N_NUMBERS; i++)
        numbers[i] = i / 2000 % 2 == 0 ? roll_zipf(&d) : SCANNED + i;
    workload w = single_blocks(numbers, N_NUMBERS);
    for (int32_t capacity = CAPACITY / 4; capacity <= 4 * CAPACITY; capacity *= 4) {
        rates r = compare(&w, "zipf with scans", capacity);
        assert_true(r.arc >= r.lru + 8);
    }
    free_workload(&w);
    mem_free(d.sums);
}

/* What is popular changes: ARC must let go of what it holds dear. */
static void test_offload_policies_changing_zipf(void **state)
{
    (void)state;
    static int32_t numbers[N_NUMBERS];
    dice d = new_zipf(20 * CAPACITY);
    for (int32_t i = 0; i < N_NUMBERS; i++)
        numbers[i] = roll_zipf(&d) + i / 6000 * 20 * CAPACITY;
    workload w = single_blocks(numbers, N_NUMBERS);
    compare(&w, "zipf that changes", CAPACITY);
    free_workload(&w);
    mem_free(d.sums);
}

/* --- the recorded conversations --------------------------------------------------------------- */

enum { MAX_CONVERSATIONS = 1000, MAX_ACCESSES = 4000, DOCUMENT_BLOCKS = 500 };

typedef struct turn {
    int32_t conversation, system, n_system, n_prompt, n_output;
} turn;

static int32_t read_trace(turn *turns, const char *path)
{
    char line[128];
    int32_t n = 0;
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL) {
        turn t;
        if (line[0] == '#')
            continue;
        assert_true(n < MAX_ACCESSES);
        assert_int_equal(sscanf(line, "%*d %d %d %d %d %d", &t.conversation, &t.system, &t.n_system,
                                &t.n_prompt, &t.n_output),
                         5);
        assert_in_range(t.conversation, 0, MAX_CONVERSATIONS - 1);
        turns[n++] = t;
    }
    (void)fclose(f);
    return n;
}

static int32_t n_full_blocks(const turn *t)
{
    return (t->n_prompt + t->n_output - 1) / BLOCK_TOKENS; /* the last token is never computed */
}

/* The chained keys of a conversation up to its last turn. */
static void make_keys(offload_key *keys, block_hasher *h, const turn *t)
{
    for (int32_t b = 0; b < n_full_blocks(t); b++) {
        token_id tokens[BLOCK_TOKENS];
        for (int32_t i = 0; i < BLOCK_TOKENS; i++) {
            int32_t at = b * BLOCK_TOKENS + i;
            int32_t speaker = at < t->n_system ? t->system : MAX_CONVERSATIONS + t->conversation;
            tokens[i] = (token_id)(hash_u64(((uint64_t)speaker << 32) + (uint64_t)at) & 0xFFFF);
        }
        block_hasher_hash(&keys[b].hash, h, b > 0 ? &keys[b - 1].hash : NULL, tokens, BLOCK_TOKENS,
                          NULL, 0);
    }
}

/* After each scan_every turns follows a document that is read once; 0: never. */
static workload recorded_conversations(const char *path, int32_t scan_every)
{
    static turn turns[MAX_ACCESSES];
    static const turn *last[MAX_CONVERSATIONS];
    static const offload_key *keys_of[MAX_CONVERSATIONS];
    int32_t n = read_trace(turns, path), n_keys = 0;
    for (int32_t i = 0; i < n; i++)
        last[turns[i].conversation] = &turns[i];
    for (int32_t c = 0; c < MAX_CONVERSATIONS; c++)
        n_keys += last[c] != NULL ? n_full_blocks(last[c]) : 0;
    int32_t n_scans = scan_every > 0 ? n / scan_every : 0;
    n_keys += n_scans * DOCUMENT_BLOCKS;
    workload w = {.keys = mem_calloc((size_t)n_keys, sizeof *w.keys),
                  .accesses = mem_calloc((size_t)(n + n_scans), sizeof *w.accesses)};
    assert_true(w.keys != NULL && w.accesses != NULL);
    block_hasher *h = new_hasher();
    offload_key *at = w.keys;
    for (int32_t c = 0; c < MAX_CONVERSATIONS; c++) {
        if (last[c] == NULL)
            continue;
        make_keys(at, h, last[c]);
        keys_of[c] = at;
        at += n_full_blocks(last[c]);
    }
    for (int32_t i = 0; i < n; i++) {
        w.accesses[w.n_accesses++] = (access){.keys = keys_of[turns[i].conversation],
                                              .n_wanted = (turns[i].n_prompt - 1) / BLOCK_TOKENS,
                                              .n_stored = n_full_blocks(&turns[i])};
        if (scan_every == 0 || i % scan_every != scan_every - 1)
            continue;
        turn document = {.conversation = -1 - i, .n_prompt = DOCUMENT_BLOCKS * BLOCK_TOKENS + 1};
        make_keys(at, h, &document);
        w.accesses[w.n_accesses++] = (access){.keys = at, .n_stored = DOCUMENT_BLOCKS};
        at += DOCUMENT_BLOCKS;
    }
    block_hasher_destroy(h);
    return w;
}

static void test_offload_policies_conversations(void **state)
{
    (void)state;
    workload w = recorded_conversations("tests/data/offload_trace.txt", 0);
    for (int32_t capacity = 1000; capacity <= 64000; capacity *= 2)
        compare(&w, "conversations", capacity);
    free_workload(&w);
}

static void test_offload_policies_conversations_with_scans(void **state)
{
    (void)state;
    workload w = recorded_conversations("tests/data/offload_trace.txt", 4);
    for (int32_t capacity = 2000; capacity <= 16000; capacity *= 2) {
        rates r = compare(&w, "conversations with scans", capacity);
        /* With room for everything that is wanted again there is little to win. */
        assert_true(r.arc >= r.lru + (capacity <= 4000 ? 8 : 0));
    }
    free_workload(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_policies_scan),
        cmocka_unit_test(test_offload_policies_loop),
        cmocka_unit_test(test_offload_policies_zipf),
        cmocka_unit_test(test_offload_policies_zipf_with_scans),
        cmocka_unit_test(test_offload_policies_changing_zipf),
        cmocka_unit_test(test_offload_policies_conversations),
        cmocka_unit_test(test_offload_policies_conversations_with_scans),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
