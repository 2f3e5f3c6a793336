/* Routing and sums of a mixture of experts in double.
 *
 * Rows are routed by the pool's threads, each for itself; the order by expert is a counting sort on
 * one thread, a few microseconds for a full step. While rows are routed, places holds expert ids.
 */
#include "kernels/moe.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu_split.h"

static bool is_larger(float a, float b)
{
    return a > b || (isnan(a) && !isnan(b));
}

/* The ids of the n_chosen largest logits in order, by insertion: most are below the last one. */
static void choose(int32_t *ids, const float *logits, int32_t n_experts, int32_t n_chosen)
{
    int32_t n = 0;
    for (int32_t e = 0; e < n_experts; e++) {
        if (n == n_chosen && !is_larger(logits[e], logits[ids[n - 1]]))
            continue;
        int32_t at = n < n_chosen ? n++ : n - 1;
        for (; at > 0 && is_larger(logits[e], logits[ids[at - 1]]); at--)
            ids[at] = ids[at - 1];
        ids[at] = e;
    }
}

static void weigh(float *weights, const int32_t *ids, const float *logits, const moe_route_args *a)
{
    if (a->gate == MOE_GATE_SIGMOID) {
        for (int32_t r = 0; r < a->n_chosen; r++)
            weights[r] = (float)(1 / (1 + exp(-(double)logits[ids[r]])));
        return;
    }
    double max = logits[ids[0]];
    double sum = 0;
    if (a->gate == MOE_GATE_SOFTMAX_ALL) {
        for (int32_t e = 0; e < a->n_experts; e++)
            sum += exp(logits[e] - max);
    } else {
        for (int32_t r = 0; r < a->n_chosen; r++)
            sum += exp(logits[ids[r]] - max);
    }
    for (int32_t r = 0; r < a->n_chosen; r++)
        weights[r] = (float)(exp(logits[ids[r]] - max) / sum);
}

static void route_rows(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const moe_route_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        const float *logits = a->logits + t * a->logits_stride;
        int32_t *ids = a->places + t * a->n_chosen;
        choose(ids, logits, a->n_experts, a->n_chosen);
        weigh(a->weights + t * a->n_chosen, ids, logits, a);
    }
}

/* Expert ids become places. */
static void sort_by_expert(const moe_route_args *a)
{
    int64_t n_copies = (int64_t)a->n_rows * a->n_chosen;
    int32_t *start = a->group_start;
    memset(start, 0, ((size_t)a->n_experts + 1) * sizeof(*start));
    for (int64_t i = 0; i < n_copies; i++)
        start[a->places[i] + 1]++;
    for (int32_t e = 0; e < a->n_experts; e++)
        start[e + 1] += start[e];
    for (int64_t i = 0; i < n_copies; i++)
        a->places[i] = start[a->places[i]]++;
    /* Each start is now the next one's. */
    memmove(start + 1, start, (size_t)a->n_experts * sizeof(*start));
    start[0] = 0;
}

pgd_err moe_route_ref(const moe_route_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->n_chosen < 1 || args->n_chosen > args->n_experts ||
        args->logits_stride < args->n_experts)
        return PGD_EINVAL;
    cpu_split_run(ctx, route_rows, (void *)args, 2 * (int64_t)args->n_rows * args->n_experts);
    sort_by_expert(args);
    return PGD_OK;
}

static void gather_rows(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const moe_gather_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        const float *x = a->x + t * a->x_stride;
        for (int64_t c = t * a->n_chosen; c < (t + 1) * a->n_chosen; c++) {
            float *out = a->out + a->places[c] * a->out_stride;
            if (a->weights == NULL) {
                memcpy(out, x, (size_t)a->dim * sizeof(*out));
                continue;
            }
            for (int32_t i = 0; i < a->dim; i++)
                out[i] = x[i] * a->weights[c];
        }
    }
}

pgd_err moe_gather_ref(const moe_gather_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->n_chosen < 1 || args->dim < 1 || args->x_stride < args->dim ||
        args->out_stride < args->dim)
        return PGD_EINVAL;
    cpu_split_run(ctx, gather_rows, (void *)args,
                  (int64_t)args->n_rows * args->n_chosen * args->dim);
    return PGD_OK;
}

static void combine_rows(void *arg, int32_t thread_idx, int32_t n_threads)
{
    const moe_combine_args *a = arg;
    int64_t first, last;
    cpu_split_range(&first, &last, a->n_rows, thread_idx, n_threads);
    for (int64_t t = first; t < last; t++) {
        float *out = a->out + t * a->out_stride;
        for (int32_t i = 0; i < a->dim; i++) {
            double sum = 0;
            for (int64_t c = t * a->n_chosen; c < (t + 1) * a->n_chosen; c++)
                sum += (a->weights != NULL ? (double)a->weights[c] : 1.0) *
                       (double)a->y[a->places[c] * a->y_stride + i];
            out[i] = (float)(sum + (double)out[i]);
        }
    }
}

pgd_err moe_combine_ref(const moe_combine_args *args, kernel_ctx *ctx)
{
    if (args->n_rows < 0 || args->n_chosen < 1 || args->dim < 1 || args->y_stride < args->dim ||
        args->out_stride < args->dim)
        return PGD_EINVAL;
    cpu_split_run(ctx, combine_rows, (void *)args,
                  (int64_t)args->n_rows * args->n_chosen * args->dim);
    return PGD_OK;
}
