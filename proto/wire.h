/* Frames between engine and worker: header, and a codec driven by one field table per message.
 *
 * A frame is a 24-byte header and one record. A record is its fields in table order, each at its
 * natural alignment from the frame's start; padding is zero. A variable array is a section: aligned
 * to 8, u32 tag (index of the field in its table, from 1), u32 n_elems, the elements. Everything is
 * little-endian. Encoding is canonical: a frame that decodes encodes to the same bytes. The
 * specification for people is proto/README.md. Decoding never allocates: plain arrays point into
 * the frame, arrays of records too if they lie there as in memory, and else go to a scratch buffer of
 * the caller.
 * Limits:  the frame must be 8-byte aligned in memory; hosts are little-endian
 * Thread:  any
 */
#ifndef PROTO_WIRE_H
#define PROTO_WIRE_H

#include "common/err.h"

#define WIRE_MAGIC        0x57444750u /* "PGDW" */
#define WIRE_VERSION      6
#define WIRE_HEADER_BYTES 24
#define WIRE_ALIGN        8
/* So that entries of a step can be counted in 32 bits. */
#define WIRE_MAX_BATCHED_TOKENS (1 << 20)

typedef enum wire_type {
    WIRE_HELLO = 1,
    WIRE_LOAD = 2,
    WIRE_LOAD_PROGRESS = 3,
    WIRE_LOAD_DONE = 4,
    WIRE_KV_CONFIG = 5,
    WIRE_KV_READY = 6,
    WIRE_STEP = 7,
    WIRE_RESULT = 8,
    WIRE_HEARTBEAT = 9,
    WIRE_PING = 10,
    WIRE_PONG = 11,
    WIRE_ERROR = 12,
    WIRE_SHUTDOWN = 13,
    WIRE_CHALLENGE = 14,
    WIRE_ATTACH = 15,
    WIRE_TRANSFERS_DONE = 16,
    WIRE_LOG_LEVEL = 17,
    WIRE_TYPE_LAST = WIRE_LOG_LEVEL
} wire_type;

typedef struct wire_header {
    uint16_t version;
    wire_type type;
    uint32_t worker_epoch;
    uint64_t frame_bytes;
} wire_header;

/* What a decoded message is held against. All are maxima except n_groups, which is exact. */
typedef struct wire_limits {
    int32_t max_num_seqs;
    int32_t max_num_batched_tokens;
    int32_t max_model_len;
    int32_t vocab_size;
    int32_t n_blocks; /* null block included */
    int32_t n_groups;
    int32_t block_sizes[PGD_MAX_KV_GROUPS]; /* tokens per block, [n_groups] */
    uint32_t cross_groups;                  /* bit g: the table of group g covers encoder tokens */
    int32_t max_encoder_tokens;             /* of a request; 0 = no encoder */
    int32_t max_logprobs;
    /* derived by wire_limits_derive */
    int32_t max_token_id;
    int32_t max_block_id;
    int32_t max_blocks_per_request; /* in the group that needs most */
    int32_t max_result_logprobs;    /* entries of a whole step */
    int32_t max_logprobs_per_token;
    int32_t max_prompt_logprobs; /* entries of a whole step */
} wire_limits;

/* Fills the derived members; PGD_ERANGE when a member is out of range. */
PGD_MUST_USE pgd_err wire_limits_derive(wire_limits *limits, pgd_why *why);

/* Bump memory for arrays of records; reset by each decode. */
typedef struct wire_scratch {
    uint8_t *data; /* 8-byte aligned, borrowed */
    size_t cap_bytes;
    size_t used_bytes;
} wire_scratch;

typedef enum wire_kind {
    WIRE_KIND_U8,
    WIRE_KIND_U32,
    WIRE_KIND_I32,
    WIRE_KIND_U64,
    WIRE_KIND_F32,
    WIRE_KIND_PAIR,   /* element only: i32 id, f32 value */
    WIRE_KIND_STRING, /* char[n], NUL-terminated; u32 n_bytes and the bytes on the wire */
    WIRE_KIND_RECORD, /* an embedded struct */
    WIRE_KIND_ARRAY,  /* pointer and count in the struct */
    WIRE_KIND_INLINE  /* T[n] and count in the struct */
} wire_kind;

typedef struct wire_record wire_record;

typedef struct wire_field {
    const char *name;
    wire_kind kind;
    wire_kind elem; /* ARRAY, INLINE */
    uint32_t offset;
    uint32_t n; /* fixed elements of a scalar, capacity of STRING and INLINE */
    uint32_t count_offset;
    uint32_t count_bytes; /* 4 or 8 */
    uint32_t flags;
    uint32_t min_n; /* ARRAY, INLINE: bounds of the count */
    uint32_t max_n;
    uint32_t max_n_ref; /* offset + 1 into wire_limits, 0 = max_n */
    double min;         /* bounds of the value or of each element */
    double max;
    uint32_t max_ref; /* offset + 1 into wire_limits, 0 = max */
    const wire_record *record;
} wire_field;

