/* What engine, messages and processes cost per step, with the simulated worker: at a step time of 0 the whole round, and
 * beside steps of 1 ms what of it is not hidden. The limit it is held against is the bare sleep of the same length. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "engine/core/core_loop.h"

static void wake(void *arg)
{
    (void)arg;
}

static double sleep_us_per_call(long step_us)
{
    struct timespec ts = {.tv_nsec = step_us * 1000};
    uint64_t start = clock_now_us();
    for (int i = 0; i < 200; i++)
        nanosleep(&ts, NULL);
    return (double)(clock_now_us() - start) / 200;
}

static void wait_ready(core_loop *c)
{
    core_stats s;
    do {
        usleep(1000);
        core_loop_get_stats(c, &s);
    } while (s.state < CORE_READY);
    if (s.state != CORE_READY) {
        fprintf(stderr, "worker: %s\n", s.why);
        exit(1);
    }
}

static void measure(const char *worker_path, int64_t step_us, int n_requests, int n_tokens)
{
    config cfg;
    core_loop *c;
    core_stats before, after;
    core_event e;
    pgd_why why = {0};
    static const uint8_t seed[32];
    config_init(&cfg);
    snprintf(cfg.device, sizeof cfg.device, "sim");
    snprintf(cfg.worker_path, sizeof cfg.worker_path, "%s", worker_path);
    cfg.sim_step_us = step_us;
    cfg.max_model_len = n_tokens + 16;
    cfg.num_kv_blocks = n_requests * (n_tokens / 16 + 2) + 1;
    core_loop_opts opts = {.cfg = &cfg, .hash_seed = seed, .wake = wake};
    if (core_loop_create(&c, &opts, &why) != PGD_OK || core_loop_start(c, &why) != PGD_OK) {
        fprintf(stderr, "%s\n", why.text);
        exit(1);
    }
    wait_ready(c);
    core_loop_get_stats(c, &before);
    token_id prompt[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    uint64_t start = clock_now_us();
    for (int i = 0; i < n_requests; i++) {
        request *r;
        request_opts o = {.id = (uint64_t)i + 1,
                          .prompt = prompt,
                          .n_prompt_tokens = 8,
                          .max_tokens = n_tokens,
                          .max_model_len = n_tokens + 16,
                          .params = {.top_p = 1,
                                     .repetition_penalty = 1,
                                     .n_logprobs = -1,
                                     .seed = (uint64_t)i,
                                     .temperature = 1},
                          .block_size = (int32_t)cfg.block_size};
        if (request_create(&r, &o) != PGD_OK || core_loop_submit(c, r) != CORE_REFUSAL_NONE)
            exit(1);
    }
    int n_finished = 0;
    while (n_finished < n_requests) {
        if (!core_loop_poll(c, &e))
            usleep(500);
        else
            n_finished += e.kind == CORE_EVENT_FINISHED;
    }
    double total_us = (double)(clock_now_us() - start);
    core_loop_get_stats(c, &after);
    double per_step = total_us / (double)(after.n_steps - before.n_steps);
    double bare = step_us > 0 ? sleep_us_per_call(step_us) : 0;
    printf("step_us=%-5lld requests=%-4d steps=%-5llu us/step=%-8.1f", (long long)step_us,
           n_requests, (unsigned long long)(after.n_steps - before.n_steps), per_step);
    if (step_us > 0)
        printf(" bare sleep=%.1f ratio=%.3f", bare, per_step / bare);
    printf("\n");
    core_loop_stop(c, 0);
    core_loop_destroy(c);
}

int main(void)
{
    char path[1024];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 32);
    if (n <= 0)
        return 1;
    path[n] = 0;
    for (int up = 0; up < 3; up++)
        *strrchr(path, '/') = 0;
    strcat(path, "/bin/paged-worker");
    log_init("bench", LOG_WARN);
    measure(path, 0, 1, 2000);
    measure(path, 0, 64, 500);
    measure(path, 0, 256, 300);
    measure(path, 1000, 1, 1000);
    measure(path, 1000, 64, 500);
    measure(path, 1000, 256, 300);
    return 0;
}
