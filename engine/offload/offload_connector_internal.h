/* What offload_connector.c, offload_distrust.c, offload_match.c, offload_promote.c and
 * offload_transfer.c share. Not for other modules.
 *
 * Thread:  core
 */
#ifndef ENGINE_OFFLOAD_OFFLOAD_CONNECTOR_INTERNAL_H
#define ENGINE_OFFLOAD_OFFLOAD_CONNECTOR_INTERNAL_H

#include "common/hash_map.h"
#include "engine/offload/offload_connector.h"
#include "engine/offload/offload_cost.h"
#include "engine/offload/offload_counter.h"

#define OFFLOAD_STORE_JOBS  256 /* under way at most */
#define OFFLOAD_PROMOTIONS  64  /* requests that have blocks brought up at a time */
#define OFFLOAD_MAX_WAITS   16 /* times that a request waits for others' blocks, for each admission */
#define OFFLOAD_PATIENCE_US 10000000 /* and how long in all */
#define OFFLOAD_REMOVALS    16384 /* blocks to be gone from disk at a time, as the disk tier has it */
#define OFFLOAD_RETRY_US    10000000 /* when one could not be removed */

/* A block of a request, behind which its first `end` tokens are whole. */
typedef struct offload_item {
    offload_key key;
    int32_t idx; /* in the group's table */
    int32_t end;
} offload_item;

typedef struct offload_device_block {
    list_node queue;  /* linked: to be stored, as `key` */
    offload_key key;  /* since it was published */
    uint64_t seq;     /* of its publication */
    int32_t store;    /* job that reads it, -1 = none */
    int32_t load_end; /* while it is loaded: as in offload_item */
    int32_t load_medium;
    int32_t load_next; /* in its job, in order; -1 = the last */
} offload_device_block;

typedef struct offload_medium_block {
    block_id store_device; /* source, while it is stored */
    int32_t store_next;    /* in its job; -1 = the last */
    int32_t n_loading;     /* loads under way that read it */
    int32_t promotion;     /* 1 + the one that brought it up and is not over; 0 = none */
    bool is_in_ring;       /* to be written to disk */
} offload_medium_block;

/* A transfer between device and host. Slots of loads come first, then those of stores. */
typedef struct offload_job {
    uint64_t id;        /* 0 = free */
    uint64_t rank_mask; /* that have reported */
    request *r;         /* load */
    int32_t n_local;    /* load: tokens before it */
    int32_t n_valid;    /* load: tokens, as far as is known */
    int32_t first;      /* load: device block, store: medium block; -1 = none */
    int32_t n_blocks;
    int32_t n_good; /* least of the ranks' */
    bool is_sent;
    bool must_flush; /* store: in the message that is made now */
    list_node node;  /* loads: to be sent, or done and to be told */
} offload_job;

typedef enum offload_pin_state {
    OFFLOAD_PIN_FREE,
    OFFLOAD_PIN_HELD,    /* loadable, and kept */
    OFFLOAD_PIN_QUEUED,  /* to be read */
    OFFLOAD_PIN_READING, /* by the disk tier */
    OFFLOAD_PIN_LOST     /* could not be read */
} offload_pin_state;

/* A host block that stays for a promotion's sake. */
typedef struct offload_pin {
    offload_pin_state state;
    int32_t medium_id;
    int32_t promotion; /* -1: whoever wanted it is gone */
    int32_t next;      /* of the promotion, or free; -1 = the last */
    list_node queue;   /* while QUEUED */
} offload_pin;

typedef struct offload_promotion {
    int32_t first_pin;
    int32_t n_left; /* blocks still to come */
    bool is_used;
} offload_promotion;

/* A block whose content is not to be trusted, until it is gone from disk. */
typedef struct offload_removal {
    offload_key key;
    int32_t next; /* of the free ones, or of those that are to be tried again; -1 = the last */
} offload_removal;

struct offload_connector {
    offload_connector_opts opts;
    kv_connector ops;
    kv_group_spec groups[PGD_MAX_KV_GROUPS];
    int32_t n_drop[PGD_MAX_KV_GROUPS]; /* blocks behind a prefix that must be there too (CO5) */
    int32_t alignment; /* tokens: a hit is a multiple of it; 0 = nothing is cached */
    offload_manager *manager;
    offload_counter *counter; /* requests that asked for a key; NULL = all are stored */
    offload_rates rates;
    offload_stats stats;
    uint64_t n_changes; /* transfers ended, pins let go: what was refused may be possible now */
    uint64_t n_resets;
    uint64_t serial; /* of job ids */

    offload_device_block *device; /* [n_device_blocks] */
    offload_medium_block *medium; /* [capacity] */
    list_node queue;              /* device blocks to be stored, in order of publication */
    int32_t n_queued;
    uint64_t n_published;
    uint64_t publish_limit;  /* those up to here are written when the step being made begins */
    uint64_t refused_change; /* n_changes when the queue's head was refused; UINT64_MAX = was not */
    block_id *urgent;        /* [n_device_blocks]: handed out again with something to be stored */
    offload_key *urgent_keys;
    int32_t n_urgent;

