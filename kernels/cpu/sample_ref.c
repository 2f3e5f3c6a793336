/* Sampling in plain code: the oracle, and the path of last resort.
 *
 * Greedy rows without bias, mask or penalties take one pass over the logits. Rows with top_k or
 * top_p order their candidates lazily: a heap is built in linear time and only as many candidates
 * are taken off it as survive. All others are one pass with a running maximum. Penalty counts are
 * rebuilt from the row's tokens each time, so that no state is kept between steps. */
#include "kernels/sample.h"

#include <math.h>

#include "kernels/cpu/cpu_split.h"

/* One thread's part of the workspace. */
typedef struct scratch {
    float *z;        /* [vocab_size] adjusted logits */
    int32_t *counts; /* [vocab_size] only entries of the row's tokens are ever set */
    int32_t *heap;   /* [vocab_size] candidate ids */
} scratch;

typedef struct job {
    const sample_args *args;
    kernel_ctx *ctx;
    size_t thread_bytes;
} job;

static size_t array_bytes(int32_t vocab_size)
{
    return PGD_ROUND_UP((size_t)vocab_size * 4, 64);
}

static bool all_finite(const float *x, int32_t n)
{
    float sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += x[i] * 0; /* NaN as soon as one is NaN or infinite */
    return sum == 0;
}

static bool has_penalties(const sample_row *r)
{
    return r->repetition_penalty != 1 || r->presence_penalty != 0 || r->frequency_penalty != 0;
}

static void apply_penalties(float *z, int32_t *counts, const sample_row *r)
{
    for (int32_t i = 0; i < r->n_tokens; i++)
        counts[r->tokens[i]] = 0;
    for (int32_t i = r->n_prompt_tokens; i < r->n_tokens; i++)
        counts[r->tokens[i]]++;
    for (int32_t i = 0; i < r->n_tokens; i++) {
        token_id id = r->tokens[i];
        if (counts[id] < 0)
            continue; /* done */
        if (r->repetition_penalty != 1)
            z[id] = z[id] > 0 ? z[id] / r->repetition_penalty : z[id] * r->repetition_penalty;
        if (counts[id] > 0)
            z[id] -= r->frequency_penalty * (float)counts[id] + r->presence_penalty;
        counts[id] = -1;
    }
}

static void adjust(scratch *s, const sample_row *r, int32_t vocab_size)
{
    for (int32_t i = 0; i < vocab_size; i++)
        s->z[i] = r->logits[i];
    for (int32_t i = 0; i < r->n_bias; i++)
        s->z[r->bias[i].id] += r->bias[i].bias;
    for (int32_t i = 0; i < r->n_masked_ids; i++)
        s->z[r->masked_ids[i]] = -INFINITY;
    if (has_penalties(r))
        apply_penalties(s->z, s->counts, r);
}

static int32_t arg_max(const float *z, int32_t n)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        best = z[i] > z[best] ? i : best;
    return best;
}

/* --- candidates in descending order ------------------------------------------------------------
 */

static bool comes_before(const float *z, int32_t a, int32_t b)
{
    return z[a] > z[b] || (z[a] == z[b] && a < b);
}

static void sift_down(int32_t *heap, int32_t n, int32_t at, const float *z)
{
    for (int32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && comes_before(z, heap[child + 1], heap[child]))
            child++;
        if (!comes_before(z, heap[child], heap[at]))
            return;
        int32_t swap = heap[at];
        heap[at] = heap[child];
        heap[child] = swap;
    }
}

static int32_t build_heap(int32_t *heap, const float *z, int32_t vocab_size)
{
    int32_t n = 0;
    for (int32_t id = 0; id < vocab_size; id++) {
        if (z[id] > -INFINITY)
            heap[n++] = id;
    }
    for (int32_t at = n / 2 - 1; at >= 0; at--)
        sift_down(heap, n, at, z);
    return n;
}

static int32_t pop_heap(int32_t *heap, int32_t *n, const float *z)
{
    int32_t top = heap[0];
    heap[0] = heap[--*n];
    sift_down(heap, *n, 0, z);
    /* The freed slot behind the heap keeps what was taken: heap[n ..) holds the taken ids, last
     * taken first. */
    heap[*n] = top;
    return top;
}

/* --- random choice ------------------------------------------------------------------------------
 */

typedef struct chooser {
    const sample_row *row;
    double z_max;
    double best_key;
    token_id best_id;
    uint32_t block_idx; /* id >> 2 of the words at hand */
    bool has_block;
    uint32_t words[4];
} chooser;

static double gumbel(chooser *c, token_id id)
{
    uint32_t block = (uint32_t)id >> 2;
    if (!c->has_block || block != c->block_idx) {
        const sample_row *r = c->row;
        uint32_t key[2] = {(uint32_t)r->seed, (uint32_t)(r->seed >> 32)};
        uint32_t counter[4] = {block, (uint32_t)(r->n_tokens - r->n_prompt_tokens),
                               (uint32_t)r->choice_idx, 0};
        sample_philox(c->words, key, counter);
        c->block_idx = block;
        c->has_block = true;
    }
    double u = (c->words[(uint32_t)id & 3] + 0.5) * 0x1p-32;
    return -log(-log1p(-u));
}

