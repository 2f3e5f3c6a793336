/* Which blocks an offload tier gives up when it is full (rules OF9, OF10).
 *
 * A policy is one file and one row of offload_policy_find's table. It keeps the entries in lists of
 * its own; the manager owns the entries and everything else about them. The structs are open for
 * the policy files.
 * Thread:  core
 */
#ifndef ENGINE_OFFLOAD_OFFLOAD_POLICY_H
#define ENGINE_OFFLOAD_OFFLOAD_POLICY_H

#include "common/list.h"
#include "engine/kv/block_hash.h"

/* Content of one block in one KV group. */
typedef struct offload_key {
    block_hash hash;
    int32_t group_id;
} offload_key;

/* A block of the tier, or (medium_id -1) the memory of one that was evicted. */
typedef struct offload_entry {
    offload_key key;
    list_node node;
    int32_t medium_id;
    int32_t ref_count;   /* -1: being written; 0: ready; n: read by n loads */
    int32_t list_idx;    /* the policy's; -1 = in none */
    uint32_t protect_id; /* of the last call whose keys name it: not a victim of that call */
    uint64_t watch;      /* stamp of the last answer that counts on it */
    uint64_t place;      /* in its list: grows towards the most recently used */
    bool is_doomed;      /* forgotten, but still written or read */
} offload_entry;

typedef struct offload_policy offload_policy;

typedef struct offload_policy_ops {
    const char *name; /* as in --kv-offload-policy */
    bool has_ghosts;  /* remembers up to 2 * capacity evicted keys */
    /* A block that has just been given room; its entry may be a ghost of this policy. */
    void (*insert)(offload_policy *p, offload_entry *e);
    /* The key was asked for; e may be a ghost. */
    void (*touch)(offload_policy *p, offload_entry *e);
    /* n victims, ready and not protected by this call, in order of eviction. False (out undefined)
     * when there are fewer. Changes nothing but where searches begin. */
    bool (*choose)(offload_entry **out, offload_policy *p, int32_t n, uint32_t protect_id);
    /* Gives up a victim of choose. Returns an entry that is remembered no longer (e itself without
     * ghosts), or NULL. */
    offload_entry *(*evict)(offload_policy *p, offload_entry *e);
} offload_policy_ops;

enum { OFFLOAD_POLICY_MAX_LISTS = 4 };

struct offload_policy {
    const offload_policy_ops *ops;
    int32_t capacity;                          /* blocks */
    double target;                             /* ARC's p: wanted length of T1 */
    list_node lists[OFFLOAD_POLICY_MAX_LISTS]; /* first = least recently used */
    int32_t n_entries[OFFLOAD_POLICY_MAX_LISTS];
    /* Nothing before it is ready: blocks that are read for long gather at the front, and each search
     * would pass all of them. */
    list_node *search_from[OFFLOAD_POLICY_MAX_LISTS];
    uint64_t last_place;
};

/* NULL when there is no policy of that name. Static storage. */
const offload_policy_ops *offload_policy_find(const char *name);
const offload_policy_ops *offload_policy_lru(void);
const offload_policy_ops *offload_policy_arc(void);

/* What a key's block is marked with in its medium, and told from any other by. */
uint64_t offload_key_tag(const offload_key *key);

void offload_policy_init(offload_policy *p, const offload_policy_ops *ops, int32_t capacity);
/* Takes the entry out of its list, if it is in one. */
void offload_policy_remove(offload_policy *p, offload_entry *e);
/* Makes it the most recently used of a list, wherever it was. */
void offload_policy_move(offload_policy *p, offload_entry *e, int32_t list_idx);
/* Its reference count has become 0. */
void offload_policy_note_ready(offload_policy *p, offload_entry *e);

/* For choose: where to begin, and the first victim from *node on; NULL when there is none. *node then
 * stands behind it. */
list_node *offload_policy_begin_search(offload_policy *p, int32_t list_idx);
offload_entry *offload_policy_next_victim(const offload_policy *p, int32_t list_idx,
                                          list_node **node, uint32_t protect_id);
/* Integrity of the lists, O(n); aborts with the values on a fault. */
void offload_policy_check(const offload_policy *p);

#endif
