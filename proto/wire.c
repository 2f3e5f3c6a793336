/* The codec: one walk over the field table measures, one writes, one reads.
 *
 * Measuring is writing with no buffer, so the two cannot disagree; reading follows the same table.
 * Byte order: the wire is little-endian and so must be the host, which lets plain arrays be used
 * where they lie in the frame, and arrays of records that consist of values in the places they have in
 * memory. A reader never trusts a count: it is held against the table's
 * bounds, then against the bytes that are left, before anything is written. Rejected: generated
 * code per message (a second place that could drift), and offsets on the wire (they can overlap or
 * point outside; a cursor cannot).
 *
 *   frame  [magic u32][version u16][type u16][epoch u32][0 u32][frame_bytes u64] record
 *   section  pad to 8 | tag u32 | n_elems u32 | elements
 */
#include "proto/wire.h"

#include <math.h>
#include <string.h>

#include "common/mem.h"
#include "proto/wire_plan.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "paged needs a little-endian machine");

#define MAX_DEPTH 4 /* records within records; the tables need 3 */

static const uint8_t KIND_BYTES[] = {
    [WIRE_KIND_U8] = 1,  [WIRE_KIND_U32] = 4, [WIRE_KIND_I32] = 4,
    [WIRE_KIND_U64] = 8, [WIRE_KIND_F32] = 4, [WIRE_KIND_PAIR] = 8,
};

typedef struct pair {
    int32_t id;
    float value;
} pair;
static_assert(sizeof(pair) == 8, "wire size");

const char *wire_type_name(wire_type type)
{
    static const char *const names[] = {
        "?",        "hello",    "load",      "load_progress", "load_done",      "kv_config",
        "kv_ready", "step",     "result",    "heartbeat",     "ping",           "pong",
        "error",    "shutdown", "challenge", "attach",        "transfers_done", "log_level"};
    static_assert(PGD_ARRAY_LEN(names) == WIRE_TYPE_LAST + 1, "one name per type");
    return type >= 1 && type <= WIRE_TYPE_LAST ? names[type] : names[0];
}

pgd_err wire_limits_derive(wire_limits *l, pgd_why *why)
{
    if (l->max_num_seqs < 1 || l->max_num_batched_tokens < 1 || l->max_model_len < 1 ||
        l->vocab_size < 1 || l->n_blocks < 2 || l->n_groups < 1 ||
        l->n_groups > PGD_MAX_KV_GROUPS || l->max_encoder_tokens < 0 || l->max_logprobs < 0 ||
        l->max_logprobs > PGD_MAX_LOGPROBS || l->max_num_seqs > (1 << 20) ||
        l->max_num_batched_tokens > WIRE_MAX_BATCHED_TOKENS)
        return pgd_fail(why, PGD_ERANGE,
                        "limits: expected positive sizes, got max_num_seqs=%d "
                        "max_num_batched_tokens=%d max_model_len=%d "
                        "vocab_size=%d n_blocks=%d n_groups=%d max_encoder_tokens=%d "
                        "max_logprobs=%d",
                        l->max_num_seqs, l->max_num_batched_tokens, l->max_model_len, l->vocab_size,
                        l->n_blocks, l->n_groups, l->max_encoder_tokens, l->max_logprobs);
    int32_t max_tokens = PGD_MAX(l->max_model_len, l->max_encoder_tokens);
    l->max_blocks_per_request = 0;
    for (int32_t g = 0; g < l->n_groups; g++) {
        if (l->block_sizes[g] < 1)
            return pgd_fail(why, PGD_ERANGE, "limits: expected a block size, got %d, at group %d",
                            l->block_sizes[g], g);
        /* One more than the length needs: a step may be scheduled one token ahead of the stop
         * check. */
        l->max_blocks_per_request =
            PGD_MAX(l->max_blocks_per_request, (max_tokens - 1) / l->block_sizes[g] + 2);
    }
    l->max_token_id = l->vocab_size - 1;
    l->max_block_id = l->n_blocks - 1;
    l->max_logprobs_per_token = l->max_logprobs + 1;
    l->max_result_logprobs = l->max_num_seqs * l->max_logprobs_per_token;
    l->max_prompt_logprobs = l->max_num_batched_tokens * l->max_logprobs_per_token;
    return PGD_OK;
}

/* --- reading and writing one place ------------------------------------------------------------ */

