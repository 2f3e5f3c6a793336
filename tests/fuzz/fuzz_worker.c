/* What a worker does with frames from its engine: the real handshake and worker loop with the simulated runner or
 * the model runner (a tiny model, reference kernels), over a link that this file
 * implements. Frames are built from the input: mostly plausible steps over a few requests and
 * blocks, so that rows, tables and epochs are reached, with wrong numbers and damaged bytes among
 * them. Whatever comes, the worker answers, or ends with an error that it has told; an answer must
 * itself be a valid frame, of the step it belongs to. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/model/dtype.h"
#include "engine/kv/kv_groups.h"
#include "proto/control.h"
#include "proto/kv_region.h"
#include "proto/scheduler_output.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/unit/model_builder.h"
#include "worker/handshake.h"
#include "worker/worker_loop.h"

#define EPOCH        7
#define DIM          32 /* of the model: as small as a model may be */
#define VOCAB_SIZE   48
#define MAX_SEQS     4
#define MAX_BATCHED  48
#define MAX_LEN      64
#define MAX_LOGPROBS 3
#define BLOCK_SIZE   16
#define N_BLOCKS     12
#define N_REQUESTS   6 /* different request ids */
#define MAX_BLOCKS   (MAX_LEN / BLOCK_SIZE + 2)
#define MAX_FRAMES   40
#define MAX_GONE     3
#define N_MEDIUM     8 /* blocks of the offload tier */
#define MAX_JOBS     3 /* of a step */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

/* What an engine would know of a request. */
typedef struct known {
    bool is_live;
    uint32_t epoch;
    int32_t n_tokens;
    int32_t n_computed;
    int32_t n_scheduled; /* in the step that is out */
    int32_t n_blocks[PGD_MAX_KV_GROUPS];
} known;

struct engine_link {
    fuzz_input in;
    known requests[N_REQUESTS];
    int n_frames;
    uint64_t step_id;
    bool step_is_out;
    bool has_tier;
    uint64_t n_jobs;       /* named so far */
    pthread_mutex_t mutex; /* over what transfers_done changes */
    pthread_cond_t ended;
    int32_t n_sent;    /* loads and stores of the step that is out */
    int32_t n_pending; /* jobs that the worker has taken, as far as can be told */
    bool told_error;
    bool sent_shutdown;
    attach_terms terms;
    bool is_hybrid;
    kv_layout layout; /* of the worker's layers */
    wire_limits limits;
    wire_scratch scratch;
    void *frame; /* the last one handed out */
    /* parts of the step being built */
    token_id tokens[MAX_SEQS + 1][MAX_LEN + 2];
    block_id blocks[MAX_SEQS + 1][PGD_MAX_KV_GROUPS][MAX_BLOCKS];
    token_id stop_ids[4];
    logit_bias biases[2];
    new_request_msg new_requests[MAX_SEQS + 1];
    cached_request_msg cached[MAX_SEQS + 1];
    block_append_msg appends[MAX_SEQS + 1];
    uint64_t finished[MAX_GONE];
    uint64_t preempted[MAX_GONE];
    block_id to_zero[3];
    kv_transfer_msg transfers[MAX_JOBS + 1];
    block_id device_blocks[MAX_JOBS][3];
    int32_t medium_blocks[MAX_JOBS][3];
    uint64_t tags[MAX_JOBS][3];
};

static char model_path[64];
static int region_fd;

/* --- the model -------------------------------------------------------------------------------- */

