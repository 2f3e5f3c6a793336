/* Control messages between engine and worker, everything but the step itself.
 *
 * Sequence: the worker sends challenge, the engine attach, the worker hello (proto/attach.h tells
 * what these three prove); engine answers load; worker sends load_progress any
 * number of times, then load_done; engine sends kv_config; worker sends kv_ready; then steps.
 * heartbeat comes unasked from the worker's second thread. A ping (no body) is answered by its main
 * thread between steps with a pong (a heartbeat_msg), so that a stuck idle worker is seen too.
 * transfers_done comes at any time between steps and in the middle of one, from a thread of its own.
 * log_level comes at any time from the engine once it has seen a good hello.
 * error ends the incarnation; shutdown (no body) asks the worker to exit 0.
 * Strings are NUL-terminated fixed arrays, checked when decoded.
 */
#ifndef PROTO_CONTROL_H
#define PROTO_CONTROL_H

#include "proto/kv_layout.h"

#define CONTROL_NONCE_BYTES 32
#define CONTROL_PROOF_BYTES 32
#define CONTROL_PATH_BYTES  1024
#define CONTROL_TEXT_BYTES  256
/* Least frame limit that an engine may lay down; frames before attach are shorter. */
#define CONTROL_MIN_FRAME_BYTES 4096

/* The first frame, under epoch 0: the worker does not know its own yet (nor when it refuses). */
typedef struct challenge_msg {
    uint8_t nonce[CONTROL_NONCE_BYTES];
} challenge_msg;

/* Its header tells the worker its epoch. */
typedef struct attach_msg {
    uint8_t nonce[CONTROL_NONCE_BYTES];
    uint8_t proof[CONTROL_PROOF_BYTES];
    uint32_t max_frame_bytes; /* of what the engine will send; NNG takes no more than 2 GB */
} attach_msg;

typedef struct hello_msg {
    uint32_t protocol_version;
    uint32_t rank;
    uint64_t pid;
    uint8_t proof[CONTROL_PROOF_BYTES];
    char version[32];
    char device[64];                      /* "cpu", "sim", "cuda:0" */
    char device_name[CONTROL_TEXT_BYTES]; /* "AMD EPYC, avx512vnni, 2 threads" */
    uint64_t memory_total_bytes;
    uint64_t memory_free_bytes;
} hello_msg;

typedef struct load_msg {
    char model_path[CONTROL_PATH_BYTES];
    int32_t kv_dtype;   /* dtype of the KV cache: DTYPE_F32, F16, BF16 */
    int32_t block_size; /* tokens; groups may get a multiple of it in kv_config */
    int32_t max_model_len;
    int32_t max_num_seqs;
    int32_t max_num_batched_tokens;
    int32_t max_encoder_tokens; /* of a step; 0 for a model without an encoder */
    int32_t max_logprobs;
    int32_t n_threads; /* 0 = all CPUs of the affinity mask */
    uint8_t pin_threads;
    uint32_t sim_step_us;  /* --device sim: delay per step */
    uint32_t sim_token_us; /* ... and per scheduled token */
    int32_t sim_vocab_size;
    int32_t sim_draft_tokens;               /* speculation: drafts per step, 0 = none */
    int32_t sim_draft_accept;               /* ... percent of them that are right */
    char sim_kv_layers[CONTROL_TEXT_BYTES]; /* its KV layers: worker/sim_layers.h */
} load_msg;

typedef struct load_progress_msg {
    uint64_t done_bytes;
    uint64_t total_bytes;
} load_progress_msg;

/* KV needs, for the engine to group the layers and to compute the number of blocks. */
typedef struct load_done_msg {
    uint64_t weight_bytes;
    uint64_t memory_free_bytes; /* after loading */
    int32_t n_kv_layers;
    kv_layer_spec kv_layers[PGD_MAX_KV_LAYERS];
    int32_t max_encoder_tokens; /* of a request; 0 = the model has no encoder */
    int32_t vocab_size;
    uint8_t model_fingerprint[32];
    uint64_t load_us;
    /* What the bits of its results depend on besides the model: device kind, instruction-set level,
     * version of the order of sums, compiler ("cpu avx512vnni numerics=1 gcc 12.2.0
     * glibc 2.36"). */
    char numerics[128];
} load_done_msg;

typedef struct kv_config_msg {
    int32_t n_blocks;      /* null block included */
    int32_t max_model_len; /* effective; at most that of load_msg */
    kv_layout layout;
    /* The offload tier, a region (proto/kv_region.h) that the worker maps: blocks, and shards of
     * each, one for each rank, of kv_layout_block_bytes. "" = none, and both are 0. */
    char offload_path[CONTROL_PATH_BYTES];
    int32_t offload_blocks;
    int32_t offload_n_ranks;
} kv_config_msg;

typedef struct kv_ready_msg {
    uint64_t kv_bytes;
} kv_ready_msg;

/* From the worker's second thread, twice a second, and as pong in answer to a ping. */
typedef struct heartbeat_msg {
    uint64_t progress; /* layers done since start; stands still when the device hangs */
    uint64_t last_step_id;
} heartbeat_msg;

/* A load or store that has ended on this rank. */
typedef struct kv_transfer_done {
    uint64_t job_id;
    int32_t n_good;   /* leading blocks that are right; of a store all or 0 */
    uint32_t us;      /* from the first byte to the last, other transfers not waited for */
    uint64_t n_bytes; /* moved */
} kv_transfer_done;

#define CONTROL_MAX_DONE 64

typedef struct transfers_done_msg {
    int32_t n_done; /* at least 1, in the order in which those of one direction ended */
    kv_transfer_done done[CONTROL_MAX_DONE];
} transfers_done_msg;

/* A log_level of common/log.h that the engine has changed to while running. */
typedef struct log_level_msg {
    uint8_t level;
} log_level_msg;

typedef struct error_msg {
    int32_t err;      /* pgd_err */
    uint8_t is_fatal; /* 1: the worker exits after sending; restarting may help. 2: restarting
                         cannot help (bad model) */
    char text[512];
} error_msg;

/* One decoder and one table per message. Decoding checks every range and text, and that the whole
 * frame is used up; errors as wire_decode.
 * Thread:  any */
#define CONTROL_MESSAGES(X)                \
    X(challenge, WIRE_CHALLENGE)           \
    X(attach, WIRE_ATTACH)                 \
    X(hello, WIRE_HELLO)                   \
    X(load, WIRE_LOAD)                     \
    X(load_progress, WIRE_LOAD_PROGRESS)   \
    X(load_done, WIRE_LOAD_DONE)           \
    X(kv_config, WIRE_KV_CONFIG)           \
    X(kv_ready, WIRE_KV_READY)             \
    X(heartbeat, WIRE_HEARTBEAT)           \
    X(transfers_done, WIRE_TRANSFERS_DONE) \
    X(log_level, WIRE_LOG_LEVEL)           \
    X(error, WIRE_ERROR)

#define CONTROL_DECLARE(name, type)                                                                \
    extern const wire_record control_##name##_record;                                              \
    PGD_MUST_USE pgd_err control_decode_##name(name##_msg *out, const void *frame, size_t n_bytes, \
                                               pgd_why *why);
CONTROL_MESSAGES(CONTROL_DECLARE)
#undef CONTROL_DECLARE

/* A pong is a heartbeat under another type. */
PGD_MUST_USE pgd_err control_decode_pong(heartbeat_msg *out, const void *frame, size_t n_bytes,
                                         pgd_why *why);

#endif
