/* What a cached prefix is worth, told from the definition of each kind of attention token by token,
 * for tests that compare a search with it. Blocks are cached by hand, without requests.
 *
 * Thread:  one test at a time
 */
#ifndef TESTS_UNIT_KV_ORACLE_H
#define TESTS_UNIT_KV_ORACLE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/kv/kv_coordinator.h"

#define ORACLE_MAX_BLOCKS 128

/* One group: which of its blocks are cached, and as which id. */
typedef struct oracle_group {
    attention_kind kind;
    int32_t block_size;
    int32_t window;
    int32_t n_drop;
    block_id ids[ORACLE_MAX_BLOCKS]; /* -1 = not cached */
} oracle_group;

static inline uint32_t oracle_random(uint64_t *state, uint32_t n)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint32_t)(*state >> 20) % n;
}

/* Distinct hashes that are no chain: searches compare them only. */
static inline void oracle_hashes(block_hash *hashes, int32_t n_hashes)
{
    for (int32_t i = 0; i < n_hashes; i++) {
        memset(&hashes[i], 0, sizeof hashes[i]);
        hashes[i].bytes[0] = (uint8_t)(i + 1);
        hashes[i].bytes[9] = (uint8_t)((i + 1) >> 8);
        hashes[i].bytes[20] = 77;
    }
}

/* Takes a block of the pool and publishes it as block idx of the group. */
static inline block_id oracle_cache(oracle_group *g, block_pool *pool, int32_t group_id,
                                    const block_hash *hashes, int32_t hash_block_size, int32_t idx)
{
    int32_t k = g->block_size / hash_block_size;
    assert_true(block_pool_get_new(&g->ids[idx], pool, 1));
    block_pool_publish(pool, g->ids[idx], &hashes[(idx + 1) * k - 1], group_id);
    return g->ids[idx];
}

/* Whether the token at `reader` attends to the one at `pos`. */
static inline bool oracle_attends(const oracle_group *g, int32_t reader, int32_t pos)
{
    if (g->kind == ATTENTION_SLIDING)
        return pos > reader - g->window;
    if (g->kind == ATTENTION_CHUNKED)
        return pos / g->window == reader / g->window;
    return true;
}

/* Whether the group can go on at token n_tokens with what is cached of the tokens before. */
static inline bool oracle_can_reuse(const oracle_group *g, int32_t n_tokens, int32_t n_known_tokens)
{
    if (n_tokens % g->block_size != 0)
        return false;
    for (int32_t pos = 0; pos < n_tokens; pos++) {
        if (oracle_attends(g, n_tokens, pos) && g->ids[pos / g->block_size] < 0)
            return false;
    }
    int32_t n_blocks = n_tokens / g->block_size;
    for (int32_t i = n_blocks; i < n_blocks + g->n_drop; i++) {
        if ((i + 1) * g->block_size > n_known_tokens || g->ids[i] < 0)
            return false;
    }
    return true;
}

/* The longest aligned prefix that all of the groups can reuse, found by trying every length. */
static inline int32_t oracle_longest(const oracle_group *groups, int32_t n_groups, int32_t n_known,
                                     int32_t max_tokens, int32_t alignment_tokens)
{
    for (int32_t n = PGD_MIN(n_known, max_tokens); n > 0; n--) {
        bool is_good = n % alignment_tokens == 0;
        for (int32_t g = 0; g < n_groups && is_good; g++)
            is_good = oracle_can_reuse(&groups[g], n, n_known);
        if (is_good)
            return n;
    }
    return 0;
}

/* The list must have the cached block wherever a later token looks, and null where none does. */
static inline void oracle_check_list(const oracle_group *g, const block_id *list, int32_t n_blocks,
                                     int32_t n_tokens)
{
    assert_int_equal(n_blocks * g->block_size, n_tokens);
    for (int32_t i = 0; i < n_blocks; i++) {
        bool is_needed = false;
        for (int32_t pos = i * g->block_size; pos < (i + 1) * g->block_size; pos++)
            is_needed = is_needed || oracle_attends(g, n_tokens, pos);
        assert_int_equal(list[i], is_needed ? g->ids[i] : BLOCK_POOL_NULL);
    }
}

#endif
