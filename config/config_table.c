/* One row per option. The file, the environment, the flags, --help, `paged config --dump` and
 * config/paged.conf are all made from this table; a test holds the shipped paged.conf equal to the
 * dump. An option whose feature is not built has no row. */
#include "config/config_table.h"

#define FIELD(f)          offsetof(config, f)
#define CAP(f)            sizeof(((config *)0)->f)
#define STR(f)            CONFIG_STRING, FIELD(f), CAP(f), "", 0, 0
#define INT(f, u, lo, hi) CONFIG_INT, FIELD(f), 0, u, lo, hi
#define BYTES(f, lo, hi)  CONFIG_BYTES, FIELD(f), 0, "bytes", lo, hi
#define TIB               1099511627776.0

const config_option config_options[] = {
    {"model", "model", STR(model), "", NULL,
     "Model to serve: a GGUF file or a Hugging Face directory."},
    {"model", "served_model_name", STR(served_model_name), "", NULL,
     "Name under which clients see the model. Empty: the file's or directory's name."},
    {"model", "max_model_len", INT(max_model_len, "tokens", 0, 1e7), "0", "auto|-1",
     "Longest prompt plus output. 0, auto or -1: the model's own, lowered to what the KV cache can "
     "hold."},
    {"model", "kv_cache_dtype", CONFIG_CHOICE, FIELD(dtype_kv), CAP(dtype_kv), "", 0, 0, "auto",
     "auto|f32|f16|bf16", "Element type of the KV cache. auto: f16."},
    {"model", "generation_config", CONFIG_CHOICE, FIELD(generation_config), CAP(generation_config),
     "", 0, 0, "auto", "auto|none",
     "auto: sampling defaults come from the model's generation_config. none: neutral defaults."},

    {"server", "host", STR(host), "127.0.0.1", NULL, "Address to listen on."},
    {"server", "port", INT(port, "", 0, 65535), "8000", NULL,
     "TCP port. 0: any free one, told in the log."},
    {"server", "uds", STR(uds), "", NULL, "Unix socket to listen on instead of host and port."},
    {"server", "api_key_file", STR(api_key_file), "", NULL,
     "File with the API keys that clients must send, one per line (# begins a comment line). Read "
     "again on SIGHUP. Empty: systemd's credential \"api-keys\" if there is one, else no keys."},
    {"server", "allowed_origins", STR(allowed_origins), "", NULL,
     "Web pages whose scripts may use this server (CORS): origins such as https://app.example, "
     "separated by commas, or *. Empty: none."},
    {"server", "max_connections", INT(max_connections, "", 1, 100000), "1024", NULL,
     "Client connections at once; further ones are answered 503 and closed."},
    {"server", "max_body_bytes", BYTES(max_body_bytes, 1024, 1073741824.0), "8M", NULL,
     "Largest request body."},
    {"server", "max_header_bytes", BYTES(max_header_bytes, 1024, 1048576), "32K", NULL,
     "Largest request header, all lines together."},
    {"server", "max_queued_requests", INT(max_queued_requests, "requests", 1, 1e6), "512", NULL,
     "Requests waiting or running at once; further ones are answered 429."},
    {"server", "max_output_buffer_bytes", BYTES(max_output_buffer_bytes, 4096, 1073741824.0), "1M",
     NULL, "Unsent output of one client; one that reads more slowly is dropped at this limit."},
    {"server", "idle_timeout_s", INT(idle_timeout_s, "seconds", 1, 86400), "75", NULL,
     "A kept-alive connection without a request is closed after this time."},
    {"server", "header_timeout_s", INT(header_timeout_s, "seconds", 1, 3600), "30", NULL,
     "A request must arrive whole within this time."},
    {"server", "request_timeout", INT(request_timeout_s, "seconds", 0, 86400), "0", NULL,
     "A completion, or a text to be tokenized, that is not done this long after its arrival, "
     "waiting "
     "included, is ended with an error (504). 0: no limit."},
    {"server", "shutdown_timeout_s", INT(shutdown_timeout_s, "seconds", 0, 86400), "30", NULL,
     "On SIGTERM running requests may finish within this time, then they are aborted."},
    {"server", "max_logprobs", INT(max_logprobs, "", 0, PGD_MAX_LOGPROBS), "20", NULL,
     "Most alternatives per token that a request may ask for."},
    {"server", "max_stop_strings", INT(max_stop_strings, "", 0, 1024), "16", NULL,
     "Most stop strings in one request."},

    {"scheduler", "max_num_seqs", INT(max_num_seqs, "requests", 0, 65536), "0", NULL,
     "Requests in one batch. 0: by device (CPU 64, else 256)."},
    {"scheduler", "max_num_batched_tokens", INT(max_num_batched_tokens, "tokens", 0, 1048576), "0",
     NULL, "Tokens in one step, prompts and decodes together. 0: by device (CPU 256, else 2048)."},
    {"scheduler", "long_prefill_token_threshold",
     INT(long_prefill_token_threshold, "tokens", 0, 1048576), "0", NULL,
     "A prompt gets at most this many tokens of one step. 0: no such limit."},
    {"scheduler", "scheduling_policy", CONFIG_CHOICE, FIELD(scheduling_policy), 0, "", 0, 0, "fcfs",
     "fcfs|priority",
     "fcfs: in order of arrival. priority: smaller `priority` of a request first."},
    {"scheduler", "kv_watermark", CONFIG_FLOAT, FIELD(kv_watermark), 0, "fraction", 0, 0.5, "0",
     NULL, "Share of the KV blocks that admitting a request must leave free while others run."},
    {"scheduler", "scheduler_reserve_full_isl", CONFIG_BOOL, FIELD(scheduler_reserve_full_isl), 0,
     "", 0, 0, "true", NULL,
     "Admit a request only when its whole prompt has room in the KV cache. false: when its first "
     "chunk has; more is preempted then."},

    {"cache", "block_size", INT(block_size, "tokens", 16, 256), "16", NULL,
     "Tokens per KV block; a multiple of 16."},
    {"cache", "kv_cache_memory", BYTES(kv_cache_memory, 0, 64 * TIB), "0", NULL,
     "Memory for the KV cache. 0: on a CPU a quarter of the free memory, at most what max_num_seqs "
     "requests of max_model_len need."},
    {"cache", "num_kv_blocks", INT(num_kv_blocks, "blocks", 0, 2147483647.0), "0", NULL,
     "Exact number of KV blocks instead of kv_cache_memory. 0: computed."},
    {"cache", "enable_prefix_caching", CONFIG_BOOL, FIELD(enable_prefix_caching), 0, "", 0, 0,
     "true", NULL, "Reuse the KV blocks of equal prompt beginnings."},
    {"cache", "disable_hybrid_kv_cache_manager", CONFIG_BOOL,
     FIELD(disable_hybrid_kv_cache_manager), 0, "", 0, 0, "false", NULL,
     "Keep the KV of every token also for layers that attend to a sliding window or a chunk alone: "
     "takes more memory, has one group of blocks."},
    {"cache", "kv_cache_metrics", CONFIG_BOOL, FIELD(kv_cache_metrics), 0, "", 0, 0, "false", NULL,
     "Measure how long KV blocks stay cached and how they are reused (kv_block_* in /metrics)."},
    {"cache", "kv_cache_metrics_sample", CONFIG_FLOAT, FIELD(kv_cache_metrics_sample), 0,
     "fraction", 0.0001, 1, "0.01", NULL, "Share of the blocks that kv_cache_metrics measures."},
    {"cache", "kv_hash_seed_file", STR(kv_hash_seed_file), "", NULL,
     "File with the 32-byte secret of the prefix hashes, made (mode 0600) when missing. Empty: a "
     "fresh secret at every start."},
    {"cache", "kv_offload_memory", BYTES(kv_offload_memory, 0, 64 * TIB), "0", NULL,
     "Host memory (shared with the worker) that keeps KV blocks when the KV cache has no more room "
     "for them. 0: none."},
    {"cache", "kv_offload_policy", CONFIG_CHOICE, FIELD(kv_offload_policy), CAP(kv_offload_policy),
     "", 0, 0, "lru", "lru|arc",
     "What kv_offload_memory gives up when it is full. lru: what was not wanted for the longest "
     "time. arc: weighs that against how often it was wanted, so that one long scan does not empty "
     "it."},
    {"cache", "kv_offload_persist", CONFIG_BOOL, FIELD(kv_offload_persist), 0, "", 0, 0, "false",
     NULL,
     "Keep kv_offload_memory over a restart of paged, in /dev/shm, as long as model, options and "
     "version stay the same. Needs kv_hash_seed_file."},
    {"cache", "kv_offload_store_threshold", INT(kv_offload_store_threshold, "", 0, 1000), "0", NULL,
     "Keep a block only when it was asked for this many times. 0: every block."},
    {"cache", "kv_offload_dir", STR(kv_offload_dir), "", NULL,
     "Directory on a fast disk for a second tier behind kv_offload_memory, up to kv_offload_disk "
     "bytes. Engines with one kv_hash_seed_file may share it. Empty: none."},
    {"cache", "kv_offload_disk", BYTES(kv_offload_disk, 0, 1024 * TIB), "0", NULL,
     "Most bytes in kv_offload_dir, of all engines that use it."},
    {"cache", "kv_events_url", STR(kv_events_url), "", NULL,
     "Where to publish which KV blocks are cached, for routers (proto/README.md): "
     "tcp://HOST:PORT or ipc:///PATH. The events tell the tokens of prompts. Empty: nowhere."},
    {"cache", "kv_events_replay_url", STR(kv_events_replay_url), "", NULL,
     "Where subscribers ask for events that they missed and for all that is cached. Empty: "
     "nowhere."},
    {"cache", "kv_events_topic", STR(kv_events_topic), "", NULL, "Topic of the published events."},
    {"cache", "kv_events_buffer_batches", INT(kv_events_buffer_batches, "batches", 1, 1e6), "10000",
     NULL, "Newest batches of events that are kept for kv_events_replay_url, 64 MiB at most."},

    {"worker", "device", CONFIG_CHOICE, FIELD(device), CAP(device), "", 0, 0, "auto",
     "auto|cpu|sim", "Where the model runs. sim: no model, deterministic tokens, for tests."},
    {"worker", "threads", INT(threads, "", 0, 1024), "0", NULL,
     "Compute threads of a CPU worker. 0: all CPUs this process may use."},
    {"worker", "worker", STR(worker), "", NULL,
     "URL of a worker that is started apart (paged-worker --listen): ipc:///PATH or "
     "tcp://HOST:PORT. Empty: start one."},
    {"worker", "worker_token_file", STR(worker_token_file), "", NULL,
     "File (mode 0600) with the secret that worker must know, 32 bytes or more. Needed for tcp "
     "beyond loopback."},
    {"worker", "worker_path", STR(worker_path), "", NULL,
     "The paged-worker binary. Empty: the one beside paged."},
    {"worker", "runtime_dir", STR(runtime_dir), "", NULL,
     "Directory (0700) of the worker sockets. Empty: $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/paged or "
     "/tmp/paged-UID."},
    {"worker", "worker_stall_timeout_s", INT(worker_stall_timeout_s, "seconds", 1, 3600), "10",
     NULL, "A worker whose progress stands still this long while a step is out is restarted."},
    {"worker", "step_timeout_s", INT(step_timeout_s, "seconds", 1, 86400), "300", NULL,
     "A step that takes longer than this restarts the worker."},
    {"worker", "sim_step_us", INT(sim_step_us, "microseconds", 0, 1e8), "1000", NULL,
     "Device sim: time of one step."},
    {"worker", "sim_token_us", INT(sim_token_us, "microseconds", 0, 1e8), "0", NULL,
     "Device sim: further time per scheduled token."},
    {"worker", "sim_vocab_size", INT(sim_vocab_size, "", 256, 1048576), "32000", NULL,
     "Device sim: size of the vocabulary."},
    {"worker", "sim_draft_tokens", INT(sim_draft_tokens, "tokens", 0, PGD_MAX_DRAFT_TOKENS), "0",
     NULL, "Device sim: tokens that it drafts and verifies per request and step. 0: none."},
    {"worker", "sim_draft_accept", INT(sim_draft_accept, "percent", 0, 100), "70", NULL,
     "Device sim: share of the drafted tokens that are right."},
    {"worker", "sim_kv_layers", STR(sim_kv_layers), "full", NULL,
     "Device sim: its attention layers, separated by commas: full, sliding:WINDOW or "
     "chunked:WINDOW, each with *N perhaps for N times the KV memory per token."},

    {"log", "log_level", CONFIG_CHOICE, FIELD(log_level), CAP(log_level), "", 0, 0, "info",
     "error|warn|info|debug|trace", "Least severe lines to log. Read again on SIGHUP."},
    {"log", "access_log", CONFIG_BOOL, FIELD(access_log), 0, "", 0, 0, "true", NULL,
     "One line per request when its answer ends (/health and /metrics at level debug)."},
};

const size_t config_n_options = PGD_ARRAY_LEN(config_options);