static void describe_model(builder *b)
{
    builder_begin(b);
    builder_kv_string(b, "general.architecture", "llama");
    builder_kv_u32(b, "general.alignment", 32);
    builder_kv_u32(b, "llama.block_count", 1);
    builder_kv_u32(b, "llama.context_length", MAX_LEN);
    builder_kv_u32(b, "llama.embedding_length", DIM);
    builder_kv_u32(b, "llama.feed_forward_length", DIM);
    builder_kv_u32(b, "llama.attention.head_count", 2);
    builder_kv_u32(b, "llama.attention.head_count_kv", 1);
    builder_kv_f32(b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    builder_kv_u32(b, "llama.rope.dimension_count", DIM / 2);
    builder_kv_u32(b, "llama.vocab_size", VOCAB_SIZE);
    builder_tensor(b, "token_embd.weight", DTYPE_F32, VOCAB_SIZE, DIM);
    builder_tensor(b, "blk.0.attn_norm.weight", DTYPE_F32, 0, DIM);
    builder_tensor(b, "blk.0.attn_q.weight", DTYPE_F32, DIM, DIM);
    builder_tensor(b, "blk.0.attn_k.weight", DTYPE_F32, DIM / 2, DIM);
    builder_tensor(b, "blk.0.attn_v.weight", DTYPE_F32, DIM / 2, DIM);
    builder_tensor(b, "blk.0.attn_output.weight", DTYPE_F32, DIM, DIM);
    builder_tensor(b, "blk.0.ffn_norm.weight", DTYPE_F32, 0, DIM);
    builder_tensor(b, "blk.0.ffn_gate.weight", DTYPE_F32, DIM, DIM);
    builder_tensor(b, "blk.0.ffn_up.weight", DTYPE_F32, DIM, DIM);
    builder_tensor(b, "blk.0.ffn_down.weight", DTYPE_F32, DIM, DIM);
    builder_tensor(b, "output_norm.weight", DTYPE_F32, 0, DIM);
    builder_tensor(b, "output.weight", DTYPE_F32, VOCAB_SIZE, DIM);
    builder_end(b);
}

/* A llama of one layer in a file in memory, open until the program ends. */
static void make_model(void)
{
    static builder b;
    describe_model(&b);
    for (size_t at = PGD_ROUND_UP(b.header_bytes, 32); at < b.n_bytes; at += sizeof(float)) {
        float v = (float)(int)(at * 37 % 61 - 30) / 64;
        memcpy(b.data + at, &v, sizeof(v));
    }
    int fd = memfd_create("fuzz_worker", MFD_CLOEXEC);
    if (fd < 0 || write(fd, b.data, b.n_bytes) != (ssize_t)b.n_bytes)
        abort();
    (void)snprintf(model_path, sizeof(model_path), "/proc/self/fd/%d", fd);
    builder_free(&b);
}

/* --- building frames -------------------------------------------------------------------------- */

static void *encode(engine_link *l, size_t *n_bytes, wire_type type, const wire_record *rec,
                    const void *msg)
{
    free(l->frame);
    *n_bytes = wire_frame_bytes(rec, msg);
    l->frame = malloc(*n_bytes);
    if (l->frame == NULL)
        abort();
    wire_encode(l->frame, *n_bytes, type, EPOCH, rec, msg);
    return l->frame;
}

static void *build_load(engine_link *l, size_t *n_bytes)
{
    static const char *const layers[] = {"", "full,sliding:20", "full*2,sliding:20,chunked:32",
                                         "sliding:", "full,chunked:0"};
    fuzz_input *in = &l->in;
    load_msg m = {.kv_dtype = DTYPE_F16,
                  .block_size = BLOCK_SIZE,
                  .max_model_len = MAX_LEN,
                  .max_num_seqs = MAX_SEQS,
                  .max_num_batched_tokens = MAX_BATCHED,
                  .max_logprobs = MAX_LOGPROBS,
                  .n_threads = 1,
                  .sim_vocab_size = VOCAB_SIZE};
    int32_t *fields[] = {&m.kv_dtype, &m.block_size, &m.max_logprobs, &m.sim_vocab_size};
    uint8_t odd = fuzz_u8(in);
    int32_t *field = fields[odd % PGD_ARRAY_LEN(fields)];
    *field = fuzz_bend(in, odd, *field);
    uint8_t layer = odd % 16 < 14 ? odd % 3 : odd % 5;
    l->is_hybrid = odd % 4 != 0;
    (void)snprintf(m.sim_kv_layers, sizeof(m.sim_kv_layers), "%s", layers[layer]);
    (void)snprintf(m.model_path, sizeof(m.model_path), "%s",
                   odd == 239 ? "/no/such/model" : model_path);
    return encode(l, n_bytes, WIRE_LOAD, &control_load_record, &m);
}

/* Blocks with tags 0 to 3, sealed and not; seldom a region of another shape. */
static void add_tier(const engine_link *l, kv_config_msg *m, uint8_t odd)
{
    static const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES];
    kv_region region;
    kv_region_shape shape = {N_MEDIUM, 1, kv_layout_block_bytes(&l->layout)};
    if (kv_region_format(&region, region_fd, &shape, fingerprint, NULL) != PGD_OK)
        abort();
    for (int32_t i = 0; i < N_MEDIUM / 2; i++)
        kv_region_seal(&region, i, 0, (uint64_t)i % 4, kv_region_get_shard(&region, i, 0));
    kv_region_unmap(&region);
    m->offload_blocks = N_MEDIUM + (odd == 239);
    m->offload_n_ranks = 1;
    (void)snprintf(m->offload_path, sizeof(m->offload_path), "/proc/self/fd/%d",
                   odd == 235 ? 9999 : region_fd);
}

