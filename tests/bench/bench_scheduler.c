/* Time of scheduler_schedule + scheduler_update for running decodes, and of admitting a long prompt
 * that is cached.
 *
 * Prints microseconds per step at 64 to 1024 running requests, the growth against linear, and the
 * ratio to the goal of 20 us at 256. Steps are taken two in flight, as the core loop does. The
 * median over steps is shown, so that other load on the machine does not decide. Never fails on
 * speed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "engine/core/scheduler.h"

#define GOAL_US 20.0
#define N_STEPS 1024
#define PROMPT  64

static const uint8_t SEED[32] = {1};

typedef struct copied_step {
    uint64_t step_id;
    int32_t n_results;
    request_result_msg *results; /* [1024] */
} copied_step;

static void on_token(void *arg, request *r, token_id token, const token_logprob *logprobs,
                     int32_t n_logprobs)
{
    (void)r, (void)token, (void)logprobs, (void)n_logprobs;
    ++*(uint64_t *)arg;
}

static void on_finished(void *arg, request *r, request_error error)
{
    (void)arg, (void)r, (void)error;
}

static void on_release(void *arg, request *r)
{
    (void)arg;
    request_destroy(r);
}

static scheduler *new_scheduler(int32_t n_seqs, uint64_t *n_tokens, int32_t max_len)
{
    scheduler_opts opts = {.max_num_seqs = n_seqs,
                           .max_num_batched_tokens = 8192,
                           .max_model_len = max_len,
                           .max_queued_requests = n_seqs + 1,
                           .enable_chunked_prefill = true,
                           .enable_prefix_caching = true,
                           .async = true,
                           .n_blocks = n_seqs * (max_len / 16) + 2,
                           .block_size = 16,
                           .n_groups = 1,
                           .hash_seed = SEED,
                           .on_token = on_token,
                           .on_finished = on_finished,
                           .on_release = on_release,
                           .arg = n_tokens};
    scheduler *s;
    if (scheduler_create(&s, &opts) != PGD_OK)
        abort();
    return s;
}

static void add(scheduler *s, block_hasher *hasher, uint64_t id, int32_t n_prompt, int32_t max_len,
                token_id first)
{
    token_id *prompt = malloc((size_t)n_prompt * sizeof *prompt);
    for (int32_t i = 0; i < n_prompt; i++)
        prompt[i] = first + i;
    request_opts opts = {.id = id,
                         .prompt = prompt,
                         .n_prompt_tokens = n_prompt,
                         .max_tokens = max_len - n_prompt,
                         .max_model_len = max_len,
                         .block_size = 16,
                         .hasher = hasher};
    request *r;
    if (request_create(&r, &opts) != PGD_OK || scheduler_add_request(s, r) != SCHEDULER_ADDED)
        abort();
    free(prompt);
}

/* What a worker would answer: a token for each request of the message whose prompt is done. */
static void copy_step(copied_step *c, const scheduler_output *out)
{
    c->step_id = out->step_id;
    c->n_results = 0;
    for (int32_t i = 0; i < out->n_cached; i++) {
        request_result_msg *res = &c->results[c->n_results++];
        res->request_id = out->cached_requests[i].request_id;
        res->request_epoch = 1;
        res->n_tokens = 1;
    }
    for (int32_t i = 0; i < out->n_new; i++) {
        if (out->new_requests[i].n_computed_tokens + out->new_requests[i].n_scheduled_tokens <
            out->new_requests[i].n_tokens)
            continue;
        request_result_msg *res = &c->results[c->n_results++];
        res->request_id = out->new_requests[i].request_id;
        res->request_epoch = 1;
        res->n_tokens = 1;
    }
}

