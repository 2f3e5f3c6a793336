/* `paged serve`: the loop, the signals, the order of starting and stopping.
 *
 * Start: configuration, bind, model headers and tokenizer, worker. The port answers from the second
 * step on (503 until the model is ready). Stop: SIGTERM or SIGINT drains (no new connections;
 * requests on their way are answered 503; what runs may finish within shutdown_timeout_s), a second
 * signal ends at once. A worker that cannot be kept running ends the process with status 70, so that
 * a supervisor restarts it. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include <sys/resource.h>
#include <unistd.h>

#include <uv.h>

#include "common/clock.h"
#include "common/log.h"
#include "engine/commands.h"
#include "engine/engine.h"
#include "engine/http/http_api.h"
#include "engine/http/http_server.h"
#include "engine/progress.h"
#include "engine/service_status.h"

#define TICK_MS      500
#define LAST_TICK_MS 10
#define LAST_US      1000000 /* for the last answers to go out, once the engine has stopped */
#define GRACE_US     1000000 /* for requests on their way when the end begins: they are answered 503 */
#define MAX_WORDS    200
#define RESERVED_FDS 128 /* worker, its pipes and sockets, files, refused connections */

typedef struct daemon_state {
    uv_loop_t loop;
    config cfg;
    http_api api;
    uv_signal_t sigterm;
    uv_signal_t sigint;
    uv_signal_t sighup;
    uv_timer_t tick;
    progress progress;
    service_status service;
    int exit_status;
    bool stopping; /* draining, or on the way out */
    bool closing;
    uint64_t close_by_us; /* while closing: when clients lose what they have not taken */
    int argc;             /* for reading the configuration again */
    char **argv;
} daemon_state;

