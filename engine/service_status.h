/* What the service manager is told of a daemon's life: progress while loading, readiness, a status
 * line while serving.
 *
 * `systemctl start` returns when service_status_ready was called. Loading extends the start limit
 * as long as there is progress, waiting for a worker that is started apart for as long as it takes,
 * draining the stop limit by as long as it may take. Lines are sent when they change, at most every
 * few seconds while serving.
 * Thread:  io; zero-initialise
 */
#ifndef ENGINE_SERVICE_STATUS_H
#define ENGINE_SERVICE_STATUS_H

#include "engine/core/core_loop.h"

typedef struct service_status {
    bool is_ready; /* has been told once */
    uint64_t load_done_bytes;
    uint64_t told_us;
    uint64_t n_tokens; /* generated, at told_us */
    char subject[300]; /* "MODEL on URL" */
    char line[400];    /* as last told */
} service_status;

/* Called regularly while the worker loads. */
void service_status_loading(service_status *s, const core_stats *stats);
void service_status_ready(service_status *s, const char *model_name, const char *address);
/* Called regularly while the core loop is ready. */
void service_status_serving(service_status *s, const core_stats *stats, uint64_t now_us);
void service_status_recovering(service_status *s, const char *why);
/* Around reading the configuration again; before readiness neither is told, since ending a reload
 * would claim it. */
void service_status_reload_begin(const service_status *s);
void service_status_reload_end(const service_status *s);
void service_status_stopping(service_status *s, uint64_t drain_s);

#endif