static void *build_kv_config(engine_link *l, size_t *n_bytes)
{
    fuzz_input *in = &l->in;
    kv_config_msg m = {.n_blocks = N_BLOCKS, .max_model_len = MAX_LEN, .layout = l->layout};
    kv_layout *k = &m.layout;
    int32_t *fields[] = {&m.max_model_len,
                         &k->groups[0].kind,
                         &k->groups[0].window,
                         &k->groups[0].block_size,
                         &k->layers[0].group,
                         &k->layers[0].slot,
                         &k->layers[PGD_MAX(k->n_layers - 1, 0)].slot};
    uint8_t odd = fuzz_u8(in);
    int32_t *field = fields[odd % PGD_ARRAY_LEN(fields)];
    *field = fuzz_bend(in, odd, *field);
    if (odd == 250)
        k->page_bytes[0]++;
    if (odd == 251)
        k->n_groups = 1 + k->n_groups % PGD_MAX_KV_GROUPS;
    if (odd == 252 && k->n_layers > 0)
        k->n_layers--;
    l->has_tier = odd < 240 && odd % 4 == 3 && l->layout.n_slots > 0;
    if (l->has_tier)
        add_tier(l, &m, odd);
    return encode(l, n_bytes, WIRE_KV_CONFIG, &control_kv_config_record, &m);
}

static void fill_params(engine_link *l, sampling_params *p)
{
    fuzz_input *in = &l->in;
    uint8_t kind = fuzz_u8(in);
    *p = (sampling_params){.temperature = (kind & 1) != 0 ? 0.7f : 0,
                           .top_p = (kind & 2) != 0 ? 0.5f : 1,
                           .min_p = (kind & 4) != 0 ? 0.1f : 0,
                           .top_k = (kind & 8) != 0 ? fuzz_u8(in) : 0,
                           .repetition_penalty = (kind & 16) != 0 ? 1.2f : 1,
                           .presence_penalty = (kind & 32) != 0 ? -2 : 0,
                           .seed = kind,
                           .n_logprobs = fuzz_below(in, MAX_LOGPROBS + 2) - 1,
                           .stop_ids = l->stop_ids,
                           .logit_bias = l->biases};
    if ((kind & 64) != 0) {
        p->n_stop_ids = 1 + fuzz_below(in, (int32_t)PGD_ARRAY_LEN(l->stop_ids));
        p->min_tokens = fuzz_below(in, 4);
        for (int32_t i = 0; i < p->n_stop_ids; i++)
            l->stop_ids[i] = fuzz_below(in, VOCAB_SIZE + 1);
    }
    if ((kind & 128) != 0) {
        uint32_t bits = fuzz_u32(in);
        p->n_logit_bias = (int32_t)PGD_ARRAY_LEN(l->biases);
        for (int32_t i = 0; i < p->n_logit_bias; i++) {
            l->biases[i] = (logit_bias){fuzz_below(in, VOCAB_SIZE + 1), 5};
            memcpy(&l->biases[i].bias, &bits, sizeof(bits));
        }
    }
}

