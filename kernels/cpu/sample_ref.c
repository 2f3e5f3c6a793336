/* Sampling in plain code: the oracle, and the path of last resort.
 *
 * Greedy rows without bias, mask or penalties take one pass over the logits. Rows with top_k or
 * top_p order their candidates lazily: a heap is built in linear time and only as many candidates
 * are taken off it as survive. All others are one pass with a running maximum. Penalty counts are
 * rebuilt from the row's tokens each time, so that no state is kept between steps. */
#include "kernels/sample.h"

#include "kernels/cpu/sample_internal.h"

typedef struct job {
    const sample_args *args;
    kernel_ctx *ctx;
    sample_one_fn sample_one;
} job;

static bool all_finite(const float *x, int32_t n)
{
    float sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += x[i] * 0; /* NaN as soon as one is NaN or infinite */
    return sum == 0;
}

static int32_t arg_max(const float *z, int32_t n)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        best = z[i] > z[best] ? i : best;
    return best;
}

static int32_t build_heap(int32_t *heap, const float *z, int32_t vocab_size)
{
    int32_t n = 0;
    for (int32_t id = 0; id < vocab_size; id++) {
        if (z[id] > -INFINITY)
            heap[n++] = id;
    }
    sample__make_heap(heap, n, z);
    return n;
}

/* Takes candidates off the heap in order; all that top_k and top_p leave are offered. */
static void choose_ordered(sample_chooser *c, int32_t *heap, const float *z, int32_t vocab_size)
{
    const sample_row *r = c->row;
    int32_t n_heap = build_heap(heap, z, vocab_size);
    int32_t n_total = n_heap;
    bool has_top_k = r->top_k > 0 && r->top_k < n_total;
    double mass = 0;
    if (has_top_k) {
        for (int32_t i = 0; i < r->top_k; i++)
            mass += exp(sample__scaled(c, z[sample__pop_heap(heap, &n_heap, z)]));
    } else {
        for (int32_t id = 0; id < vocab_size; id++)
            mass += exp(sample__scaled(c, z[id]));
    }
    int32_t n_keep = has_top_k ? r->top_k : n_total;
    double reached = 0;
    for (int32_t i = 0; i < n_keep; i++) {
        if (i >= n_total - n_heap)
            (void)sample__pop_heap(heap, &n_heap, z);
        token_id id = heap[n_total - 1 - i];
        sample__offer(c, id, z[id]);
        reached += exp(sample__scaled(c, z[id]));
        if (r->top_p < 1 && reached >= r->top_p * mass)
            break;
    }
}

static token_id choose(sample_scratch *s, const sample_row *r, const float *z, int32_t vocab_size)
{
    int32_t top = arg_max(z, vocab_size);
    if (!(z[top] > -INFINITY))
        return -1;
    if (r->temperature < SAMPLE_MIN_TEMPERATURE)
        return top;
    sample_chooser c = {.row = r, .z_max = z[top], .best_id = -1};
    if (r->top_k > 0 || r->top_p < 1) {
        choose_ordered(&c, s->heap, z, vocab_size);
    } else {
        for (int32_t id = 0; id < vocab_size; id++) {
            if (z[id] > -INFINITY)
                sample__offer(&c, id, z[id]);
        }
    }
    return c.best_id;
}

static void fill_logprobs(sample_row *r, int32_t vocab_size)
{
    const float *x = r->logits;
    double x_max = x[arg_max(x, vocab_size)], sum = 0;
    for (int32_t i = 0; i < vocab_size; i++)
        sum += exp(x[i] - x_max);
    double log_sum = x_max + log(sum);
    r->logprobs[0] = (sample_logprob){r->token, (float)(x[r->token] - log_sum)};
    /* Insertion into a short descending list; equal logits keep the order of ids. */
    sample_logprob *best = r->logprobs + 1;
    int32_t n = 0;
    for (int32_t id = 0; r->n_logprobs > 0 && id < vocab_size; id++) {
        if (n == r->n_logprobs && !(x[id] > x[best[n - 1].id]))
            continue;
        int32_t at = n < r->n_logprobs ? n++ : n - 1;
        for (; at > 0 && x[id] > x[best[at - 1].id]; at--)
            best[at] = best[at - 1];
        best[at].id = id;
    }
    for (int32_t i = 0; i < n; i++)
        best[i].logprob = (float)(x[best[i].id] - log_sum);
}

static void sample_one(sample_scratch *s, sample_row *r, int32_t vocab_size)
{
    r->error = SAMPLE_OK;
    if (!all_finite(r->logits, vocab_size)) {
        r->token = -1;
        r->error = SAMPLE_ERROR_NOT_FINITE;
        return;
    }
    if (!r->has_token)
        r->token = choose(s, r, sample__adjust(s, r, vocab_size), vocab_size);
    if (r->token < 0)
        r->error = SAMPLE_ERROR_ALL_MASKED;
    else if (r->n_logprobs >= 0)
        fill_logprobs(r, vocab_size);
}

/* --- op, of all CPU levels --- */

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const job *jb = arg;
    const sample_args *a = jb->args;
    size_t step = sample__array_bytes(a->vocab_size);
    uint8_t *base = (uint8_t *)jb->ctx->workspace + (size_t)thread_idx * 3 * step;
    sample_scratch s = {.z = (float *)(void *)base,
                        .counts = (int32_t *)(void *)(base + step),
                        .heap = (int32_t *)(void *)(base + 2 * step)};
    int64_t first = 0, last = a->n_rows;
    while (n_threads == 1 || cpu_pool_next(jb->ctx->pool, a->n_rows, 1, &first, &last)) {
        for (int64_t i = first; i < last; i++)
            jb->sample_one(&s, &a->rows[i], a->vocab_size);
        if (n_threads == 1)
            break;
    }
}

size_t sample__array_bytes(int32_t vocab_size)
{
    return PGD_ROUND_UP((size_t)vocab_size * 4, 64);
}

pgd_err sample__run(const sample_args *args, kernel_ctx *ctx, sample_one_fn fn)
{
    if (args->n_rows < 0 || args->vocab_size < 1)
        return PGD_EINVAL;
    int32_t n_threads = ctx->pool ? cpu_pool_n_threads(ctx->pool) : 1;
    if (ctx->workspace_bytes < sample_ref_workspace_bytes(args->vocab_size, n_threads))
        return PGD_EINVAL;
    job jb = {.args = args, .ctx = ctx, .sample_one = fn};
    /* One row cannot be shared: a pool of more threads is of no use to it. */
    cpu_split_run(ctx, run, &jb, args->n_rows > 1 ? (int64_t)args->n_rows * args->vocab_size : 0);
    return PGD_OK;
}

pgd_err sample_ref(const sample_args *args, kernel_ctx *ctx)
{
    return sample__run(args, ctx, sample_one);
}

size_t sample_ref_workspace_bytes(int32_t vocab_size, int32_t n_threads)
{
    return (size_t)n_threads * 3 * sample__array_bytes(vocab_size);
}
