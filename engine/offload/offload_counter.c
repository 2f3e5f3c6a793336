/* A hash table without chains: a set is looked through whole, and "used longest ago" goes by a clock
 * that ticks with each use. */
#include "engine/offload/offload_counter.h"

#include "common/mem.h"

#define N_WAYS 4

typedef struct place {
    uint64_t tag; /* 0 = empty */
    uint32_t count;
    uint32_t used_at;
} place;

struct offload_counter {
    place *places; /* [(set_mask + 1) * N_WAYS] */
    uint64_t set_mask;
    uint32_t clock;
};

pgd_err offload_counter_create(offload_counter **out, int32_t n_keys)
{
    *out = NULL;
    if (n_keys < 1)
        return PGD_EINVAL;
    offload_counter *c = mem_calloc(1, sizeof *c);
    if (c == NULL)
        return PGD_ENOMEM;
    uint64_t n_sets = 1;
    while (n_sets * N_WAYS < (uint64_t)n_keys)
        n_sets *= 2;
    c->set_mask = n_sets - 1;
    c->places = mem_calloc((size_t)n_sets * N_WAYS, sizeof *c->places);
    if (c->places == NULL) {
        mem_free(c);
        return PGD_ENOMEM;
    }
    *out = c;
    return PGD_OK;
}

void offload_counter_destroy(offload_counter *c)
{
    if (c == NULL)
        return;
    mem_free(c->places);
    mem_free(c);
}

static uint64_t tag_of(const offload_key *key)
{
    uint64_t tag = offload_key_tag(key);
    return tag != 0 ? tag : 1;
}

static place *set_of(const offload_counter *c, uint64_t tag)
{
    return &c->places[(tag >> 32 & c->set_mask) * N_WAYS];
}

void offload_counter_add(offload_counter *c, const offload_key *key)
{
    uint64_t tag = tag_of(key);
    place *set = set_of(c, tag);
    place *p = &set[0];
    c->clock++;
    for (int i = 0; i < N_WAYS && p->tag != tag; i++) {
        bool is_older = c->clock - set[i].used_at > c->clock - p->used_at;
        if (set[i].tag == tag || set[i].tag == 0 || (p->tag != 0 && is_older))
            p = &set[i];
    }
    if (p->tag != tag)
        *p = (place){.tag = tag};
    p->count += p->count < UINT32_MAX;
    p->used_at = c->clock;
}

uint32_t offload_counter_get(const offload_counter *c, const offload_key *key)
{
    uint64_t tag = tag_of(key);
    const place *set = set_of(c, tag);
    for (int i = 0; i < N_WAYS; i++) {
        if (set[i].tag == tag)
            return set[i].count;
    }
    return 0;
}
