/* The memory of an offload tier in a simulation, with a shadow of what belongs there.
 *
 * A block has a shard per rank. The medium knows for every tag that names contents what these must
 * be, and who is at work on a block from the making of the message on that asks for it to the end
 * of the copy:
 *
 *   load     reads what is whole and has the message's tag; nobody writes the block meanwhile
 *   store    writes the right contents; nobody reads or writes the block meanwhile
 *   disk     the same, for a tier behind this one
 *
 * It outlives workers. A store that dies with its worker leaves a shard that is not whole.
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_MEDIUM_H
#define TESTS_SIM_SIM_MEDIUM_H

#include "engine/offload/offload_policy.h"
#include "proto/scheduler_output.h"
#include "tests/sim/sim_chain.h"

#define SIM_MAX_RANKS 2

typedef enum sim_user {
    SIM_USER_LOAD,
    SIM_USER_STORE,
    SIM_USER_DISK_WRITE, /* reads the medium */
    SIM_USER_DISK_READ,  /* writes it */
    SIM_N_USERS
} sim_user;

typedef struct sim_shard {
    uint64_t tag; /* of what was written last */
    bool is_whole;
    int16_t n_users[SIM_N_USERS];
} sim_shard;

typedef struct sim_medium {
    const sim_config *config;
    int32_t max_block_size;
    bool has_errors;   /* some requests compute what is not finite, and that is stored too */
    sim_shard *shards; /* [n_blocks, n_ranks] */
    uint64_t *slots;   /* [n_blocks, n_ranks, max_block_size] */
    void *known; /* tsearch's: tag -> place in contents and group. What is learnt is learnt where
                           the engine must not allocate, so no container of its own */
    uint64_t *contents; /* [cap_contents] */
    size_t n_contents;
    size_t cap_contents;
    uint64_t n_double_loads; /* of a block that a load was reading already */
    char fault[256];         /* first fault, empty = none */
} sim_medium;

/* config: borrow until deinit. */
void sim_medium_init(sim_medium *m, const sim_config *config, bool has_errors);
void sim_medium_deinit(sim_medium *m);
/* The tag names the block of group g whose last position is end - 1; chain[i]: history of i tokens. */
void sim_medium_know(sim_medium *m, uint64_t tag, int32_t g, const uint64_t *chain, int32_t end);
/* Group of what the tag names; -1 when it names nothing. */
int32_t sim_medium_group_of(const sim_medium *m, uint64_t tag);
/* Slots of a block of that group, the first ones of max_block_size. */
bool sim_medium_is_right(const sim_medium *m, uint64_t tag, const uint64_t *slots);

/* Somebody is going to read or write the block, all its shards. */
void sim_medium_claim(sim_medium *m, sim_user user, int32_t block, uint64_t tag);
/* He is done with that rank's. */
void sim_medium_release(sim_medium *m, sim_user user, int32_t block, int32_t rank);
/* False (slots undefined) when it is not whole or has another tag. */
bool sim_medium_read(uint64_t *slots, sim_medium *m, int32_t block, int32_t rank, uint64_t tag);
/* Checks the contents. */
void sim_medium_write(sim_medium *m, int32_t block, int32_t rank, uint64_t tag,
                      const uint64_t *slots);
/* The writer died or failed: whatever is there now, its checksum is wrong. */
void sim_medium_tear(sim_medium *m, int32_t block, int32_t rank, uint64_t draw);
/* Nothing in it is whole, nobody uses it. */
void sim_medium_clear(sim_medium *m);
/* The worker is gone, with all its loads and stores. */
void sim_medium_lose_worker(sim_medium *m);

#endif