/* Blocks for tables that grow to n_tokens: any, so that requests overwrite each other's at times; now
 * and then null blocks. */
static void fill_blocks(engine_link *l, block_ids_msg *out, block_id room[][MAX_BLOCKS],
                        int32_t *n_had, int32_t n_tokens)
{
    for (int32_t g = 0; g < l->layout.n_groups; g++) {
        int32_t n = PGD_CEIL_DIV(n_tokens, l->layout.groups[g].block_size) - n_had[g];
        out->ids[g] = room[g];
        out->n_blocks[g] = PGD_MAX(n, 0);
        for (int32_t i = 0; i < n; i++) {
            uint8_t b = fuzz_u8(&l->in);
            room[g][i] = b < 200   ? 1 + (b * l->layout.n_groups + g) % (N_BLOCKS - 1)
                         : b < 240 ? 0
                                   : fuzz_bend(&l->in, b, 1);
        }
        n_had[g] += out->n_blocks[g];
    }
}

static int32_t schedule_new(engine_link *l, scheduler_output *out, int32_t id)
{
    fuzz_input *in = &l->in;
    known *k = &l->requests[id];
    new_request_msg *m = &l->new_requests[out->n_new];
    uint8_t odd = fuzz_u8(in);
    int32_t at = out->n_new++;
    k->is_live = true;
    k->epoch++;
    k->n_tokens = 1 + fuzz_below(in, 40);
    k->n_computed = odd % 8 == 7 ? k->n_tokens / 2 : 0;
    k->n_scheduled = k->n_tokens - k->n_computed;
    if (odd % 4 == 3)
        k->n_scheduled = PGD_MIN(k->n_scheduled, 5);
    for (int32_t i = 0; i < k->n_tokens; i++)
        l->tokens[at][i] = (id * 7 + i) % VOCAB_SIZE;
    *m = (new_request_msg){.request_id = (uint64_t)id,
                           .request_epoch = k->epoch,
                           .n_prompt_tokens = odd % 16 == 8 ? 1 : k->n_tokens,
                           .n_tokens = k->n_tokens,
                           .tokens = l->tokens[at],
                           .n_computed_tokens = k->n_computed,
                           .n_scheduled_tokens = k->n_scheduled};
    fill_params(l, &m->params);
    memset(k->n_blocks, 0, sizeof(k->n_blocks));
    fill_blocks(l, &m->blocks, l->blocks[out->n_new + out->n_cached - 1], k->n_blocks,
                k->n_computed + k->n_scheduled);
    if (odd >= 240) {
        int32_t *fields[] = {&m->n_prompt_tokens,   &m->n_computed_tokens, &m->n_scheduled_tokens,
                             &m->params.top_k,      &m->params.n_logprobs, &m->params.choice_idx,
                             &m->params.min_tokens, &l->tokens[at][0]};
        int32_t *field = fields[fuzz_below(in, (int32_t)PGD_ARRAY_LEN(fields))];
        *field = fuzz_bend(in, odd, *field);
    }
    return m->n_scheduled_tokens;
}

static int32_t schedule_cached(engine_link *l, scheduler_output *out, int32_t id)
{
    fuzz_input *in = &l->in;
    known *k = &l->requests[id];
    cached_request_msg *m = &l->cached[out->n_cached++];
    uint8_t odd = fuzz_u8(in);
    k->n_scheduled = PGD_MAX(k->n_tokens - k->n_computed, 0);
    if (odd % 4 == 3)
        k->n_scheduled = PGD_MIN(k->n_scheduled, 5);
    *m = (cached_request_msg){.request_id = (uint64_t)id,
                              .n_computed_tokens = k->n_computed,
                              .n_scheduled_tokens = k->n_scheduled};
    block_append_msg *append = &l->appends[out->n_appends++];
    append->request_id = (uint64_t)id;
    fill_blocks(l, &append->blocks, l->blocks[out->n_new + out->n_cached - 1], k->n_blocks,
                k->n_computed + k->n_scheduled);
    if (odd >= 240) {
        int32_t *fields[] = {&m->n_computed_tokens, &m->n_scheduled_tokens, &m->n_draft_tokens};
        int32_t *field = fields[fuzz_below(in, (int32_t)PGD_ARRAY_LEN(fields))];
        *field = fuzz_bend(in, odd, *field);
    }
    return m->n_scheduled_tokens;
}