/* count_bytes is 4 (int32_t) or 8 (size_t) */
static int64_t get_count(const void *at, uint32_t count_bytes)
{
    int32_t n32;
    uint64_t n64;
    if (count_bytes == 4) {
        memcpy(&n32, at, 4);
        return n32;
    }
    memcpy(&n64, at, 8);
    return (int64_t)n64;
}

static void set_count(void *at, uint32_t count_bytes, uint32_t n)
{
    uint64_t n64 = n;
    memcpy(at, count_bytes == 4 ? (void *)&n : (void *)&n64, count_bytes);
}

/* Bytes of one element of an array in memory. */
static size_t elem_stride(const wire_field *f)
{
    return f->elem == WIRE_KIND_RECORD ? f->record->struct_bytes : KIND_BYTES[f->elem];
}

/* --- writer ----------------------------------------------------------------------------------- */

typedef struct writer {
    uint8_t *data; /* NULL: only measures */
    size_t n_bytes;
    int32_t n_groups;
} writer;

static void put(writer *w, const void *src, size_t n_bytes)
{
    if (w->data != NULL && n_bytes > 0)
        memcpy(w->data + w->n_bytes, src, n_bytes);
    w->n_bytes += n_bytes;
}

static void put_u32(writer *w, uint32_t x)
{
    put(w, &x, 4);
}

static void put_padding(writer *w, size_t align)
{
    static const uint8_t zeros[WIRE_ALIGN];
    put(w, zeros, (align - w->n_bytes % align) % align);
}

static void write_record(writer *w, const wire_record *rec, const uint8_t *msg);

static void write_section(writer *w, const wire_field *f, uint32_t tag, const uint8_t *elems,
                          int64_t n_elems)
{
    PGD_ASSERTF(n_elems >= 0 && n_elems <= UINT32_MAX && (n_elems == 0 || elems != NULL),
                "wire: field %s has a bad count %lld", f->name, (long long)n_elems);
    put_padding(w, WIRE_ALIGN);
    put_u32(w, tag);
    put_u32(w, (uint32_t)n_elems);
    if (f->elem != WIRE_KIND_RECORD) {
        put(w, elems, (size_t)n_elems * KIND_BYTES[f->elem]);
        return;
    }
    wire_plan plan;
    if (n_elems > 0 && wire_plan_make(&plan, f->record, NULL)) {
        w->n_bytes =
            wire_plan_write(w->data, w->n_bytes, &plan, elems, (size_t)n_elems, w->n_groups);
        return;
    }
    for (int64_t i = 0; i < n_elems; i++)
        write_record(w, f->record, elems + (size_t)i * f->record->struct_bytes);
}

static void write_array(writer *w, const wire_field *f, uint32_t tag, const uint8_t *msg)
{
    int32_t n_repeats = f->flags & WIRE_FLAG_PER_GROUP ? w->n_groups : 1;
    for (int32_t g = 0; g < n_repeats; g++) {
        const uint8_t *at =
            msg + f->offset + (f->kind == WIRE_KIND_ARRAY ? (size_t)g * sizeof(void *) : 0);
        const uint8_t *elems = at;
        if (f->kind == WIRE_KIND_ARRAY)
            memcpy(&elems, at, sizeof elems);
        int64_t n_elems =
            get_count(msg + f->count_offset + (size_t)g * f->count_bytes, f->count_bytes);
        if ((f->flags & WIRE_FLAG_OPTIONAL) && elems == NULL)
            n_elems = 0;
        write_section(w, f, tag, elems, n_elems);
    }
}

static void write_record(writer *w, const wire_record *rec, const uint8_t *msg)
{
    put_padding(w, WIRE_ALIGN);
    for (uint32_t i = 0; i < rec->n_fields; i++) {
        const wire_field *f = &rec->fields[i];
        const uint8_t *at = msg + f->offset;
        switch (f->kind) {
        case WIRE_KIND_RECORD:
            write_record(w, f->record, at);
            break;
        case WIRE_KIND_ARRAY:
        case WIRE_KIND_INLINE:
            write_array(w, f, i + 1, msg);
            break;
        case WIRE_KIND_STRING: {
            size_t n_text = strnlen((const char *)at, f->n - 1);
            put_padding(w, 4);
            put_u32(w, (uint32_t)n_text);
            put(w, at, n_text);
            break;
        }
        default:
            put_padding(w, KIND_BYTES[f->kind]);
            put(w, at, (size_t)f->n * KIND_BYTES[f->kind]);
            if (f->flags & WIRE_FLAG_SETS_GROUPS)
                memcpy(&w->n_groups, at, 4);
        }
    }
}

