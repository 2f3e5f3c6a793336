/* Claims are counted from the message on and not from the copy on: between the two anything may
 * happen on a real worker, so a conflict that the copies' moments happened to avoid is a fault too. */
#include "tests/sim/sim_medium.h"

#include <stdlib.h>
#include <string.h>

#include <search.h>

typedef struct known_block {
    uint64_t tag;
    size_t place;
} known_block;

static const char *const user_names[SIM_N_USERS] = {"a load", "a store", "a write to disk",
                                                    "a read from disk"};

#define FAULT(m, ...)                                            \
    do {                                                         \
        if ((m)->fault[0] == '\0')                               \
            snprintf((m)->fault, sizeof(m)->fault, __VA_ARGS__); \
    } while (0)

void sim_medium_init(sim_medium *m, const sim_config *config, bool has_errors)
{
    memset(m, 0, sizeof *m);
    m->config = config;
    m->has_errors = has_errors;
    for (int32_t g = 0; g < config->n_groups; g++)
        m->max_block_size = PGD_MAX(m->max_block_size, config->groups[g].block_size);
    size_t n_shards = (size_t)config->n_tier_blocks * (size_t)config->n_ranks;
    m->shards = calloc(n_shards, sizeof *m->shards);
    m->slots = calloc(n_shards * (size_t)m->max_block_size, sizeof *m->slots);
    if (m->shards == NULL || m->slots == NULL)
        abort();
}

void sim_medium_deinit(sim_medium *m)
{
    free(m->shards);
    free(m->slots);
    free(m->contents);
    tdestroy(m->known, free);
}

/* --- what belongs where ------------------------------------------------------------------------- */

static int compare_tags(const void *a, const void *b)
{
    const known_block *x = a, *y = b;
    return (x->tag > y->tag) - (x->tag < y->tag);
}

static const known_block *find_known(const sim_medium *m, uint64_t tag)
{
    known_block key = {.tag = tag};
    known_block *const *found = tfind(&key, &m->known, compare_tags);
    return found != NULL ? *found : NULL;
}

void sim_medium_know(sim_medium *m, uint64_t tag, int32_t g, const uint64_t *chain, int32_t end)
{
    int32_t bs = m->config->groups[g].block_size;
    if (find_known(m, tag) != NULL)
        return;
    if (m->n_contents + (size_t)bs > m->cap_contents) {
        m->cap_contents = 2 * m->cap_contents + 4096;
        m->contents = realloc(m->contents, m->cap_contents * sizeof *m->contents);
        if (m->contents == NULL)
            abort();
    }
    known_block *known = malloc(sizeof *known);
    if (known == NULL)
        abort();
    *known = (known_block){tag, m->n_contents * SIM_MAX_GROUPS + (size_t)g};
    for (int32_t pos = end - bs; pos < end; pos++)
        m->contents[m->n_contents++] = sim_chain_content(chain[pos + 1], g);
    if (tsearch(known, &m->known, compare_tags) == NULL)
        abort();
}

int32_t sim_medium_group_of(const sim_medium *m, uint64_t tag)
{
    const known_block *known = find_known(m, tag);
    return known != NULL ? (int32_t)(known->place % SIM_MAX_GROUPS) : -1;
}

bool sim_medium_is_right(const sim_medium *m, uint64_t tag, const uint64_t *slots)
{
    const known_block *known = find_known(m, tag);
    if (known == NULL)
        return false;
    const uint64_t *want = m->contents + known->place / SIM_MAX_GROUPS;
    for (int32_t i = 0; i < m->config->groups[known->place % SIM_MAX_GROUPS].block_size; i++) {
        if (slots[i] != want[i] && !(m->has_errors && slots[i] == SIM_NOT_FINITE))
            return false;
    }
    return true;
}

/* --- who is at work ------------------------------------------------------------------------------ */

static size_t shard_idx(const sim_medium *m, int32_t block, int32_t rank)
{
    return (size_t)block * (size_t)m->config->n_ranks + (size_t)rank;
}