static void fill_transfers(engine_link *l, scheduler_output *out)
{
    fuzz_input *in = &l->in;
    int32_t n = fuzz_below(in, MAX_JOBS + 1);
    out->transfers = l->transfers;
    for (int32_t i = 0; i < n; i++) {
        uint8_t kind = fuzz_u8(in);
        kv_transfer_msg *m = &l->transfers[out->n_transfers++];
        *m = (kv_transfer_msg){.job_id = ++l->n_jobs,
                               .kind = (kv_transfer_kind)(KV_TRANSFER_LOAD + kind % 3),
                               .device_blocks = l->device_blocks[i],
                               .medium_blocks = l->medium_blocks[i],
                               .tags = l->tags[i]};
        if (m->kind == KV_TRANSFER_FLUSH || kind >= 240) /* or an id that may be in use */
            m->job_id -= (uint64_t)(kind / 3 % 4);
        m->n_blocks = m->kind == KV_TRANSFER_FLUSH ? 0 : 1 + kind / 4 % 3;
        for (int32_t k = 0; k < m->n_blocks; k++) {
            uint8_t b = fuzz_u8(in);
            l->device_blocks[i][k] = b < 240 ? 1 + (b + k) % (N_BLOCKS - 1) : fuzz_bend(in, b, 1);
            l->medium_blocks[i][k] = fuzz_bend(in, b >= 232 && b < 240 ? 254 : 0, b % N_MEDIUM);
            l->tags[i][k] = b / 8 % 4;
        }
    }
}

static void *build_step(engine_link *l, size_t *n_bytes)
{
    fuzz_input *in = &l->in;
    uint8_t kind = fuzz_u8(in);
    int32_t n_gone = (kind >> 2) % MAX_GONE;
    int64_t total = 0;
    scheduler_output out = {.step_id = ++l->step_id,
                            .n_groups = l->layout.n_groups,
                            .new_requests = l->new_requests,
                            .cached_requests = l->cached,
                            .appends = l->appends,
                            .finished_ids = l->finished,
                            .preempted_ids = l->preempted,
                            .blocks_to_zero = l->to_zero};
    for (int32_t i = 0; i < N_REQUESTS; i++)
        l->requests[i].n_scheduled = 0;
    for (int32_t i = 0; i < n_gone; i++) {
        uint8_t which = fuzz_u8(in);
        l->requests[which % N_REQUESTS].is_live = false;
        if (which < 128)
            l->finished[out.n_finished++] = which % N_REQUESTS;
        else
            l->preempted[out.n_preempted++] = which % N_REQUESTS;
    }
    for (int32_t i = 0; i < 1 + kind % MAX_SEQS; i++) {
        uint8_t which = fuzz_u8(in);
        int32_t id = which % N_REQUESTS;
        bool as_new = l->requests[id].is_live == (which >= 250); /* seldom the wrong one */
        total += as_new ? schedule_new(l, &out, id) : schedule_cached(l, &out, id);
    }
    for (int32_t i = 0; i < (kind >> 4) % 4; i++)
        l->to_zero[out.n_blocks_to_zero++] = fuzz_bend(in, fuzz_u8(in), 1 + i);
    if (l->has_tier)
        fill_transfers(l, &out);
    uint8_t odd = kind >= 240 ? fuzz_u8(in) : 0;
    out.total_scheduled_tokens = fuzz_bend(in, odd, (int32_t)PGD_MAX(PGD_MIN(total, 100000), 0));
    l->step_is_out = true;
    return encode(l, n_bytes, WIRE_STEP, &scheduler_output_record, &out);
}

