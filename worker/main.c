/* paged-worker: one device, one process. The engine starts it:
 *
 *   paged-worker --connect URL --device D [--rank N] [--log-level L]
 *
 * and writes one line to its stdin, `token=HEX epoch=N engine_pid=N max_frame_bytes=N`: secrets are
 * not for argv, which everybody can read. stdin then stays open; its end is the engine's end.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "common/log.h"
#include "common/thread.h"
#include "worker/heartbeat.h"
#include "worker/sim_runner.h"
#include "worker/worker_loop.h"

#define EXIT_USAGE          64 /* sysexits.h */
#define EXIT_SOFTWARE_FAULT 70
#define LAST_WORDS_S        5

typedef struct worker_args {
    const char *url;
    const char *device;
    long rank;
    log_level level;
} worker_args;

typedef struct spawn_line {
    uint8_t token[CONTROL_TOKEN_BYTES];
    uint32_t epoch;
    long engine_pid;
    size_t max_frame_bytes;
} spawn_line;

static const char USAGE[] =
    "usage: paged-worker --connect URL --device cpu|sim [--rank N] [--log-level LEVEL]\n"
    "The engine starts this program; `paged serve` is what you want.\n";

static pgd_err parse_args(worker_args *out, int argc, char **argv, pgd_why *why)
{
    *out = (worker_args){.level = LOG_INFO};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        char *end;
        if (value == NULL)
            return pgd_fail(why, PGD_EINVAL, "%s: expected a value after it", argv[i]);
        if (strcmp(argv[i], "--connect") == 0) {
            out->url = value;
        } else if (strcmp(argv[i], "--device") == 0) {
            out->device = value;
        } else if (strcmp(argv[i], "--rank") == 0) {
            out->rank = strtol(value, &end, 10);
            if (*end != 0 || end == value || out->rank < 0 || out->rank > 1023)
                return pgd_fail(why, PGD_EINVAL, "--rank: expected 0..1023, got %s", value);
        } else if (strcmp(argv[i], "--log-level") == 0) {
            if (!log_level_parse(&out->level, value))
                return pgd_fail(why, PGD_EINVAL,
                                "--log-level: expected error, warn, info, debug or trace, got %s",
                                value);
        } else {
            return pgd_fail(why, PGD_EINVAL, "unknown option %s", argv[i]);
        }
    }
    if (out->url == NULL || out->device == NULL)
        return pgd_fail(why, PGD_EINVAL, "expected --connect and --device");
    return PGD_OK;
}

/* Up to the newline, byte by byte: what follows on stdin is not ours to read here. */
static pgd_err read_spawn_line(spawn_line *out, pgd_why *why)
{
    char line[256];
    size_t n = 0;
    char hex[2 * CONTROL_TOKEN_BYTES + 1];
    unsigned long max_frame;
    for (;;) {
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        if (poll(&p, 1, 10000) == 0)
            return pgd_fail(why, PGD_ETIMEDOUT,
                            "stdin: expected a line from the engine within 10 s");
        ssize_t got = read(STDIN_FILENO, line + n, 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0 || n == sizeof line - 2)
            return pgd_fail(
                why, PGD_EPROTO,
                "stdin: expected a line from the engine; this program is started by paged serve");
        if (line[n] == '\n')
            break;
        n++;
    }
    line[n] = 0;
    if (sscanf(line, "token=%32[0-9a-f] epoch=%u engine_pid=%ld max_frame_bytes=%lu", hex,
               &out->epoch, &out->engine_pid, &max_frame) != 4 ||
        strlen(hex) != 2 * CONTROL_TOKEN_BYTES)
        return pgd_fail(why, PGD_EPROTO,
                        "stdin: expected `token=HEX epoch=N engine_pid=N max_frame_bytes=N`");
    for (size_t i = 0; i < CONTROL_TOKEN_BYTES; i++) {
        unsigned byte;
        (void)sscanf(hex + 2 * i, "%2x", &byte);
        out->token[i] = (uint8_t)byte;
    }
    out->max_frame_bytes = max_frame;
    return PGD_OK;
}

static pgd_err create_runner(step_runner **out, const char *device, pgd_why *why)
{
    if (strcmp(device, "sim") == 0)
        return sim_runner_create(out, why);
    if (strcmp(device, "cpu") == 0)
        return model_runner_create(out, device, why);
    return pgd_fail(why, PGD_EUNSUPPORTED, "--device: expected cpu or sim, got %s", device);
}

/* Everything that must be there before the first message. */
static pgd_err prepare(worker_args *args, spawn_line *line, step_runner **runner,
                       engine_link **link, pgd_why *why)
{
    PGD_TRY(read_spawn_line(line, why));
    /* The engine may have died before prctl: then we have been given another parent. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != (pid_t)line->engine_pid)
        return pgd_fail(why, PGD_ECLOSED, "the engine (pid %ld) is gone", line->engine_pid);
    PGD_TRY(create_runner(runner, args->device, why));
    return engine_link_open(link, args->url, line->epoch, line->max_frame_bytes, why);
}

static pgd_err serve(worker_args *args, step_runner *runner, engine_link *link,
                     const spawn_line *line)
{
    pgd_why why = {0};
    heartbeat *beat;
    uint64_t last_step_id = 0;
    heartbeat_opts beat_opts = {.link = link,
                                .progress = &runner->progress,
                                .last_step_id = &last_step_id,
                                .stdin_fd = STDIN_FILENO};
    pgd_err err = heartbeat_start(&beat, &beat_opts);
    if (err != PGD_OK) {
        log_error("worker", "cannot start the heartbeat thread: %s", pgd_err_text(err));
        return err;
    }
    worker_loop_opts opts = {.link = link,
                             .runner = runner,
                             .device = args->device,
                             .rank = (uint32_t)args->rank,
                             .last_step_id = &last_step_id};
    memcpy(opts.token, line->token, sizeof opts.token);
    err = worker_loop_run(&opts, &why);
    /* Closing would drop what NNG has not written yet: leave the end to the engine, which kills, or
     * to the heartbeat thread, which sees it gone. */
    if (err != PGD_OK)
        sleep(LAST_WORDS_S);
    heartbeat_stop(beat);
    return err;
}

int main(int argc, char **argv)
{
    worker_args args;
    pgd_why why = {0};
    char role[32];
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("paged-worker " PGD_VERSION_STRING);
        return EXIT_SUCCESS;
    }
    if (parse_args(&args, argc, argv, &why) != PGD_OK) {
        fprintf(stderr, "paged-worker: %s\n%s", why.text, USAGE);
        return EXIT_USAGE;
    }
    snprintf(role, sizeof role, "worker%ld", args.rank);
    log_init(role, args.level);
    thread_set_role(THREAD_WORKER);
    signal(SIGPIPE, SIG_IGN);
    spawn_line line;
    step_runner *runner = NULL;
    engine_link *link = NULL;
    pgd_err err = prepare(&args, &line, &runner, &link, &why);
    if (err == PGD_OK)
        err = serve(&args, runner, link, &line);
    else
        log_error("worker", "%s", pgd_why_text(&why, err));
    engine_link_close(link);
    if (runner != NULL)
        runner->vtbl->destroy(runner);
    return err == PGD_OK ? EXIT_SUCCESS : EXIT_SOFTWARE_FAULT;
}
