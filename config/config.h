/* Every option of paged in one table: file, environment, flags, --help and the annotated paged.conf
 * come from it.
 *
 * Precedence: defaults < file < environment (PAGED_NAME) < command line (--name). An unknown key, a
 * bad value or one out of range is a start-up error with file and line. After config_load the
 * struct is const and passed explicitly.
 * Thread:  load from one thread; reading from any
 */
#ifndef CONFIG_CONFIG_H
#define CONFIG_CONFIG_H

#include <stdio.h>

#include "common/err.h"

#define CONFIG_PATH_BYTES  1024
#define CONFIG_MAX_OPTIONS 128

typedef enum config_policy { CONFIG_POLICY_FCFS, CONFIG_POLICY_PRIORITY } config_policy;

typedef struct config {
    /* [model] */
    char model[CONFIG_PATH_BYTES];
    char served_model_name[256]; /* "" = from the file's name */
    char dtype_kv[16];           /* kv_cache_dtype: auto, f32, f16, bf16 */
    char generation_config[16];  /* auto, none */
    int64_t max_model_len;       /* 0 = the model's, lowered to what the pool can hold */

    /* [server] */
    char host[256];
    int64_t port;
    char uds[108];
    char api_key_file[CONFIG_PATH_BYTES]; /* "" = $CREDENTIALS_DIRECTORY/api-keys, if there */
    char allowed_origins[1024];           /* CORS: comma list, "" = none, "*" = all */
    int64_t max_connections;
    int64_t max_body_bytes;
    int64_t max_header_bytes;
    int64_t max_queued_requests;
    int64_t max_output_buffer_bytes; /* per slow client */
    int64_t idle_timeout_s;          /* keep-alive */
    int64_t header_timeout_s;
    int64_t request_timeout_s;  /* 0 = none */
    int64_t shutdown_timeout_s; /* drain limit */
    int64_t max_logprobs;
    int64_t max_stop_strings;

    /* [scheduler] */
    int64_t max_num_seqs;                 /* 0 = by device: 256, CPU 64 */
    int64_t max_num_batched_tokens;       /* 0 = by device: 2048, CPU 256 */
    int64_t long_prefill_token_threshold; /* 0 = off */
    int64_t scheduling_policy;            /* config_policy */
    double kv_watermark;                  /* fraction of blocks kept free at admission */
    bool scheduler_reserve_full_isl;      /* admit only what fits whole */

    /* [cache] */
    int64_t block_size;
    int64_t kv_cache_memory; /* bytes; 0 = computed from free memory */
    int64_t num_kv_blocks;   /* 0 = computed; else this many, null block included */
    bool enable_prefix_caching;
    bool disable_hybrid_kv_cache_manager;
    bool kv_cache_metrics;
    double kv_cache_metrics_sample; /* share of the blocks, (0, 1] */
    char kv_hash_seed_file[CONFIG_PATH_BYTES];
    char kv_events_url[256];        /* of the PUB socket; "" = no events */
    char kv_events_replay_url[256]; /* of the REP socket; "" = none */
    char kv_events_topic[129];
    int64_t kv_events_buffer_batches;
    int64_t kv_offload_memory;  /* bytes of the host tier; 0 = none */
    char kv_offload_policy[16]; /* name of an offload_policy */
    bool kv_offload_persist;
    int64_t kv_offload_store_threshold; /* lookups of a block before it is stored; 0, 1 = all are */
    char kv_offload_dir[CONFIG_PATH_BYTES]; /* of the disk tier; "" = none */
    int64_t kv_offload_disk;                /* bytes of it */

    /* [worker] */
    char device[64];  /* auto, cpu, sim */
    int64_t threads;  /* 0 = CPUs of the affinity mask */
    char worker[256]; /* URL; "" = start one */
    char worker_token_file[CONFIG_PATH_BYTES];
    char worker_path[CONFIG_PATH_BYTES]; /* "" = paged-worker beside this binary */
    char runtime_dir[CONFIG_PATH_BYTES]; /* "" = $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/paged or
                                            /tmp/paged-UID */
    int64_t worker_stall_timeout_s;
    int64_t step_timeout_s;
    int64_t sim_step_us;
    int64_t sim_token_us;
    int64_t sim_vocab_size;
    int64_t sim_draft_tokens;
    int64_t sim_draft_accept;
    char sim_kv_layers[256];

    /* [log] */
    char log_level[16];
    bool access_log;

    uint8_t sources[CONFIG_MAX_OPTIONS]; /* config_source of each option, as in the table */
} config;

/* Where a value came from, for config_dump. */
typedef enum config_source { CONFIG_DEFAULT, CONFIG_FILE, CONFIG_ENV, CONFIG_FLAG } config_source;

/* Fills the defaults. */
void config_init(config *cfg);

/* Reads defaults, then --config FILE if among the arguments, then PAGED_*, then the flags `--name
 * value`, `--name=value`, `--[no-]flag`. argv[0..argc) are only the options (program and
 * sub-command removed). Words that are not options, and the options listed in `extra`
 * (NULL-terminated list of names without dashes that the sub-command handles itself; a trailing '='
 * marks one that takes a value), are left in argv order in rest[*n_rest] (borrows). */
PGD_MUST_USE pgd_err config_load(config *cfg, int argc, char **argv, const char *const *extra,
                                 char **rest, int *n_rest, pgd_why *why);

/* The effective configuration as an annotated file; config_load of the output gives the same
 * values. with_sources: notes where each value that is not the default came from. */
void config_dump(const config *cfg, FILE *out, bool with_sources);
/* The options part of --help. */
void config_help(FILE *out);

#endif