static void *build_attach(engine_link *l, size_t *n_bytes)
{
    static const attach_key key;
    attach_msg m = {.max_frame_bytes = 1 << 20};
    uint8_t odd = fuzz_u8(&l->in);
    if (odd == 255)
        return encode(l, n_bytes, WIRE_PING, NULL, NULL);
    l->terms.worker_epoch = EPOCH;
    l->terms.max_frame_bytes = m.max_frame_bytes;
    memset(l->terms.engine_nonce, 0x77, sizeof(l->terms.engine_nonce));
    memcpy(m.nonce, l->terms.engine_nonce, sizeof(m.nonce));
    if (attach_prove(m.proof, &key, ATTACH_ENGINE, &l->terms) != PGD_OK)
        abort();
    void *frame = encode(l, n_bytes, WIRE_ATTACH, &control_attach_record, &m);
    if (odd >= 240)
        ((uint8_t *)frame)[fuzz_u32(&l->in) % *n_bytes] ^= odd;
    return frame;
}

/* --- the link --------------------------------------------------------------------------------- */

pgd_err engine_link_listen(engine_link **out, const char *url, size_t max_recv_bytes, pgd_why *why)
{
    (void)out;
    (void)url;
    (void)max_recv_bytes;
    return pgd_fail(why, PGD_EUNSUPPORTED, "not in this program");
}

bool engine_link_wait(engine_link *l, int timeout_ms)
{
    (void)l;
    (void)timeout_ms;
    return false;
}

void engine_link_close(engine_link *l)
{
    (void)l;
}

pgd_err engine_link_adopt(engine_link *l, uint32_t worker_epoch, size_t max_recv_bytes)
{
    (void)l;
    PGD_ASSERT(worker_epoch == EPOCH && max_recv_bytes == 1 << 20); /* proved */
    return PGD_OK;
}

pgd_err engine_link_recv_within(engine_link *l, engine_frame *out, int timeout_ms, pgd_why *why)
{
    wire_header h;
    (void)timeout_ms;
    if (l->told_error)
        return PGD_ECLOSED;
    size_t n_bytes;
    void *frame = build_attach(l, &n_bytes);
    PGD_TRY(wire_decode_header(&h, frame, n_bytes, why));
    *out = (engine_frame){h.type, h.worker_epoch, frame, n_bytes};
    return PGD_OK;
}

/* Loads and stores of the step as the worker will read it. */
static int32_t count_sent(const engine_link *l, const void *frame, size_t n_bytes)
{
    static uint64_t room[1 << 15];
    wire_scratch scratch = {.data = (uint8_t *)room, .cap_bytes = sizeof(room)};
    scheduler_output out;
    int32_t n = 0;
    if (scheduler_output_decode(&out, &scratch, frame, n_bytes, &l->limits, NULL) != PGD_OK)
        return 0;
    for (int32_t i = 0; i < out.n_transfers; i++)
        n += out.transfers[i].kind != KV_TRANSFER_FLUSH;
    return n;
}

/* Frame 0 is load, frame 1 the KV configuration, then steps come; now and then something else, or a
 * frame with damaged bytes. */
static void *next_frame(engine_link *l, size_t *n_bytes)
{
    fuzz_input *in = &l->in;
    uint8_t kind = fuzz_u8(in);
    int n = l->n_frames;
    if (kind == 255)
        return encode(l, n_bytes, WIRE_PING, NULL, NULL);
    if (kind == 254) {
        l->sent_shutdown = true;
        return encode(l, n_bytes, WIRE_SHUTDOWN, NULL, NULL);
    }
    if (kind == 239) {
        log_level_msg m = {.level = LOG_ERROR};
        return encode(l, n_bytes, WIRE_LOG_LEVEL, &control_log_level_record, &m);
    }
    if (kind == 253) {
        error_msg m = {.err = PGD_EPROTO, .is_fatal = 1, .text = "no"};
        l->told_error = true;
        return encode(l, n_bytes, WIRE_ERROR, &control_error_record, &m);
    }
    l->n_frames++;
    n += kind == 252; /* out of turn */
    void *frame = n == 0   ? build_load(l, n_bytes)
                  : n == 1 ? build_kv_config(l, n_bytes)
                           : build_step(l, n_bytes);
    /* Damaged sizes could ask for gigabytes, or for a minute's sleep per step. */
    for (int i = 0; kind >= 240 && kind < 252 && n > 1 && i <= kind - 240; i++)
        ((uint8_t *)frame)[fuzz_u32(in) % *n_bytes] ^= fuzz_u8(in);
    if (n > 1 && l->has_tier)
        l->n_sent = count_sent(l, frame, *n_bytes);
    return frame;
}

