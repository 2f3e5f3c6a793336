/* The copies of a simulated worker: a stream per direction beside the one that computes.
 *
 * A transfer is submitted when its message comes, perhaps while earlier steps are still to be
 * computed, waits for the event that these are done and for the transfers before it in its
 * direction, takes its time, and copies each block at some moment of that. Its end is told later
 * still. Moments are drawn from the configuration's seed and the job, so that a trace always runs the
 * same way.
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_STREAMS_H
#define TESTS_SIM_SIM_STREAMS_H

#include "tests/sim/sim_medium.h"

#define SIM_MAX_JOBS KV_TRANSFER_MAX_PENDING /* of one direction */

/* Device memory, which the worker owns. */
typedef struct sim_device {
    uint64_t *shadow;  /* [n_blocks, max_block_size] */
    int8_t *owner;     /* [n_blocks], group that wrote last; -1 = zeroed or never */
    int8_t *n_loading; /* [n_blocks], transfers of messages that have been applied */
    int8_t *n_storing; /* [n_blocks] */
} sim_device;

typedef struct sim_copy {
    block_id device;
    int32_t medium;
    uint64_t tag;
    uint64_t at; /* moment of its copy, once the job has begun */
    bool is_done;
} sim_copy;

typedef struct sim_job {
    uint64_t id;
    uint64_t step_id;    /* whose message brings it */
    uint64_t after_step; /* it begins when this one is computed */
    uint64_t flushed_in; /* store: step that waits for its end, loads included; 0 = none */
    bool is_applied;
    bool has_begun;
    uint64_t ends_at;
    int32_t n_right; /* the copies from here on fail */
    int32_t n_copies;
    sim_copy *copies;
} sim_job;

typedef struct sim_stream {
    int32_t first; /* a ring */
    int32_t n_jobs;
    sim_job jobs[SIM_MAX_JOBS];
} sim_stream;

typedef struct sim_done {
    uint64_t job_id;
    int32_t n_good;
    uint64_t told_at;
} sim_done;

typedef struct sim_streams {
    const sim_config *config;
    sim_medium *medium;
    sim_device device;
    int32_t rank;
    uint64_t now;
    uint64_t n_steps_done; /* id of the last step that is computed */
    uint64_t submitted_id; /* last step whose transfers are submitted */
    sim_stream loads;
    sim_stream stores;
    int32_t first_done; /* a ring */
    int32_t n_done;
    sim_done done[2 * SIM_MAX_JOBS];
    uint64_t n_stored;  /* jobs */
    uint64_t n_failed;  /* transfers that were made to fail */
    uint64_t n_flushed; /* stores that were waited for */
    char fault[256];
} sim_streams;

/* Borrows what is given until reset for the last time. */
void sim_streams_init(sim_streams *s, const sim_config *config, sim_medium *medium,
                      const sim_device *device, int32_t rank);
/* The worker is gone: what was being written is torn. */
void sim_streams_reset(sim_streams *s, uint64_t next_step_id);
/* The transfers of a message, once, and not before those of the message before. */
void sim_streams_submit(sim_streams *s, const scheduler_output *out);
/* The step of the message begins: its flushes wait, then its transfers count as users of their
 * blocks. */
void sim_streams_flush(sim_streams *s, const scheduler_output *out);
void sim_streams_apply(sim_streams *s, const scheduler_output *out);
/* A moment passes. */
void sim_streams_tick(sim_streams *s);
bool sim_streams_next_told(sim_streams *s, sim_done *out);
/* Something goes on that will be told. */
bool sim_streams_is_busy(const sim_streams *s);

#endif