static double scaled(const chooser *c, float z)
{
    return ((double)z - c->z_max) / c->row->temperature;
}

static void offer(chooser *c, token_id id, float z)
{
    double y = scaled(c, z);
    if (c->row->min_p > 0 && !(exp(y) >= c->row->min_p))
        return;
    double key = y + gumbel(c, id);
    if (c->best_id < 0 || key > c->best_key || (key == c->best_key && id < c->best_id)) {
        c->best_id = id;
        c->best_key = key;
    }
}

/* Takes candidates off the heap in order; all that top_k and top_p leave are offered. */
static void choose_ordered(chooser *c, scratch *s, int32_t vocab_size)
{
    const sample_row *r = c->row;
    int32_t n_heap = build_heap(s->heap, s->z, vocab_size);
    int32_t n_total = n_heap;
    bool has_top_k = r->top_k > 0 && r->top_k < n_total;
    double mass = 0;
    if (has_top_k) {
        for (int32_t i = 0; i < r->top_k; i++)
            mass += exp(scaled(c, s->z[pop_heap(s->heap, &n_heap, s->z)]));
    } else {
        for (int32_t id = 0; id < vocab_size; id++)
            mass += exp(scaled(c, s->z[id]));
    }
    int32_t n_keep = has_top_k ? r->top_k : n_total;
    double reached = 0;
    for (int32_t i = 0; i < n_keep; i++) {
        if (i >= n_total - n_heap)
            (void)pop_heap(s->heap, &n_heap, s->z);
        token_id id = s->heap[n_total - 1 - i];
        offer(c, id, s->z[id]);
        reached += exp(scaled(c, s->z[id]));
        if (r->top_p < 1 && reached >= r->top_p * mass)
            break;
    }
}

static token_id choose(scratch *s, const sample_row *r, const float *z, int32_t vocab_size)
{
    int32_t top = arg_max(z, vocab_size);
    if (!(z[top] > -INFINITY))
        return -1;
    if (r->temperature < SAMPLE_MIN_TEMPERATURE)
        return top;
    chooser c = {.row = r, .z_max = z[top], .best_id = -1};
    if (r->top_k > 0 || r->top_p < 1) {
        if (z != s->z) {
            for (int32_t i = 0; i < vocab_size; i++)
                s->z[i] = z[i];
        }
        choose_ordered(&c, s, vocab_size);
    } else {
        for (int32_t id = 0; id < vocab_size; id++) {
            if (z[id] > -INFINITY)
                offer(&c, id, z[id]);
        }
    }
    return c.best_id;
}

/* --- log probabilities
 * ---------------------------------------------------------------------------- */

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

static void sample_one(scratch *s, sample_row *r, int32_t vocab_size)
{
    r->token = -1;
    r->error = SAMPLE_OK;
    if (!all_finite(r->logits, vocab_size)) {
        r->error = SAMPLE_ERROR_NOT_FINITE;
        return;
    }
    const float *z = r->logits;
    if (r->n_bias > 0 || r->n_masked_ids > 0 || has_penalties(r)) {
        adjust(s, r, vocab_size);
        z = s->z;
    }
    r->token = choose(s, r, z, vocab_size);
    if (r->token < 0)
        r->error = SAMPLE_ERROR_ALL_MASKED;
    else if (r->n_logprobs >= 0)
        fill_logprobs(r, vocab_size);
}

static void run(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const job *jb = arg;
    const sample_args *a = jb->args;
    size_t step = array_bytes(a->vocab_size);
    uint8_t *base = (uint8_t *)jb->ctx->workspace + (size_t)thread_idx * jb->thread_bytes;
    scratch s = {.z = (float *)base,
                 .counts = (int32_t *)(base + step),
                 .heap = (int32_t *)(base + 2 * step)};
    int64_t first = 0, last = a->n_rows;
    while (n_threads == 1 || cpu_pool_next(jb->ctx->pool, a->n_rows, 1, &first, &last)) {
        for (int64_t i = first; i < last; i++)
            sample_one(&s, &a->rows[i], a->vocab_size);
        if (n_threads == 1)
            break;
    }
}

pgd_err sample_ref(const sample_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->vocab_size < 1)
        return PGD_EINVAL;
    int32_t n_threads = ctx->pool ? cpu_pool_n_threads(ctx->pool) : 1;
    if (ctx->workspace_bytes < sample_ref_workspace_bytes(args->vocab_size, n_threads))
        return PGD_EINVAL;
    job jb = {.args = args, .ctx = ctx, .thread_bytes = 3 * array_bytes(args->vocab_size)};
    /* One row cannot be shared: a pool of more threads is of no use to it. */
    cpu_split_run(ctx, run, &jb, args->n_rows > 1 ? (int64_t)args->n_rows * args->vocab_size : 0);
    return PGD_OK;
}

size_t sample_ref_workspace_bytes(int32_t vocab_size, int32_t n_threads)
{
    return (size_t)n_threads * 3 * array_bytes(vocab_size);
}