pgd_err engine_link_recv(engine_link *l, engine_frame *out, pgd_why *why)
{
    wire_header h;
    PGD_ASSERT(!l->step_is_out); /* the step before was answered */
    for (;;) {
        if (!fuzz_more(&l->in) || l->n_frames >= MAX_FRAMES)
            return PGD_ECLOSED;
        size_t n_bytes;
        void *frame = next_frame(l, &n_bytes);
        PGD_TRY(wire_decode_header(&h, frame, n_bytes, why));
        *out = (engine_frame){h.type, h.worker_epoch, frame, n_bytes};
        if (h.worker_epoch == EPOCH)
            return PGD_OK;
        l->step_is_out = false; /* dropped */
        l->n_sent = 0;
    }
}

/* Transfers of the step that is answered have been taken up. Mostly the engine hears of their end
 * before it goes on, so that an input does the same in every run. */
static void count_transfers(engine_link *l)
{
    l->n_pending += l->n_sent;
    l->n_sent = 0;
    while (l->n_pending > 0 && l->step_id % 8 != 7)
        pthread_cond_wait(&l->ended, &l->mutex);
}

/* The tokens that the result brings are the engine's knowledge from now on. */
static void take_result(engine_link *l, const void *frame, size_t n_bytes)
{
    step_result r;
    pgd_why why = {{0}};
    PGD_ASSERTF(step_result_decode(&r, &l->scratch, frame, n_bytes, &l->limits, &why) == PGD_OK,
                "%s", why.text);
    PGD_ASSERT(l->step_is_out);
    l->step_is_out = false;
    pthread_mutex_lock(&l->mutex);
    count_transfers(l);
    pthread_mutex_unlock(&l->mutex);
    for (int32_t i = 0; i < N_REQUESTS; i++)
        l->requests[i].n_computed += l->requests[i].n_scheduled;
    for (int32_t i = 0; i < r.n_results; i++) {
        uint64_t id = r.results[i].request_id;
        if (id < N_REQUESTS)
            l->requests[id].n_tokens += r.results[i].n_tokens;
    }
}

/* What the engine would answer. */
static void take_layers(engine_link *l, const load_done_msg *m)
{
    static kv_groups groups;
    pgd_why why = {{0}};
    kv_groups_opts opts = {.block_size = BLOCK_SIZE, .is_hybrid = l->is_hybrid};
    PGD_ASSERTF(kv_groups_init(&groups, m->kv_layers, m->n_kv_layers, &opts, &why) == PGD_OK, "%s",
                why.text);
    l->layout = groups.layout;
    kv_layout_fill_limits(&l->limits, &l->layout);
}

static void take_done(engine_link *l, const void *frame, size_t n_bytes)
{
    transfers_done_msg m;
    pgd_why why = {{0}};
    PGD_ASSERTF(control_decode_transfers_done(&m, frame, n_bytes, &why) == PGD_OK, "%s", why.text);
    pthread_mutex_lock(&l->mutex);
    for (int32_t i = 0; i < m.n_done; i++)
        PGD_ASSERT(m.done[i].n_good <= 3);
    l->n_pending -= m.n_done;
    pthread_cond_signal(&l->ended);
    pthread_mutex_unlock(&l->mutex);
}

/* What the worker sends must be what an engine accepts. From its main thread, but for
 * transfers_done. */