static void close_handle(uv_handle_t *handle)
{
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static void on_server_closed(void *arg)
{
    daemon_state *d = arg;
    close_handle((uv_handle_t *)&d->sigterm);
    close_handle((uv_handle_t *)&d->sigint);
    close_handle((uv_handle_t *)&d->sighup);
    close_handle((uv_handle_t *)&d->tick);
}

static void on_last_tick(uv_timer_t *timer)
{
    daemon_state *d = timer->data;
    bool is_late = clock_now_us() >= d->close_by_us;
    if (http_api_n_pool_jobs(&d->api) > 0 || (!is_late && http_server_is_busy(d->api.server)))
        return;
    uv_timer_stop(timer);
    http_server_close(d->api.server, on_server_closed, d);
}

/* Ends whatever still runs. Clients get their answer or error before the connections close; those of
 * jobs on the pool in any case (the loop cannot end before them), others while there is time. */
static void close_everything(daemon_state *d)
{
    if (d->closing)
        return;
    d->closing = true;
    d->api.draining = true;
    http_server_drain(d->api.server, GRACE_US);
    engine_stop(d->api.engine);
    d->close_by_us = PGD_MAX(d->close_by_us, clock_now_us() + LAST_US);
    uv_timer_start(&d->tick, on_last_tick, 0, LAST_TICK_MS);
}

static void begin_drain(daemon_state *d)
{
    if (d->stopping)
        return;
    d->stopping = true;
    d->api.draining = true;
    d->close_by_us = clock_now_us() + (uint64_t)d->cfg.shutdown_timeout_s * 1000000u;
    service_status_stopping(&d->service, (uint64_t)d->cfg.shutdown_timeout_s);
    log_info("serve", "draining requests=%d limit_s=%lld; a second signal ends at once",
             engine_n_generations(d->api.engine), (long long)d->cfg.shutdown_timeout_s);
    http_server_drain(d->api.server, GRACE_US);
    engine_drain(d->api.engine, (uint32_t)d->cfg.shutdown_timeout_s);
}

/* What can change while running: the keys and the log level. All of it is read as at start, so that
 * precedence is the same; a fault anywhere changes nothing. */
static pgd_err reload(daemon_state *d, pgd_why *why)
{
    config cfg;
    char *words[MAX_WORDS];
    int n_words = 0;
    int32_t n_keys;
    log_level level;
    PGD_TRY(config_load(&cfg, d->argc, d->argv, NULL, words, &n_words, why));
    PGD_TRY(http_server_load_keys(d->api.server, &cfg, &n_keys, why));
    if (log_level_parse(&level, cfg.log_level))
        log_set_level(level);
    log_info("serve", "reloaded n_keys=%d log_level=%s; other options change at the next start",
             n_keys, cfg.log_level);
    return PGD_OK;
}

static void on_reload(uv_signal_t *handle, int signum)
{
    daemon_state *d = handle->data;
    pgd_why why = {0};
    (void)signum;
    if (d->stopping)
        return;
    service_status_reload_begin(&d->service);
    pgd_err err = reload(d, &why);
    if (err != PGD_OK)
        log_error("serve", "reload failed, nothing has changed: %s", pgd_why_text(&why, err));
    service_status_reload_end(&d->service);
}

static void on_signal(uv_signal_t *handle, int signum)
{
    daemon_state *d = handle->data;
    if (d->stopping) {
        log_warn("serve", "second signal (%d): ending now", signum);
        d->close_by_us = 0;
        http_server_drain(d->api.server, 0);
        close_everything(d);
    } else {
        begin_drain(d);
    }
}

static void on_ready(daemon_state *d)
{
    core_stats s;
    engine_get_stats(d->api.engine, &s);
    log_info("serve",
             "ready model=%s url=%s max_model_len=%d kv_blocks=%d start_s=%.2f restarts=%" PRIu64,
             engine_model_name(d->api.engine), http_server_address(d->api.server), s.max_model_len,
             s.n_kv_blocks, (double)(clock_now_us() - d->api.started_us) * 1e-6,
             s.n_worker_restarts);
    http_server_accept_inherited(d->api.server);
    service_status_ready(&d->service, engine_model_name(d->api.engine),
                         http_server_address(d->api.server));
}

static void on_state(void *arg, core_state state)
{
    daemon_state *d = arg;
    core_stats s;
    switch (state) {
    case CORE_READY:
        progress_end(&d->progress);
        on_ready(d);
        break;
    case CORE_RECOVERING:
        engine_get_stats(d->api.engine, &s);
        service_status_recovering(&d->service, s.why);
        break;
    case CORE_FAILED:
        progress_end(&d->progress);
        engine_get_stats(d->api.engine, &s);
        log_error("serve", "giving up: %s", s.why);
        d->exit_status = command_failed_status(&s);
        d->stopping = true;
        close_everything(d);
        break;
    case CORE_STOPPED:
        close_everything(d);
        break;
    default:
        break;
    }
}

static void on_tick(uv_timer_t *timer)
{
    daemon_state *d = timer->data;
    core_stats s;
    engine_get_stats(d->api.engine, &s);
    if (s.state == CORE_LOADING || s.state == CORE_STARTING) {
        progress_show(&d->progress, "loading", s.load_done_bytes, s.load_total_bytes);
        service_status_loading(&d->service, &s);
    } else if (s.state == CORE_READY && d->service.is_ready) {
        service_status_serving(&d->service, &s, clock_now_us());
    }
}

static void start_signal(daemon_state *d, uv_signal_t *handle, uv_signal_cb fn, int signum)
{
    handle->data = d;
    if (uv_signal_init(&d->loop, handle) != 0 || uv_signal_start(handle, fn, signum) != 0)
        PGD_PANIC("cannot watch signal %d", signum);
}

/* Runs the loop until every handle is closed. */
static void finish_loop(daemon_state *d)
{
    uv_run(&d->loop, UV_RUN_DEFAULT);
    PGD_ASSERT(uv_loop_close(&d->loop) == 0);
}

static int fail_start(daemon_state *d, pgd_err err, const pgd_why *why)
{
    log_error("serve", "%s", pgd_why_text(why, err));
    if (d->api.engine != NULL)
        engine_stop(d->api.engine);
    if (d->api.server != NULL)
        http_server_close(d->api.server, NULL, NULL);
    close_handle((uv_handle_t *)&d->sighup);
    finish_loop(d);
    engine_destroy(d->api.engine);
    http_server_destroy(d->api.server);
    return command_exit_status(err);
}

/* Clients must not be able to use up the descriptors that starting another worker takes. */
static void fit_connections(config *cfg)
{
    struct rlimit limit;
    rlim_t wanted = (rlim_t)cfg->max_connections + RESERVED_FDS;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted)
        return;
    limit.rlim_cur = PGD_MIN(limit.rlim_max, wanted);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted)
        return;
    int64_t n = PGD_MAX((int64_t)limit.rlim_cur - RESERVED_FDS, 1);
    log_warn("serve",
             "max_connections=%lld lowered to %lld: this process may open %llu files; raise "
             "the limit (ulimit -Hn, LimitNOFILE) or lower max_connections",
             (long long)cfg->max_connections, (long long)n, (unsigned long long)limit.rlim_cur);
    cfg->max_connections = n;
}

