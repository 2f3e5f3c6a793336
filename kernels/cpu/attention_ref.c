/* Paged attention in double, one (row, head) at a time: the oracle, and the path of last resort.
 *
 * A split of ATTENTION_SPLIT keys gives (maximum m, sum l, weighted values acc); splits are folded
 * left to right: m' = max(m, m_s), l' = l exp(m - m') + l_s exp(m_s - m'), acc likewise. A sink is
 * a key without a value: it starts the fold with m = sink, l = 1. */
#include "kernels/attention.h"

#include <math.h>

#include "kernels/cpu/cpu_split.h"

typedef struct partial {
    double m;
    double l;
    double acc[KV_PAGE_MAX_HEAD_DIM];
} partial;

typedef struct job {
    const attention_args *args;
    cpu_pool *pool;
} job;

static double load(const void *page, size_t elem, dtype type)
{
    switch (type) {
    case DTYPE_F32:
        return ((const float *)page)[elem];
    case DTYPE_F16:
        return dtype_f16_to_f32(((const uint16_t *)page)[elem]);
    default:
        return dtype_bf16_to_f32(((const uint16_t *)page)[elem]);
    }
}

static const void *find_page(const attention_args *a, const block_id *table, int32_t key)
{
    return (const uint8_t *)a->pages +
           (size_t)table[key / a->kv.block_size] * kv_page_bytes(&a->kv);
}

static double score(const attention_args *a, const float *q, const block_id *table, int32_t kv_head,
                    int32_t key)
{
    const void *page = find_page(a, table, key);
    size_t at = kv_page_k_elem(&a->kv, kv_head) + (size_t)(key % a->kv.block_size);
    double dot = 0;
    for (int32_t i = 0; i < a->kv.head_dim; i++)
        dot += (double)q[i] * load(page, at + (size_t)i * (size_t)a->kv.block_size, a->kv.type);
    double z = a->scale * dot;
    return a->soft_cap > 0 ? a->soft_cap * tanh(z / a->soft_cap) : z;
}

/* Keys [first, last) of one split. */
static void attend_split(partial *out, const attention_args *a, const float *q,
                         const block_id *table, int32_t kv_head, int32_t first, int32_t last)
{
    double z[ATTENTION_SPLIT];
    out->m = -INFINITY;
    for (int32_t j = first; j < last; j++) {
        z[j - first] = score(a, q, table, kv_head, j);
        /* fmax would drop a NaN; this keeps it. */
        out->m = z[j - first] <= out->m ? out->m : z[j - first];
    }
    out->l = 0;
    for (int32_t i = 0; i < a->kv.head_dim; i++)
        out->acc[i] = 0;
    for (int32_t j = first; j < last; j++) {
        const void *page = find_page(a, table, j);
        size_t at = kv_page_v_elem(&a->kv, kv_head) +
                    (size_t)(j % a->kv.block_size) * (size_t)a->kv.head_dim;
        double p = exp(z[j - first] - out->m);
        out->l += p;
        for (int32_t i = 0; i < a->kv.head_dim; i++)
            out->acc[i] += p * load(page, at + (size_t)i, a->kv.type);
    }
}

static void fold(partial *into, const partial *part, int32_t head_dim)
{
    double m = part->m <= into->m ? into->m : part->m;
    double keep = exp(into->m - m), add = exp(part->m - m);
    into->l = into->l * keep + part->l * add;
    for (int32_t i = 0; i < head_dim; i++)
        into->acc[i] = into->acc[i] * keep + part->acc[i] * add;
    into->m = m;
}

static void attend(const attention_args *a, int32_t seq, int32_t row, int32_t head)
{
    int32_t head_dim = a->kv.head_dim;
    int32_t pos =
        a->n_keys ? a->n_keys[seq] - 1 : a->n_context[seq] - (a->query_start[seq + 1] - row);
    int32_t first = a->window > 0 && pos >= a->window ? pos - a->window + 1 : 0;
    if (a->chunk > 0)
        first = PGD_MAX(first, pos - pos % a->chunk);
    const block_id *table = a->block_table + (int64_t)a->seq_row[seq] * a->block_table_stride;
    const float *q = a->q + (int64_t)row * a->q_stride + (int64_t)head * head_dim;
    partial total, part;
    bool is_empty = true;
    if (a->sinks) {
        total.m = a->sinks[head];
        total.l = 1;
        for (int32_t i = 0; i < head_dim; i++)
            total.acc[i] = 0;
        is_empty = false;
    }
    for (int32_t split = first / ATTENTION_SPLIT; split <= pos / ATTENTION_SPLIT; split++) {
        int32_t begin = PGD_MAX(first, split * ATTENTION_SPLIT);
        int32_t end = PGD_MIN(pos + 1, (split + 1) * ATTENTION_SPLIT);
        attend_split(is_empty ? &total : &part, a, q, table, head / (a->n_heads / a->kv.n_kv_heads),
                     begin, end);
        if (!is_empty)
            fold(&total, &part, head_dim);
        is_empty = false;
    }
    float *out = a->out + (int64_t)row * a->out_stride + (int64_t)head * head_dim;
    for (int32_t i = 0; i < head_dim; i++)
        out[i] = (float)(total.acc[i] / total.l);
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const job *jb = arg;
    const attention_args *a = jb->args;
    (void)thread_idx;
    int64_t n_items = (int64_t)a->query_start[a->n_seqs] * a->n_heads;
    int64_t first = 0, last = n_items;
    int32_t seq = 0;
    while (n_threads == 1 || cpu_pool_next(jb->pool, n_items, a->n_heads, &first, &last)) {
        for (int64_t i = first; i < last; i++) {
            int32_t row = (int32_t)(i / a->n_heads);
            while (row >= a->query_start[seq + 1])
                seq++; /* a thread's items only ever go up */
            attend(a, seq, row, (int32_t)(i % a->n_heads));
        }
        if (n_threads == 1)
            break;
    }
}

pgd_err attention_ref(const attention_args *args, kernel_ctx *ctx)
{
    int64_t width = (int64_t)args->n_heads * args->kv.head_dim;
    if (!kv_page_layout_is_valid(&args->kv) || args->n_seqs < 0 || args->n_heads < 1 ||
        args->n_heads % args->kv.n_kv_heads != 0 || args->q_stride < width ||
        args->out_stride < width || args->window < 0 || args->chunk < 0 ||
        (args->n_keys && (args->window > 0 || args->chunk > 0)) || !(args->soft_cap >= 0))
        return PGD_EINVAL;
    if (args->n_seqs == 0)
        return PGD_OK;
    job jb = {.args = args, .pool = ctx->pool};
    cpu_split_run(ctx, run, &jb, args->query_start[args->n_seqs] * width * 16);
    return PGD_OK;
}

size_t attention_ref_workspace_bytes(const attention_limits *limits)
{
    (void)limits;
    return 0;
}
