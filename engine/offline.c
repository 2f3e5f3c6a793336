/* The loop runs one turn at a time until the wanted thing has happened: commands stay straight-line
 * code. */
#include "engine/offline.h"

#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "engine/commands.h"
#include "engine/progress.h"

#define TICK_MS 100

static void on_state(void *arg, core_state state)
{
    offline *o = arg;
    o->state = state;
}

static void on_tick(uv_timer_t *timer)
{
    (void)timer; /* its turn of the loop is enough */
}

static void wait_ready(offline *o)
{
    progress bar = {0};
    uv_timer_t tick;
    uv_timer_init(&o->loop, &tick);
    uv_timer_start(&tick, on_tick, TICK_MS, TICK_MS);
    while (o->state != CORE_READY && o->state != CORE_FAILED && o->state != CORE_STOPPED) {
        uv_run(&o->loop, UV_RUN_ONCE);
        core_stats s;
        engine_get_stats(o->engine, &s);
        if (o->state == CORE_LOADING)
            progress_show(&bar, "loading", s.load_done_bytes, s.load_total_bytes);
    }
    progress_end(&bar);
    uv_close((uv_handle_t *)&tick, NULL);
    uv_run(&o->loop, UV_RUN_NOWAIT);
}

int offline_start(offline *o, const config *cfg)
{
    pgd_why why = {0};
    uint64_t start = clock_now_us();
    memset(o, 0, sizeof(*o));
    if (!command_check_limits() || uv_loop_init(&o->loop) != 0)
        return EXIT_STATUS_SYSTEM;
    pgd_err err = engine_create(&o->engine, &o->loop, cfg, &why);
    if (err == PGD_OK)
        err = engine_start(o->engine, on_state, o, &why);
    if (err != PGD_OK) {
        fprintf(stderr, "paged: %s\n", pgd_why_text(&why, err));
        if (o->engine != NULL)
            offline_stop(o);
        else
            PGD_ASSERT(uv_loop_close(&o->loop) == 0);
        return command_exit_status(err);
    }
    wait_ready(o);
    o->ready_us = clock_now_us() - start;
    if (o->state != CORE_READY) {
        core_stats s;
        engine_get_stats(o->engine, &s);
        fprintf(stderr, "paged: %s\n", s.why[0] != '\0' ? s.why : "the worker did not start");
        offline_stop(o);
        return command_failed_status(&s);
    }
    return 0;
}

bool offline_wait(offline *o, const int *n_left)
{
    while (*n_left > 0 && o->state != CORE_FAILED && o->state != CORE_STOPPED)
        uv_run(&o->loop, UV_RUN_ONCE);
    if (o->state == CORE_FAILED) {
        core_stats s;
        engine_get_stats(o->engine, &s);
        fprintf(stderr, "paged: %s\n", s.why);
    }
    return *n_left == 0;
}

void offline_stop(offline *o)
{
    engine_stop(o->engine);
    uv_run(&o->loop, UV_RUN_DEFAULT);
    engine_destroy(o->engine);
    o->engine = NULL;
    PGD_ASSERT(uv_loop_close(&o->loop) == 0);
}