static void answer(scheduler *s, const copied_step *c)
{
    step_result result = {.step_id = c->step_id, .n_results = c->n_results, .results = c->results};
    if (scheduler_update(s, &result) != PGD_OK)
        abort();
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double bench_decode(int32_t n_seqs, double *schedule_us)
{
    static copied_step steps[2];
    int32_t max_len = PROMPT + N_STEPS + 64;
    uint64_t n_tokens = 0;
    block_hasher *hasher;
    if (block_hasher_create(&hasher, SEED) != PGD_OK)
        abort();
    for (int i = 0; i < 2; i++) {
        if (steps[i].results == NULL)
            steps[i].results = calloc(1024, sizeof *steps[i].results);
    }
    scheduler *s = new_scheduler(n_seqs, &n_tokens, max_len);
    for (int32_t i = 0; i < n_seqs; i++)
        add(s, hasher, (uint64_t)i + 1, PROMPT + i % 16, max_len, 100 * i);
    scheduler_output out;
    uint64_t n_steps = 0;
    while (n_tokens < 4 * (uint64_t)n_seqs) { /* all admitted and decoding */
        if (!scheduler_schedule(s, &out, NULL, 0))
            abort();
        copy_step(&steps[n_steps++ % 2], &out);
        if (n_steps > 1)
            answer(s, &steps[n_steps % 2]);
    }
    static double step_us[N_STEPS];
    static double step_schedule_us[N_STEPS];
    for (int i = 0; i < N_STEPS; i++) {
        uint64_t start = clock_now_ns();
        if (!scheduler_schedule(s, &out, NULL, 0) || out.n_cached != n_seqs)
            abort();
        uint64_t middle = clock_now_ns();
        copy_step(&steps[n_steps++ % 2], &out);
        uint64_t before = clock_now_ns();
        answer(s, &steps[n_steps % 2]);
        step_schedule_us[i] = (double)(middle - start) / 1e3;
        step_us[i] = step_schedule_us[i] + (double)(clock_now_ns() - before) / 1e3;
    }
    scheduler_destroy(s);
    block_hasher_destroy(hasher);
    qsort(step_us, N_STEPS, sizeof *step_us, compare);
    qsort(step_schedule_us, N_STEPS, sizeof *step_schedule_us, compare);
    *schedule_us = step_schedule_us[N_STEPS / 2];
    return step_us[N_STEPS / 2];
}

/* The head of the queue has a long cached prompt; the time of the step that admits it. */
static double bench_long_hit(int32_t n_prompt)
{
    static copied_step step;
    int32_t max_len = n_prompt + 16;
    uint64_t n_tokens = 0;
    block_hasher *hasher;
    if (step.results == NULL)
        step.results = calloc(1024, sizeof *step.results);
    if (block_hasher_create(&hasher, SEED) != PGD_OK)
        abort();
    scheduler *s = new_scheduler(2, &n_tokens, max_len);
    scheduler_output out;
    add(s, hasher, 1, n_prompt, max_len, 0);
    while (scheduler_has_work(s) && scheduler_schedule(s, &out, NULL, 0)) {
        copy_step(&step, &out);
        for (int32_t i = 0; i < out.n_cached; i++) {
            const cached_request_msg *c = &out.cached_requests[i];
            if (c->n_computed_tokens + c->n_scheduled_tokens < n_prompt)
                step.n_results = 0;
        }
        answer(s, &step);
    }
    double us[9];
    for (uint64_t i = 0; i < 9; i++) {
        add(s, hasher, 10 + i, n_prompt, max_len, 0);
        uint64_t start = clock_now_ns();
        if (!scheduler_schedule(s, &out, NULL, 0) || out.total_scheduled_tokens > 16)
            abort();
        us[i] = (double)(clock_now_ns() - start) / 1e3;
        copy_step(&step, &out);
        answer(s, &step);
        if (!scheduler_finish_request(s, 10 + i, REQUEST_FINISHED_ABORTED))
            abort();
    }
    scheduler_destroy(s);
    block_hasher_destroy(hasher);
    qsort(us, 9, sizeof *us, compare);
    return us[4];
}

int main(void)
{
    double first_us = 0.0;
    printf("running  schedule+update us  schedule us  per request ns  growth/linear\n");
    for (int32_t n = 64; n <= 1024; n *= 2) {
        double schedule_us;
        double us = bench_decode(n, &schedule_us);
        if (n == 64)
            first_us = us;
        printf("%7d  %18.2f  %11.2f  %14.1f  %13.2f\n", n, us, schedule_us, us * 1e3 / n,
               us / first_us / (n / 64));
        if (n == 256)
            printf("         goal at 256: %.0f us, measured/goal = %.2f\n", GOAL_US, us / GOAL_US);
    }
    printf("admission of a cached prompt of 32768 tokens: %.1f us\n", bench_long_hit(32768));
    return 0;
}