size_t wire_frame_bytes(const wire_record *rec, const void *msg)
{
    writer w = {.n_bytes = WIRE_HEADER_BYTES};
    if (rec != NULL)
        write_record(&w, rec, msg);
    return w.n_bytes;
}

void wire_encode(void *out, size_t frame_bytes, wire_type type, uint32_t worker_epoch,
                 const wire_record *rec, const void *msg)
{
    writer w = {.data = out};
    uint16_t version = WIRE_VERSION;
    uint16_t type16 = (uint16_t)type;
    uint64_t n_bytes = frame_bytes;
    mem_forbid();
    put_u32(&w, WIRE_MAGIC);
    put(&w, &version, 2);
    put(&w, &type16, 2);
    put_u32(&w, worker_epoch);
    put_u32(&w, 0);
    put(&w, &n_bytes, 8);
    if (rec != NULL)
        write_record(&w, rec, msg);
    mem_permit();
    PGD_ASSERTF(w.n_bytes == frame_bytes, "wire: %s measured %zu bytes, wrote %zu",
                wire_type_name(type), frame_bytes, w.n_bytes);
}

/* --- reader ----------------------------------------------------------------------------------- */

typedef struct reader {
    const uint8_t *data;
    size_t n_bytes;
    size_t pos;
    int32_t n_groups;
    int depth;
    wire_scratch *scratch;
    const wire_limits *limits;
    pgd_why *why;
} reader;

pgd_err wire_decode_header(wire_header *out, const void *frame, size_t n_bytes, pgd_why *why)
{
    const uint8_t *p = frame;
    uint32_t magic;
    uint16_t type;
    uint32_t reserved;
    *out = (wire_header){0};
    if (n_bytes < WIRE_HEADER_BYTES)
        return pgd_fail(why, PGD_EPROTO, "frame: expected a header of %d bytes, got %zu bytes",
                        WIRE_HEADER_BYTES, n_bytes);
    memcpy(&magic, p, 4);
    memcpy(&out->version, p + 4, 2);
    memcpy(&type, p + 6, 2);
    memcpy(&out->worker_epoch, p + 8, 4);
    memcpy(&reserved, p + 12, 4);
    memcpy(&out->frame_bytes, p + 16, 8);
    if (magic != WIRE_MAGIC)
        return pgd_fail(why, PGD_EPROTO, "frame: expected magic 0x%08x, got 0x%08x, at byte 0",
                        WIRE_MAGIC, magic);
    if (out->version != WIRE_VERSION)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected protocol version %d, got %u: paged and paged-worker are of "
                        "different builds, install both "
                        "from the same one",
                        WIRE_VERSION, out->version);
    if (type < 1 || type > WIRE_TYPE_LAST)
        return pgd_fail(why, PGD_EPROTO, "frame: expected a message type 1..%d, got %u, at byte 6",
                        WIRE_TYPE_LAST, type);
    if (reserved != 0)
        return pgd_fail(why, PGD_EPROTO, "frame: expected 0, got %u, at byte 12", reserved);
    if (out->frame_bytes != n_bytes)
        return pgd_fail(why, PGD_EPROTO, "frame: header says %llu bytes, got %zu",
                        (unsigned long long)out->frame_bytes, n_bytes);
    out->type = (wire_type)type;
    return PGD_OK;
}

static bool skip_padding(reader *r, size_t align)
{
    size_t n_pad = (align - r->pos % align) % align;
    if (n_pad > r->n_bytes - r->pos)
        return false;
    for (size_t i = 0; i < n_pad; i++)
        if (r->data[r->pos + i] != 0)
            return false;
    r->pos += n_pad;
    return true;
}

static pgd_err fail_bytes(reader *r, const wire_record *rec, const wire_field *f, uint64_t n_need)
{
    return pgd_fail(r->why, PGD_EPROTO,
                    "%s.%s: expected zero padding and %llu bytes, at byte %zu of %zu", rec->name,
                    f->name, (unsigned long long)n_need, r->pos, r->n_bytes);
}

static double limit_value(const reader *r, uint32_t ref, double constant)
{
    int32_t x;
    if (ref == 0)
        return constant;
    PGD_ASSERT(r->limits != NULL);
    memcpy(&x, (const uint8_t *)r->limits + ref - 1, 4);
    return x;
}

