/* What a running server tells about itself, read from /health, /version, /v1/models and /metrics.
 *
 * A server of another make may lack any of it: numbers that nobody told are NAN, texts "".
 * Thread:  the loop's
 */
#ifndef ENGINE_STATUS_SERVER_STATUS_H
#define ENGINE_STATUS_SERVER_STATUS_H

#include "engine/http/http_client.h"

#define SERVER_STATUS_MAX_WORKERS 64

typedef struct worker_status {
    int64_t rank;
    int64_t pid; /* 0 = not told */
    char device[64];
    char device_name[128];
} worker_status;

#define SERVER_STATUS_MAX_TIERS 2

/* A tier behind the KV cache. */
typedef struct tier_status {
    const char *name; /* static */
    double size_bytes, used_bytes;
    double n_hit_tokens;
    double n_stored_bytes, n_loaded_bytes; /* since the server's start */
    double n_failed;                       /* blocks, both ways */
} tier_status;

/* A counter pair of a histogram. */
typedef struct status_mean {
    double sum;
    double count;
} status_mean;

typedef struct server_status {
    uint64_t time_us;
    bool is_reached; /* something answered /health */
    bool is_healthy; /* with 200 */
    char state[64];  /* "ok", "loading", "recovering", ...; "unreachable" */
    char reason[400];
    char metrics_note[300]; /* why there are no figures, "" = there are */
    double progress;        /* of loading, 0 to 1 */
    char version[64];
    char kv_events_url[256]; /* "" = it publishes none */
    char kv_events_topic[256];
    char model[300];
    double max_model_len;
    double uptime_s;
    double n_running, n_waiting, n_finished, n_rejected, n_preemptions, n_connections;
    double n_prompt_tokens, n_output_tokens;
    double kv_usage; /* 0 to 1 */
    double n_blocks, n_blocks_cached;
    double kv_bytes;
    double n_prefix_queries, n_prefix_hits;
    status_mean ttft, itl; /* seconds */
    double n_restarts;
    worker_status workers[SERVER_STATUS_MAX_WORKERS]; /* [n_workers] */
    int n_workers;
    tier_status tiers[SERVER_STATUS_MAX_TIERS]; /* [n_tiers] */
    int n_tiers;
} server_status;

/* Of all that, the version and where KV events are published. */
void server_status_read_version(server_status *out, http_client *client, const char *headers);
/* Asks; waits for the answers by running the loop. headers: request lines, or "". */
void server_status_read(server_status *out, http_client *client, const char *headers);

#endif
