/* What a worker process drives: the model runner and the simulated runner stand behind this one
 * interface.
 *
 * Sequence: create, load, init_kv, step... , stop, destroy. All memory is sized in load and init_kv; step
 * never allocates. The runner keeps rows and block tables as a cache of what the engine said;
 * nothing else.
 * Thread:  the worker's main thread, except progress (any)
 */
#ifndef WORKER_STEP_RUNNER_H
#define WORKER_STEP_RUNNER_H

#include "proto/control.h"
#include "proto/scheduler_output.h"
#include "proto/step_result.h"
#include "worker/kv_transfer.h"

typedef struct step_runner step_runner;

typedef void (*step_runner_progress_fn)(void *arg, uint64_t done_bytes, uint64_t total_bytes);

typedef struct step_runner_vtbl {
    /* Device facts for hello: device_name, memory_total_bytes, memory_free_bytes. */
    void (*describe)(step_runner *r, hello_msg *hello);
    pgd_err (*load)(step_runner *r, const load_msg *msg, load_done_msg *done,
                    step_runner_progress_fn progress, void *arg, pgd_why *why);
    pgd_err (*init_kv)(step_runner *r, const kv_config_msg *msg, kv_ready_msg *ready, pgd_why *why);
    /* The result's arrays belong to the runner, until the next step. An error of one request is in
     * its entry; a pgd_err means that this worker cannot go on (the message broke the protocol, the
     * device failed). */
    pgd_err (*step)(step_runner *r, const scheduler_output *in, step_result *out, pgd_why *why);
    /* Ends what goes on beside the steps: on_transfer is not called from then on. */
    void (*stop)(step_runner *r);
    void (*destroy)(step_runner *r);
} step_runner_vtbl;

struct step_runner {
    const step_runner_vtbl *vtbl;
    /* Counts layers (or any finer unit) done since start, atomically incremented while a step runs:
     * the heartbeat thread reads it with __atomic_load_n. */
    uint64_t progress;
    /* Set before init_kv when the message may have an offload tier; called by threads of the runner. */
    kv_transfer_done_fn on_transfer;
    void *on_transfer_arg;
    int32_t rank; /* whose shards are this worker's */
};

/* worker/sim_runner.c and worker/model_runner.c */
PGD_MUST_USE pgd_err sim_runner_create(step_runner **out, pgd_why *why);
/* device: "cpu". */
PGD_MUST_USE pgd_err model_runner_create(step_runner **out, const char *device, pgd_why *why);

#endif