static pgd_err fail_range(reader *r, const wire_record *rec, const wire_field *f, double min,
                          double max, double got, size_t pos)
{
    return pgd_fail(r->why, PGD_EPROTO, "%s.%s: expected %.9g..%.9g, got %.9g, at byte %zu",
                    rec->name, f->name, min, max, got, pos);
}

/* Values of one kind at p (aligned to the kind), each in the field's range. */
static pgd_err check_values(reader *r, const wire_record *rec, const wire_field *f, wire_kind kind,
                            const uint8_t *p, size_t n_elems)
{
    double max = limit_value(r, f->max_ref, f->max);
    size_t pos = (size_t)(p - r->data);
    if (kind == WIRE_KIND_U64 || (kind == WIRE_KIND_U8 && f->min <= 0 && max >= 255))
        return PGD_OK;
    if (kind == WIRE_KIND_I32) {
        const int32_t *x = (const int32_t *)(const void *)p;
        int32_t lo = (int32_t)f->min;
        int32_t hi = (int32_t)max;
        for (size_t i = 0; i < n_elems; i++)
            if (x[i] < lo || x[i] > hi)
                return fail_range(r, rec, f, lo, hi, x[i], pos + 4 * i);
        return PGD_OK;
    }
    for (size_t i = 0; i < n_elems; i++) {
        const uint8_t *at = p + i * KIND_BYTES[kind];
        double got = 0;
        uint32_t u32;
        float f32;
        pair pr;
        if (kind == WIRE_KIND_U8) {
            got = *at;
        } else if (kind == WIRE_KIND_U32) {
            memcpy(&u32, at, 4);
            got = u32;
        } else if (kind == WIRE_KIND_F32) {
            memcpy(&f32, at, 4);
            got = (double)f32;
        } else {
            memcpy(&pr, at, 8);
            got = pr.id;
            if (!isfinite(pr.value))
                return pgd_fail(r->why, PGD_EPROTO,
                                "%s.%s: expected a finite number, got %g, at byte %zu", rec->name,
                                f->name, (double)pr.value, pos + 8 * i + 4);
        }
        if (!(got >= f->min && got <= max)) /* NaN fails too */
            return fail_range(r, rec, f, f->min, max, got, pos + i * KIND_BYTES[kind]);
    }
    return PGD_OK;
}

static pgd_err read_scalar(reader *r, const wire_record *rec, const wire_field *f, uint8_t *msg)
{
    size_t n_need = (size_t)f->n * KIND_BYTES[f->kind];
    if (!skip_padding(r, KIND_BYTES[f->kind]) || n_need > r->n_bytes - r->pos)
        return fail_bytes(r, rec, f, n_need);
    PGD_TRY(check_values(r, rec, f, f->kind, r->data + r->pos, f->n));
    memcpy(msg + f->offset, r->data + r->pos, n_need);
    r->pos += n_need;
    if (f->flags & WIRE_FLAG_SETS_GROUPS)
        memcpy(&r->n_groups, msg + f->offset, 4);
    return PGD_OK;
}

static pgd_err read_string(reader *r, const wire_record *rec, const wire_field *f, uint8_t *msg)
{
    uint32_t n_text;
    if (!skip_padding(r, 4) || r->n_bytes - r->pos < 4)
        return fail_bytes(r, rec, f, 4);
    memcpy(&n_text, r->data + r->pos, 4);
    r->pos += 4;
    if (n_text >= f->n || n_text > r->n_bytes - r->pos)
        return pgd_fail(r->why, PGD_EPROTO,
                        "%s.%s: expected a text of at most %u bytes, got %u, at byte %zu",
                        rec->name, f->name, f->n - 1, n_text, r->pos);
    if (n_text > 0 && memchr(r->data + r->pos, 0, n_text) != NULL)
        return pgd_fail(r->why, PGD_EPROTO, "%s.%s: expected a text without NUL, at byte %zu",
                        rec->name, f->name, r->pos);
    memset(msg + f->offset, 0, f->n);
    if (n_text > 0)
        memcpy(msg + f->offset, r->data + r->pos, n_text);
    r->pos += n_text;
    return PGD_OK;
}

static pgd_err read_record(reader *r, const wire_record *rec, uint8_t *msg);

/* Space for an array of records, from the scratch buffer. A record takes at least 8 bytes on the
 * wire, which bounds the count by the frame before anything is taken. */
