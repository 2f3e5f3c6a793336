/* Where the lives of a worker come from: a child process of ours (worker_spawn.c), or a worker that
 * an operator started and that is found at a URL (worker_attach.c).
 *
 * worker_life drives either through this table; what differs beyond it is said in plain data.
 * Owns:    a child and its pipes; never the link, which start opens and worker_life closes
 * Thread:  core
 */
#ifndef ENGINE_CORE_WORKER_HOST_H
#define ENGINE_CORE_WORKER_HOST_H

#include "config/config.h"
#include "engine/core/restart_policy.h"
#include "engine/core/worker_link.h"
#include "proto/attach.h"

#define WORKER_HOST_MAX_FDS 2

typedef struct worker_host worker_host;

typedef struct worker_host_vtbl {
    /* Begins a life: opens its link (dir or dial of *opts is filled in) and starts what is ours to
     * start. The life before must have ended. The link is the caller's in any case, NULL when none
     * was opened. Errors: PGD_ENOENT (no program that can be started), PGD_EIO, PGD_ENOMEM */
    pgd_err (*start)(worker_host *h, worker_link **link, worker_link_opts *opts, pgd_why *why);
    /* Carries what the worker says beside its messages. True when the life has ended. */
    bool (*poll)(worker_host *h);
    /* Ends the life as far as it is in our power; the end shows in poll. */
    void (*kill)(worker_host *h);
    int (*get_fds)(const worker_host *h, int fds[WORKER_HOST_MAX_FDS]);
    /* 0: no process of ours. */
    int64_t (*get_pid)(const worker_host *h);
    /* How a life ended that was not killed, "killed by signal 9 ..."; its signal, 0 = none; "; it
     * said: ..." or "". Borrows until the next start. */
    const char *(*get_epitaph)(const worker_host *h);
    int (*get_signal)(const worker_host *h);
    const char *(*get_last_words)(const worker_host *h);
    void (*destroy)(worker_host *h);
} worker_host_vtbl;

struct worker_host {
    const worker_host_vtbl *vtbl;
    attach_key key; /* of the present life */
    /* A worker that is not there is waited for, without limit, and not counted as a death: an
     * operator starts it when he likes, and something else restarts it. */
    bool may_be_absent;
    const char *url; /* "" for a child */
    /* What an end means that shows in poll, before hello and later. */
    restart_reason gone_reason;
    const char *gone_early;
    const char *gone;
};

/* The device is sizes->device. Both prepare everything that can be wrong from the start. Errors:
 * PGD_EINVAL, PGD_ENOENT, PGD_EIO, PGD_ENOMEM */
PGD_MUST_USE pgd_err worker_spawn_create(worker_host **out, const config *cfg, const char *device,
                                         pgd_why *why);
PGD_MUST_USE pgd_err worker_attach_create(worker_host **out, const config *cfg, pgd_why *why);

#endif