int cmd_serve(int argc, char **argv)
{
    static daemon_state d; /* large, one per process */
    int n_rest = 0;
    pgd_why why = {0};
    d.api.started_us = clock_now_us();
    d.api.started_s = clock_wall_s();
    http_metrics_init(&d.api.metrics);
    d.argc = argc;
    d.argv = argv;
    if (argc > MAX_WORDS) {
        fputs("paged serve: too many arguments\n", stderr);
        return EXIT_STATUS_USAGE;
    }
    char *words[MAX_WORDS];
    if (!command_load_config(&d.cfg, argc, argv, NULL, words, &n_rest))
        return EXIT_STATUS_USAGE;
    /* `paged serve PATH` is what users of vLLM type. */
    if (n_rest == 1 && d.cfg.model[0] == '\0' && strlen(words[0]) < sizeof(d.cfg.model)) {
        snprintf(d.cfg.model, sizeof(d.cfg.model), "%s", words[0]);
    } else if (n_rest > 0) {
        fprintf(stderr, "paged serve: unexpected %s; paged --help lists the options\n", words[0]);
        return EXIT_STATUS_USAGE;
    }
    fit_connections(&d.cfg);
    if (!command_check_limits() || uv_loop_init(&d.loop) != 0)
        return EXIT_STATUS_SYSTEM;
    start_signal(&d, &d.sighup, on_reload, SIGHUP); /* early: the default is to die of it */
    pgd_err err = http_server_create(&d.api.server, &d.loop, &d.cfg, http_api_handle,
                                     http_api_answered, &d.api, &why);
    if (err == PGD_OK)
        err = engine_create(&d.api.engine, &d.loop, &d.cfg, &why);
    if (err == PGD_OK)
        err = http_server_start(d.api.server, &why);
    if (err != PGD_OK)
        return fail_start(&d, err, &why);
    start_signal(&d, &d.sigterm, on_signal, SIGTERM);
    start_signal(&d, &d.sigint, on_signal, SIGINT);
    if (uv_timer_init(&d.loop, &d.tick) != 0)
        PGD_PANIC("cannot make a timer");
    d.tick.data = &d;
    uv_timer_start(&d.tick, on_tick, TICK_MS, TICK_MS);
    err = engine_start(d.api.engine, on_state, &d, &why);
    if (err != PGD_OK) {
        log_error("serve", "%s", pgd_why_text(&why, err));
        d.exit_status = EXIT_STATUS_SYSTEM;
        close_everything(&d);
    }
    finish_loop(&d);
    engine_destroy(d.api.engine);
    http_server_destroy(d.api.server);
    log_info("serve", "stopped status=%d", d.exit_status);
    return d.exit_status;
}