static pgd_err take_records(reader *r, const wire_record *rec, const wire_field *f, uint8_t **elems,
                            uint32_t n_elems)
{
    size_t n_need;
    if (n_elems > (r->n_bytes - r->pos) / WIRE_ALIGN)
        return fail_bytes(r, rec, f, (uint64_t)n_elems * WIRE_ALIGN);
    if (!mem_mul(&n_need, n_elems,
                 PGD_ROUND_UP((size_t)f->record->struct_bytes, (size_t)WIRE_ALIGN)) ||
        r->scratch == NULL || n_need > r->scratch->cap_bytes - r->scratch->used_bytes)
        return pgd_fail(r->why, PGD_EPROTO,
                        "%s.%s: %u elements are more than this side has room for", rec->name,
                        f->name, n_elems);
    *elems = r->scratch->data + r->scratch->used_bytes;
    r->scratch->used_bytes += n_need;
    return PGD_OK;
}

static pgd_err read_records(reader *r, const wire_field *f, uint8_t *elems, uint32_t n_elems)
{
    wire_plan plan;
    bool has_plan = r->limits != NULL && wire_plan_make(&plan, f->record, r->limits);
    for (size_t i = 0; i < n_elems; i++) {
        size_t stride = f->record->struct_bytes;
        if (has_plan)
            i += wire_plan_read(elems + i * stride, &r->pos, &plan, n_elems - i, r->data,
                                r->n_bytes, r->n_groups);
        if (i < n_elems)
            PGD_TRY(read_record(r, f->record, elems + i * stride));
    }
    return PGD_OK;
}

/* *elems: where the array lies, in the frame if it can be used there. */
static pgd_err read_record_array(reader *r, const wire_record *rec, const wire_field *f,
                                 const uint8_t **elems, uint32_t n_elems)
{
    wire_plan plan;
    uint8_t *made = NULL;
    const uint8_t *at = r->data + r->pos;
    size_t n_bytes = (size_t)n_elems * f->record->struct_bytes;
    if (n_elems == 0)
        return PGD_OK;
    if (r->limits != NULL && n_bytes <= r->n_bytes - r->pos &&
        wire_plan_make(&plan, f->record, r->limits) && plan.is_flat &&
        wire_plan_is_in_range(&plan, at, n_elems)) {
        r->pos += n_bytes;
        *elems = at;
        return PGD_OK;
    }
    PGD_TRY(take_records(r, rec, f, &made, n_elems));
    *elems = made;
    return read_records(r, f, made, n_elems);
}

static pgd_err check_count(reader *r, const wire_record *rec, const wire_field *f,
                           const uint8_t *count_at, uint32_t n_elems)
{
    double max_n = limit_value(r, f->max_n_ref, f->max_n);
    if (n_elems < f->min_n || n_elems > max_n)
        return pgd_fail(r->why, PGD_EPROTO,
                        "%s.%s: expected %u..%.0f elements, got %u, at byte %zu", rec->name,
                        f->name, f->min_n, max_n, n_elems, r->pos - 4);
    if (!(f->flags & (WIRE_FLAG_OPTIONAL | WIRE_FLAG_SAME_COUNT)))
        return PGD_OK;
    int64_t n_said = get_count(count_at, f->count_bytes);
    if (n_elems != n_said && !((f->flags & WIRE_FLAG_OPTIONAL) && n_elems == 0))
        return pgd_fail(r->why, PGD_EPROTO, "%s.%s: expected %lld elements, got %u, at byte %zu",
                        rec->name, f->name, (long long)n_said, n_elems, r->pos - 4);
    return PGD_OK;
}

