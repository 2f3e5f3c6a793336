/* Field tables of the control messages. Everything here is fixed-size: control frames need no
 * limits and no scratch. */
#include "proto/control.h"

#include "common/log.h"
#include "common/model/dtype.h"

static const wire_field CHALLENGE_FIELDS[] = {
    W_FIXED(challenge_msg, nonce, WIRE_KIND_U8, 1, CONTROL_NONCE_BYTES, 0, 255),
};

static const wire_field ATTACH_FIELDS[] = {
    W_FIXED(attach_msg, nonce, WIRE_KIND_U8, 1, CONTROL_NONCE_BYTES, 0, 255),
    W_FIXED(attach_msg, proof, WIRE_KIND_U8, 1, CONTROL_PROOF_BYTES, 0, 255),
    W_U32(attach_msg, max_frame_bytes, CONTROL_MIN_FRAME_BYTES, INT32_MAX),
};

static const wire_field HELLO_FIELDS[] = {
    W_U32(hello_msg, protocol_version, 0, UINT32_MAX),
    W_U32(hello_msg, rank, 0, 1023),
    W_U64(hello_msg, pid),
    W_FIXED(hello_msg, proof, WIRE_KIND_U8, 1, CONTROL_PROOF_BYTES, 0, 255),
    W_STRING(hello_msg, version),
    W_STRING(hello_msg, device),
    W_STRING(hello_msg, device_name),
    W_U64(hello_msg, memory_total_bytes),
    W_U64(hello_msg, memory_free_bytes),
};

static const wire_field LOAD_FIELDS[] = {
    W_STRING(load_msg, model_path),
    W_I32(load_msg, kv_dtype, DTYPE_F32, DTYPE_BF16),
    W_I32(load_msg, block_size, 1, 1024),
    W_I32(load_msg, max_model_len, 1, INT32_MAX),
    W_I32(load_msg, max_num_seqs, 1, 1 << 20),
    W_I32(load_msg, max_num_batched_tokens, 1, INT32_MAX),
    W_I32(load_msg, max_encoder_tokens, 0, INT32_MAX),
    W_I32(load_msg, max_logprobs, 0, PGD_MAX_LOGPROBS),
    W_I32(load_msg, n_threads, 0, 4096),
    W_U8(load_msg, pin_threads, 0, 1),
    W_U32(load_msg, sim_step_us, 0, UINT32_MAX),
    W_U32(load_msg, sim_token_us, 0, UINT32_MAX),
    W_I32(load_msg, sim_vocab_size, 0, INT32_MAX),
    W_I32(load_msg, sim_draft_tokens, 0, PGD_MAX_DRAFT_TOKENS),
    W_I32(load_msg, sim_draft_accept, 0, 100),
    W_STRING(load_msg, sim_kv_layers),
};

static const wire_field LOAD_PROGRESS_FIELDS[] = {
    W_U64(load_progress_msg, done_bytes),
    W_U64(load_progress_msg, total_bytes),
};

static const wire_field LOAD_DONE_FIELDS[] = {
    W_U64(load_done_msg, weight_bytes),
    W_U64(load_done_msg, memory_free_bytes),
    W_INLINE_RECORDS(load_done_msg, kv_layers, n_kv_layers, &kv_layer_spec_record, 1),
    W_I32(load_done_msg, max_encoder_tokens, 0, INT32_MAX),
    W_I32(load_done_msg, vocab_size, 1, INT32_MAX),
    W_FIXED(load_done_msg, model_fingerprint, WIRE_KIND_U8, 1, 32, 0, 255),
    W_U64(load_done_msg, load_us),
    W_STRING(load_done_msg, numerics),
};

static const wire_field KV_CONFIG_FIELDS[] = {
    W_I32(kv_config_msg, n_blocks, 2, INT32_MAX),
    W_I32(kv_config_msg, max_model_len, 1, INT32_MAX),
    W_EMBED(kv_config_msg, layout, &kv_layout_record),
    W_STRING(kv_config_msg, offload_path),
    W_I32(kv_config_msg, offload_blocks, 0, INT32_MAX),
    W_I32(kv_config_msg, offload_n_ranks, 0, 1024),
};

static const wire_field KV_READY_FIELDS[] = {
    W_U64(kv_ready_msg, kv_bytes),
};

static const wire_field HEARTBEAT_FIELDS[] = {
    W_U64(heartbeat_msg, progress),
    W_U64(heartbeat_msg, last_step_id),
};

static const wire_field DONE_FIELDS[] = {
    W_U64(kv_transfer_done, job_id),
    W_I32(kv_transfer_done, n_good, 0, INT32_MAX),
    W_U32(kv_transfer_done, us, 0, UINT32_MAX),
    W_U64(kv_transfer_done, n_bytes),
};
static const wire_record DONE_RECORD = {"transfer_done", DONE_FIELDS, PGD_ARRAY_LEN(DONE_FIELDS),
                                        sizeof(kv_transfer_done)};

static const wire_field TRANSFERS_DONE_FIELDS[] = {
    W_INLINE_RECORDS(transfers_done_msg, done, n_done, &DONE_RECORD, 1),
};

static const wire_field LOG_LEVEL_FIELDS[] = {
    W_U8(log_level_msg, level, LOG_ERROR, LOG_TRACE),
};

static const wire_field ERROR_FIELDS[] = {
    W_SCALAR(error_msg, err, WIRE_KIND_I32, 4, -1000, 0, 0),
    W_U8(error_msg, is_fatal, 0, 2),
    W_STRING(error_msg, text),
};

#define RECORD(lower, table)                                                           \
    const wire_record control_##lower##_record = {#lower, table, PGD_ARRAY_LEN(table), \
                                                  sizeof(lower##_msg)}

RECORD(challenge, CHALLENGE_FIELDS);
RECORD(attach, ATTACH_FIELDS);
RECORD(hello, HELLO_FIELDS);
RECORD(load, LOAD_FIELDS);
RECORD(load_progress, LOAD_PROGRESS_FIELDS);
RECORD(load_done, LOAD_DONE_FIELDS);
RECORD(kv_config, KV_CONFIG_FIELDS);
RECORD(kv_ready, KV_READY_FIELDS);
RECORD(heartbeat, HEARTBEAT_FIELDS);
RECORD(transfers_done, TRANSFERS_DONE_FIELDS);
RECORD(log_level, LOG_LEVEL_FIELDS);
RECORD(error, ERROR_FIELDS);

#define DEFINE_DECODE(name, type)                                                                 \
    pgd_err control_decode_##name(name##_msg *out, const void *frame, size_t n_bytes,             \
                                  pgd_why *why)                                                   \
    {                                                                                             \
        return wire_decode(out, NULL, frame, n_bytes, type, &control_##name##_record, NULL, why); \
    }
CONTROL_MESSAGES(DEFINE_DECODE)

pgd_err control_decode_pong(heartbeat_msg *out, const void *frame, size_t n_bytes, pgd_why *why)
{
    return wire_decode(out, NULL, frame, n_bytes, WIRE_PONG, &control_heartbeat_record, NULL, why);
}
