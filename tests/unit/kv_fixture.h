/* Requests with shared prefixes and a KV manager, for the KV tests.
 *
 * Thread:  one test at a time
 */
#ifndef TESTS_UNIT_KV_FIXTURE_H
#define TESTS_UNIT_KV_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/kv/kv_manager.h"

#define MAX_TOKENS 256

static const uint8_t SEED[32] = {7};
static uint64_t next_id;
static block_hasher *hasher;

static inline int setup(void **state)
{
    (void)state;
    next_id = 1;
    return block_hasher_create(&hasher, SEED) == PGD_OK ? 0 : -1;
}

static inline int teardown(void **state)
{
    (void)state;
    block_hasher_destroy(hasher);
    return 0;
}

static inline kv_group_spec spec_of(attention_kind kind, int32_t bs, int32_t window)
{
    return (kv_group_spec){.ops = kv_group_ops_of(kind), .block_size = bs, .window = window};
}

static inline kv_manager *new_manager(int32_t n_blocks, int32_t bs, bool enable_caching)
{
    const kv_group_spec spec = spec_of(ATTENTION_FULL, bs, 0);
    kv_manager_opts opts = {.n_blocks = n_blocks,
                            .groups = &spec,
                            .n_groups = 1,
                            .enable_caching = enable_caching,
                            .hash_block_size = bs,
                            .max_holders = 8,
                            .max_model_len = 1024,
                            .max_unfinished_tokens = 1024};
    kv_manager *m;
    assert_int_equal(kv_manager_create(&m, &opts), PGD_OK);
    return m;
}

static inline request *new_salted(const token_id *tokens, int32_t n_tokens, int32_t bs,
                                  const char *salt)
{
    request_opts opts = {.id = next_id++,
                         .prompt = tokens,
                         .n_prompt_tokens = n_tokens,
                         .max_tokens = 100,
                         .max_model_len = 1024,
                         .cache_salt = salt,
                         .block_size = bs,
                         .hasher = hasher};
    request *r;
    assert_int_equal(request_create(&r, &opts), PGD_OK);
    return r;
}

/* n_common tokens that all requests share, then n_own that only this one has. */
static inline request *new_request(int32_t n_common, int32_t n_own, int32_t bs)
{
    token_id tokens[MAX_TOKENS];
    for (int32_t i = 0; i < n_common; i++)
        tokens[i] = i;
    for (int32_t i = 0; i < n_own; i++)
        tokens[n_common + i] = 1000 * (token_id)next_id + i;
    return new_salted(tokens, n_common + n_own, bs, NULL);
}

static inline request *new_range(token_id first, int32_t n_tokens, int32_t bs)
{
    token_id tokens[MAX_TOKENS];
    for (int32_t i = 0; i < n_tokens; i++)
        tokens[i] = first + i;
    return new_salted(tokens, n_tokens, bs, NULL);
}

/* As the scheduler does it: a hit for newcomers, then slots for n tokens, then the step is counted
 * as computed. */
static inline bool alloc(block_ids_msg *new_blocks, kv_manager *m, request *r, int32_t n)
{
    kv_alloc a = {.n_new_tokens = n, .hit = r->kv_row < 0 ? kv_manager_lookup(m, r) : NULL};
    if (!kv_manager_allocate(new_blocks, m, r, &a))
        return false;
    r->num_computed_tokens += n + (a.hit != NULL ? a.hit->n_tokens : 0);
    kv_manager_check(m);
    return true;
}

static inline void give_back(kv_manager *m, request *r)
{
    kv_manager_free(m, r, r->num_computed_tokens);
    r->num_computed_tokens = 0;
    kv_manager_check(m);
}

static inline void expect_ids(const block_id *got, int32_t n_got, const block_id *want,
                              int32_t n_want)
{
    assert_int_equal(n_got, n_want);
    for (int32_t i = 0; i < n_want; i++)
        assert_int_equal(got[i], want[i]);
}

#define EXPECT_IDS(got, n_got, ...)                         \
    expect_ids(got, n_got, (const block_id[]){__VA_ARGS__}, \
               (int32_t)PGD_ARRAY_LEN(((const block_id[]){__VA_ARGS__})))

static inline void expect_table(const kv_manager *m, const request *r, const block_id *want,
                                int32_t n_want)
{
    block_ids_msg table;
    kv_manager_get_table(&table, m, r);
    expect_ids(table.ids[0], table.n_blocks[0], want, n_want);
}

#define EXPECT_TABLE(m, r, ...)                         \
    expect_table(m, r, (const block_id[]){__VA_ARGS__}, \
                 (int32_t)PGD_ARRAY_LEN(((const block_id[]){__VA_ARGS__})))

static inline void expect_free(const kv_manager *m, const block_id *want, int32_t n_want)
{
    const block_pool *p = kv_manager_get_pool(m);
    block_id id = -1;
    assert_int_equal(block_pool_n_free(p), n_want);
    for (int32_t i = 0; i < n_want; i++) {
        id = block_pool_next_free(p, id);
        assert_int_equal(id, want[i]);
    }
}

#define EXPECT_FREE(m, ...)                         \
    expect_free(m, (const block_id[]){__VA_ARGS__}, \
                (int32_t)PGD_ARRAY_LEN(((const block_id[]){__VA_ARGS__})))

static inline int32_t ref_of(const kv_manager *m, block_id id)
{
    return block_pool_ref_count(kv_manager_get_pool(m), id);
}

static inline bool is_hashed(const kv_manager *m, block_id id)
{
    return block_pool_get_hash(kv_manager_get_pool(m), id) != NULL;
}

static inline int32_t n_free(const kv_manager *m)
{
    return block_pool_n_free(kv_manager_get_pool(m));
}

#endif