static pgd_err read_section(reader *r, const wire_record *rec, const wire_field *f, uint32_t tag,
                            uint8_t *at, uint8_t *count_at)
{
    uint32_t head[2];
    if (!skip_padding(r, WIRE_ALIGN) || r->n_bytes - r->pos < sizeof head)
        return fail_bytes(r, rec, f, sizeof head);
    memcpy(head, r->data + r->pos, sizeof head);
    if (head[0] != tag)
        return pgd_fail(r->why, PGD_EPROTO, "%s.%s: expected section %u, got %u, at byte %zu",
                        rec->name, f->name, tag, head[0], r->pos);
    r->pos += sizeof head;
    uint32_t n_elems = head[1];
    PGD_TRY(check_count(r, rec, f, count_at, n_elems));
    if (!(f->flags & WIRE_FLAG_OPTIONAL))
        set_count(count_at, f->count_bytes, n_elems);
    const uint8_t *elems = NULL;
    if (f->elem == WIRE_KIND_RECORD && f->kind == WIRE_KIND_INLINE) {
        return read_records(r, f, at, n_elems);
    } else if (f->elem == WIRE_KIND_RECORD) {
        PGD_TRY(read_record_array(r, rec, f, &elems, n_elems));
    } else {
        size_t stride = elem_stride(f);
        if (n_elems > (r->n_bytes - r->pos) / stride)
            return fail_bytes(r, rec, f, (uint64_t)n_elems * stride);
        elems = n_elems > 0 ? r->data + r->pos : NULL;
        PGD_TRY(check_values(r, rec, f, f->elem, r->data + r->pos, n_elems));
        r->pos += (size_t)n_elems * stride;
    }
    if (f->kind == WIRE_KIND_ARRAY)
        memcpy(at, &elems, sizeof elems);
    else if (n_elems > 0)
        memcpy(at, elems, (size_t)n_elems * elem_stride(f));
    return PGD_OK;
}

static pgd_err read_array(reader *r, const wire_record *rec, const wire_field *f, uint32_t tag,
                          uint8_t *msg)
{
    int32_t n_repeats = f->flags & WIRE_FLAG_PER_GROUP ? r->n_groups : 1;
    for (int32_t g = 0; g < n_repeats; g++) {
        size_t step = f->kind == WIRE_KIND_ARRAY ? (size_t)g * sizeof(void *) : 0;
        PGD_TRY(read_section(r, rec, f, tag, msg + f->offset + step,
                             msg + f->count_offset + (size_t)g * f->count_bytes));
    }
    return PGD_OK;
}

static pgd_err read_record(reader *r, const wire_record *rec, uint8_t *msg)
{
    PGD_ASSERT(r->depth < MAX_DEPTH);
    r->depth++;
    memset(msg, 0, rec->struct_bytes);
    if (!skip_padding(r, WIRE_ALIGN))
        return pgd_fail(r->why, PGD_EPROTO, "%s: expected zero padding, at byte %zu of %zu",
                        rec->name, r->pos, r->n_bytes);
    for (uint32_t i = 0; i < rec->n_fields; i++) {
        const wire_field *f = &rec->fields[i];
        switch (f->kind) {
        case WIRE_KIND_RECORD:
            PGD_TRY(read_record(r, f->record, msg + f->offset));
            break;
        case WIRE_KIND_ARRAY:
        case WIRE_KIND_INLINE:
            PGD_TRY(read_array(r, rec, f, i + 1, msg));
            break;
        case WIRE_KIND_STRING:
            PGD_TRY(read_string(r, rec, f, msg));
            break;
        default:
            PGD_TRY(read_scalar(r, rec, f, msg));
        }
    }
    r->depth--;
    return PGD_OK;
}

static pgd_err decode_record(reader *r, wire_type type, const wire_record *rec, void *msg)
{
    if (rec != NULL)
        PGD_TRY(read_record(r, rec, msg));
    if (r->pos != r->n_bytes)
        return pgd_fail(r->why, PGD_EPROTO,
                        "frame: expected the end of message %s at byte %zu, got %zu bytes",
                        wire_type_name(type), r->pos, r->n_bytes);
    return PGD_OK;
}

pgd_err wire_decode(void *msg, wire_scratch *scratch, const void *frame, size_t n_bytes,
                    wire_type type, const wire_record *rec, const wire_limits *limits, pgd_why *why)
{
    wire_header h;
    PGD_TRY(wire_decode_header(&h, frame, n_bytes, why));
    if (h.type != type)
        return pgd_fail(why, PGD_EPROTO, "frame: expected message %s, got %s", wire_type_name(type),
                        wire_type_name(h.type));
    if ((uintptr_t)frame % WIRE_ALIGN != 0)
        return pgd_fail(why, PGD_EINVAL, "frame: expected memory aligned to %d bytes", WIRE_ALIGN);
    if (scratch != NULL)
        scratch->used_bytes = 0;
    reader r = {.data = frame,
                .n_bytes = n_bytes,
                .pos = WIRE_HEADER_BYTES,
                .scratch = scratch,
                .limits = limits,
                .why = why};
    mem_forbid();
    pgd_err err = decode_record(&r, type, rec, msg);
    mem_permit();
    return err;
}