static bool is_writer(sim_user user)
{
    return user == SIM_USER_STORE || user == SIM_USER_DISK_READ;
}

static void claim_shard(sim_medium *m, sim_user user, int32_t block, int32_t rank, uint64_t tag)
{
    sim_shard *shard = &m->shards[shard_idx(m, block, rank)];
    for (int other = 0; other < SIM_N_USERS; other++) {
        if (shard->n_users[other] > 0 && (is_writer(user) || is_writer((sim_user)other)))
            FAULT(m, "%s is to use medium block %d, which %s still uses on rank %d",
                  user_names[user], block, user_names[other], rank);
    }
    if (!is_writer(user) && (!shard->is_whole || shard->tag != tag))
        FAULT(m, "%s is to read medium block %d, which %s on rank %d", user_names[user], block,
              shard->is_whole ? "holds something else" : "is not whole", rank);
    m->n_double_loads += user == SIM_USER_LOAD && shard->n_users[user] > 0;
    shard->n_users[user]++;
}

void sim_medium_claim(sim_medium *m, sim_user user, int32_t block, uint64_t tag)
{
    if (block < 0 || block >= m->config->n_tier_blocks) {
        FAULT(m, "%s is to use medium block %d of %d", user_names[user], block,
              m->config->n_tier_blocks);
        return;
    }
    if (sim_medium_group_of(m, tag) < 0)
        FAULT(m, "%s of medium block %d: nothing has this tag", user_names[user], block);
    for (int32_t rank = 0; rank < m->config->n_ranks; rank++)
        claim_shard(m, user, block, rank, tag);
}

void sim_medium_release(sim_medium *m, sim_user user, int32_t block, int32_t rank)
{
    m->shards[shard_idx(m, block, rank)].n_users[user]--;
}

void sim_medium_clear(sim_medium *m)
{
    int32_t n_shards = m->config->n_tier_blocks * m->config->n_ranks;
    memset(m->shards, 0, (size_t)n_shards * sizeof *m->shards);
}

void sim_medium_lose_worker(sim_medium *m)
{
    int32_t n_shards = m->config->n_tier_blocks * m->config->n_ranks;
    for (int32_t i = 0; i < n_shards; i++) {
        m->shards[i].n_users[SIM_USER_LOAD] = 0;
        m->shards[i].n_users[SIM_USER_STORE] = 0;
    }
}

/* --- copies --------------------------------------------------------------------------------------- */

static uint64_t *slots_of(const sim_medium *m, int32_t block, int32_t rank)
{
    return m->slots + shard_idx(m, block, rank) * (size_t)m->max_block_size;
}

bool sim_medium_read(uint64_t *slots, sim_medium *m, int32_t block, int32_t rank, uint64_t tag)
{
    const sim_shard *shard = &m->shards[shard_idx(m, block, rank)];
    memcpy(slots, slots_of(m, block, rank), (size_t)m->max_block_size * sizeof *slots);
    return shard->is_whole && shard->tag == tag;
}

void sim_medium_write(sim_medium *m, int32_t block, int32_t rank, uint64_t tag,
                      const uint64_t *slots)
{
    if (!sim_medium_is_right(m, tag, slots))
        FAULT(m, "medium block %d of rank %d gets contents that its tag does not name, group %d",
              block, rank, sim_medium_group_of(m, tag));
    memcpy(slots_of(m, block, rank), slots, (size_t)m->max_block_size * sizeof *slots);
    sim_shard *shard = &m->shards[shard_idx(m, block, rank)];
    shard->tag = tag;
    shard->is_whole = true;
}

void sim_medium_tear(sim_medium *m, int32_t block, int32_t rank, uint64_t draw)
{
    uint64_t *slots = slots_of(m, block, rank);
    m->shards[shard_idx(m, block, rank)].is_whole = false;
    for (int32_t i = 0; i < m->max_block_size; i++) {
        draw = hash_u64(draw);
        if (draw % 2 == 0)
            slots[i] = draw;
    }
}