    offload_job *jobs; /* [max_num_seqs + OFFLOAD_STORE_JOBS] */
    int32_t n_loads;
    int64_t n_load_blocks;  /* of loads under way */
    int32_t n_store_blocks; /* of stores */
    list_node to_send;      /* loads */
    list_node to_tell;      /* loads */
    block_id *msg_device;   /* [max_step_blocks], of the message that was made last, and so on */
    int32_t *msg_medium;
    uint64_t *msg_tags;
    kv_transfer_msg *messages; /* [KV_TRANSFER_MAX_JOBS] */
    int32_t n_messages;
    int32_t n_to_flush; /* jobs that must be */
    int32_t n_msg_blocks;

    int32_t max_items;
    offload_item *items; /* [max_items], scratch */
    offload_key *keys;   /* [max(max_items, capacity)], scratch */

    offload_pin *pins; /* [n_pins] */
    int32_t n_pins;
    int32_t first_free_pin;
    int32_t n_free_pins;
    offload_promotion promotions[OFFLOAD_PROMOTIONS];
    list_node to_read;     /* pins */
    int32_t n_disk_reads;  /* taken by the disk tier */
    int32_t n_disk_writes; /* likewise */
    int32_t *ring;         /* [capacity], medium blocks to be written */
    int32_t first_in_ring;
    int32_t n_in_ring;

    hash_map *distrusted;      /* by tag: those of removals that are not free */
    offload_removal *removals; /* [OFFLOAD_REMOVALS] */
    int32_t first_free_removal;
    int32_t first_refused;   /* to be tried again at retry_at_us */
    int32_t n_disk_removals; /* taken by the disk tier */
    uint64_t retry_at_us;
    bool must_clear_disk; /* more than there is room for: all of it goes */
};

static inline bool offload__is_cached(const offload_connector *c, int32_t g)
{
    return c->groups[g].ops->lookup != NULL;
}

static inline const block_hash *offload__hash_of(const offload_connector *c, const request *r,
                                                 int32_t g, int32_t idx)
{
    int64_t per_block = c->groups[g].block_size / c->opts.hash_block_size;
    return &r->block_hashes[(idx + 1) * per_block - 1];
}

static inline offload_key offload__key_of(const offload_connector *c, const request *r, int32_t g,
                                          int32_t idx)
{
    return (offload_key){.hash = *offload__hash_of(c, r, g, idx), .group_id = g};
}

static inline offload_key offload__key_at(const offload_connector *c, int32_t medium_id)
{
    const offload_key *key = offload_manager_get_key(c->manager, medium_id);
    PGD_ASSERTF(key != NULL, "medium block %d is free", medium_id);
    return *key;
}

/* offload_match.c. Fills items with the blocks that a prefix of n_tokens needs behind the first
 * n_local, in the order in which they end; n_tokens -1: all that the request can name. Their
 * number. */
int32_t offload__list_items(offload_connector *c, const request *r, int32_t n_local,
                            int32_t n_tokens);
kv_match offload__match(void *arg, request *r, int32_t n_local_tokens);

/* offload_promote.c. Keeps the host blocks among the items and brings up the others. False and no
 * change when there is no room. */
bool offload__promote(offload_connector *c, request *r, int32_t n_items);
bool offload__is_promoting(const offload_connector *c, const request *r);
/* The request has no use for what was brought up any more, or has used it. */
void offload__end_promotion(offload_connector *c, request *r);
/* A block has become loadable: it is to be on disk too. */
void offload__want_on_disk(offload_connector *c, int32_t medium_id);
/* Takes what the disk tier has finished, gives it what waits. */
void offload__pump_disk(offload_connector *c);
void offload__clear_disk(offload_connector *c);

/* offload_distrust.c. Their content is wrong: not read from disk nor written there until what is
 * there is gone. */
void offload__distrust(offload_connector *c, const offload_key *keys, int32_t n_keys);
bool offload__is_distrusted(const offload_connector *c, const offload_key *key);
bool offload__is_on_disk(const offload_connector *c, const offload_key *key);
void offload__end_removal(offload_connector *c, const disk_tier_done *done);
/* Tries again what was refused; empties the tier when it is to be. */
void offload__pump_removals(offload_connector *c);
/* Jobs of the disk tier have ended, unheard; is_same: what could not be removed is still there. */
void offload__clear_removals(offload_connector *c, bool is_same);

/* offload_transfer.c: functions of the kv_connector and the block_listener. */
void offload__allocated(void *arg, request *r, const block_ids_msg *table, int32_t n_local_tokens,
                        int32_t n_external_tokens);
bool offload__build_step(void *arg, scheduler_output *out);
pgd_err offload__on_transfers(void *arg, int32_t rank, const kv_transfer_done *done,
                              int32_t n_done);
bool offload__next_load(offload_connector *c, kv_loaded *out);
bool offload__has_work(void *arg);
void offload__drop_jobs(offload_connector *c);
void offload__published(void *arg, block_id id, const block_hash *hash, int32_t group_id);
void offload__unpublished(void *arg, block_id id);
void offload__reused(void *arg, block_id id);

#endif