pgd_err engine_link_send(engine_link *l, wire_type type, const wire_record *rec, const void *msg,
                         bool wait)
{
    size_t n_bytes = wire_frame_bytes(rec, msg);
    void *frame = malloc(n_bytes);
    pgd_why why = {{0}};
    if (frame == NULL)
        abort();
    wire_encode(frame, n_bytes, type, EPOCH, rec, msg);
    (void)wait;
    if (type == WIRE_TRANSFERS_DONE) {
        take_done(l, frame, n_bytes);
    } else if (type == WIRE_RESULT) {
        take_result(l, frame, n_bytes);
    } else if (type == WIRE_CHALLENGE) {
        challenge_msg m;
        PGD_ASSERTF(control_decode_challenge(&m, frame, n_bytes, &why) == PGD_OK, "%s", why.text);
        memcpy(l->terms.worker_nonce, m.nonce, sizeof(m.nonce));
    } else if (type == WIRE_LOAD_DONE) {
        load_done_msg m;
        PGD_ASSERTF(control_decode_load_done(&m, frame, n_bytes, &why) == PGD_OK, "%s", why.text);
        l->limits.vocab_size = m.vocab_size;
        take_layers(l, &m);
        PGD_ASSERT(wire_limits_derive(&l->limits, &why) == PGD_OK);
    } else if (type == WIRE_ERROR) {
        error_msg m;
        PGD_ASSERTF(control_decode_error(&m, frame, n_bytes, &why) == PGD_OK, "%s", why.text);
        PGD_ASSERT(m.is_fatal > 0 && m.text[0] != '\0');
        l->told_error = true;
        l->step_is_out = false;
    }
    free(frame);
    return PGD_OK;
}

/* The same nonce in every run, so that an input does the same in every run. */
ssize_t getrandom(void *out, size_t n_bytes, unsigned flags)
{
    (void)flags;
    memset(out, 0x5a, n_bytes);
    return (ssize_t)n_bytes;
}

/* --- runs ------------------------------------------------------------------------------------- */

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fuzz_quiet();
    make_model();
    region_fd = memfd_create("fuzz_region", MFD_CLOEXEC);
    if (region_fd < 0)
        abort();
    return setenv("PGD_CPU_ISA", "ref", 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static engine_link l;
    static uint64_t room[1 << 13];
    static uint64_t last_step_id;
    static const attach_key key;
    pgd_why why = {{0}};
    step_runner *runner;
    fuzz_quiet(); /* the last run's worker may have been told to speak */
    memset(&l, 0, sizeof(l));
    pthread_mutex_init(&l.mutex, NULL);
    pthread_cond_init(&l.ended, NULL);
    l.in = (fuzz_input){data, n_bytes, 0};
    l.scratch = (wire_scratch){.data = (uint8_t *)room, .cap_bytes = sizeof(room)};
    l.limits = (wire_limits){.max_num_seqs = MAX_SEQS,
                             .max_num_batched_tokens = MAX_BATCHED,
                             .max_model_len = MAX_LEN,
                             .vocab_size = 1,
                             .n_blocks = N_BLOCKS,
                             .n_groups = 1,
                             .block_sizes = {BLOCK_SIZE},
                             .max_logprobs = PGD_MAX_LOGPROBS};
    bool use_model = fuzz_u8(&l.in) % 4 == 0;
    if ((use_model ? model_runner_create(&runner, "cpu", &why)
                   : sim_runner_create(&runner, &why)) != PGD_OK)
        PGD_PANIC("%s", why.text);
    worker_loop_opts opts = {.link = &l,
                             .runner = runner,
                             .device = use_model ? "cpu" : "sim",
                             .last_step_id = &last_step_id};
    pgd_err err = handshake_run(opts.proof, &l, &key, 1, &why);
    if (err == PGD_OK)
        err = worker_loop_run(&opts, &why);
    PGD_ASSERT(err != PGD_OK || l.sent_shutdown);
    PGD_ASSERT(err == PGD_OK || err == PGD_ECLOSED || why.text[0] != '\0' || l.told_error);
    runner->vtbl->destroy(runner);
    pthread_cond_destroy(&l.ended);
    pthread_mutex_destroy(&l.mutex);
    free(l.frame);
    return 0;
}