struct wire_record {
    const char *name;
    const wire_field *fields;
    uint32_t n_fields;
    uint32_t struct_bytes;
};

/* The count is a field of its own: n_elems is that count, or 0 and a NULL pointer. */
#define WIRE_FLAG_OPTIONAL 1u
/* The count was set by an earlier array: n_elems must be equal. */
#define WIRE_FLAG_SAME_COUNT 2u
/* Repeated for each KV group; pointer and count are arrays. */
#define WIRE_FLAG_PER_GROUP 4u
/* This I32 is the number of groups that PER_GROUP fields repeat. */
#define WIRE_FLAG_SETS_GROUPS 8u

/* The table entries. W_CHECK makes a size mismatch between table and struct a compile error. */
#define W_CHECK(cond)           (0 * sizeof(char[(cond) ? 1 : -1]))
#define W_SIZE(T, m)            sizeof(((T *)0)->m)
#define W_OFF(T, m, elem_bytes) (uint32_t)(offsetof(T, m) + W_CHECK(W_SIZE(T, m) == (elem_bytes)))
#define W_LIMIT(m)              (uint32_t)(offsetof(wire_limits, m) + 1)
#define W_SCALAR(T, m, k, b, lo, hi, ref)                                                    \
    {                                                                                        \
        .name = #m, .kind = (k), .offset = W_OFF(T, m, b), .n = 1, .min = (lo), .max = (hi), \
        .max_ref = (ref)                                                                     \
    }
#define W_U8(T, m, lo, hi)       W_SCALAR(T, m, WIRE_KIND_U8, 1, lo, hi, 0)
#define W_U32(T, m, lo, hi)      W_SCALAR(T, m, WIRE_KIND_U32, 4, lo, hi, 0)
#define W_I32(T, m, lo, hi)      W_SCALAR(T, m, WIRE_KIND_I32, 4, lo, hi, 0)
#define W_I32_REF(T, m, lo, ref) W_SCALAR(T, m, WIRE_KIND_I32, 4, lo, 0, W_LIMIT(ref))
#define W_U64(T, m)              W_SCALAR(T, m, WIRE_KIND_U64, 8, 0, 0, 0)
#define W_F32(T, m, lo, hi)      W_SCALAR(T, m, WIRE_KIND_F32, 4, lo, hi, 0)
#define W_FIXED(T, m, k, b, count, lo, hi)                                                   \
    {                                                                                        \
        .name = #m, .kind = (k), .offset = W_OFF(T, m, (size_t)(b) * (count)), .n = (count), \
        .min = (lo), .max = (hi)                                                             \
    }
#define W_STRING(T, m)                                                            \
    {                                                                             \
        .name = #m, .kind = WIRE_KIND_STRING, .offset = (uint32_t)offsetof(T, m), \
        .n = (uint32_t)W_SIZE(T, m)                                               \
    }
/* Elements inside the struct, at most as many as the member has places. */
#define W_INLINE(T, m, n_member, k, rec, least)                                               \
    {                                                                                         \
        .name = #m, .kind = WIRE_KIND_INLINE, .elem = (k), .record = (rec), .count_bytes = 4, \
        .offset = (uint32_t)offsetof(T, m), .count_offset = W_OFF(T, n_member, 4),            \
        .min_n = (least), .max_n = (uint32_t)PGD_ARRAY_LEN(((T *)0)->m)                       \
    }
#define W_INLINE_RECORDS(T, m, n_member, rec, least) \
    W_INLINE(T, m, n_member, WIRE_KIND_RECORD, rec, least)
#define W_INLINE_U64(T, m, n_member, least) W_INLINE(T, m, n_member, WIRE_KIND_U64, NULL, least)
#define W_EMBED(T, m, rec)                                                                        \
    {                                                                                             \
        .name = #m, .kind = WIRE_KIND_RECORD, .offset = (uint32_t)offsetof(T, m), .record = (rec) \
    }

PGD_MUST_USE pgd_err wire_decode_header(wire_header *out, const void *frame, size_t n_bytes,
                                        pgd_why *why);

/* Bytes of the whole frame; rec NULL = a message without a body. */
size_t wire_frame_bytes(const wire_record *rec, const void *msg);
/* Writes exactly frame_bytes, which wire_frame_bytes gave for the same message. */
void wire_encode(void *out, size_t frame_bytes, wire_type type, uint32_t worker_epoch,
                 const wire_record *rec, const void *msg);
/* Checks the header, type included, and decodes the record. scratch may be NULL when the message
 * has no arrays of records, limits when its table refers to none. Errors: PGD_EUNSUPPORTED (another
 * version), PGD_EPROTO (anything else); *msg is then unspecified. */
PGD_MUST_USE pgd_err wire_decode(void *msg, wire_scratch *scratch, const void *frame,
                                 size_t n_bytes, wire_type type, const wire_record *rec,
                                 const wire_limits *limits, pgd_why *why);
/* "step", "hello" ...; static storage. */
const char *wire_type_name(wire_type type);

#endif
