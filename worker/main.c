/* paged-worker: one device, one process, one engine. Either the engine starts it:
 *
 *   paged-worker --connect URL --device D [--rank N] [--log-level L]
 *
 * and writes one line to its stdin, `key=HEX engine_pid=N`: secrets are not for argv, which
 * everybody can read. stdin then stays open; its end is the engine's end. Or an operator does:
 *
 *   paged-worker --listen URL --device D [--rank N] [--worker-token-file F] [--log-level L]
 *
 * which waits for an engine (`paged serve --worker URL`) and ends with it, so that every life starts
 * from nothing. Once an engine is there, both are one path.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <poll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/log.h"
#include "common/thread.h"
#include "worker/handshake.h"
#include "worker/heartbeat.h"
#include "worker/sim_runner.h"
#include "worker/worker_loop.h"

#define EXIT_USAGE          64 /* sysexits.h */
#define EXIT_SOFTWARE_FAULT 70
#define LAST_WORDS_S        5
#define SPAWN_ANSWER_MS     30000

typedef struct worker_args {
    const char *connect_url; /* one of them */
    const char *listen_url;
    const char *device;
    const char *token_file; /* NULL = none */
    long rank;
    log_level level;
} worker_args;

static const char USAGE[] =
    "usage: paged-worker --listen URL --device cpu|sim [options]\n"
    "\n"
    "Computes a model for one engine, which finds it with `paged serve --worker URL`, and exits "
    "when\n"
    "that engine is gone. Let a supervisor start it again (paged-worker@.service). Without "
    "--worker\n"
    "the engine starts a worker itself; then this program is not for you to start.\n"
    "\n"
    "  --listen URL             ipc:///run/paged-worker/0.sock or tcp://127.0.0.1:7000\n"
    "  --device D               cpu, or sim: no model, made-up tokens\n"
    "  --rank N                 number of this worker in the log and to the engine (0)\n"
    "  --worker-token-file F    secret of 32 bytes or more that the engine must know, mode 0600;\n"
    "                           needed beyond loopback\n"
    "  --log-level LEVEL        error, warn, info, debug or trace (info)\n"
    "  --version, --help\n"
    "\n"
    "Exit status: 0 when the engine is gone or after SIGTERM, 64 usage or settings, 70 a fault.\n";

/* --- arguments -------------------------------------------------------------------------------- */

static pgd_err parse_rank(long *out, const char *value, pgd_why *why)
{
    char *end;
    *out = strtol(value, &end, 10);
    if (*end != 0 || end == value || *out < 0 || *out > 1023)
        return pgd_fail(why, PGD_EINVAL, "--rank: expected 0..1023, got %s", value);
    return PGD_OK;
}

static pgd_err set_arg(worker_args *out, const char *name, const char *value, pgd_why *why)
{
    if (strcmp(name, "--connect") == 0)
        out->connect_url = value;
    else if (strcmp(name, "--listen") == 0)
        out->listen_url = value;
    else if (strcmp(name, "--device") == 0)
        out->device = value;
    else if (strcmp(name, "--worker-token-file") == 0)
        out->token_file = value[0] != 0 ? value : NULL;
    else if (strcmp(name, "--rank") == 0)
        return parse_rank(&out->rank, value, why);
    else if (strcmp(name, "--log-level") != 0)
        return pgd_fail(why, PGD_EINVAL, "unknown option %s", name);
    else if (!log_level_parse(&out->level, value))
        return pgd_fail(why, PGD_EINVAL,
                        "--log-level: expected error, warn, info, debug or trace, got %s", value);
    return PGD_OK;
}

static pgd_err check_args(const worker_args *args, pgd_why *why)
{
    if ((args->connect_url == NULL) == (args->listen_url == NULL) || args->device == NULL)
        return pgd_fail(why, PGD_EINVAL, "expected --listen URL and --device D");
    if (strcmp(args->device, "cpu") != 0 && strcmp(args->device, "sim") != 0)
        return pgd_fail(why, PGD_EUNSUPPORTED, "--device: expected cpu or sim, got %s",
                        args->device);
    if (args->connect_url != NULL && args->token_file != NULL)
        return pgd_fail(why, PGD_EINVAL, "--worker-token-file goes with --listen");
    return args->listen_url != NULL
               ? attach_check_url(args->listen_url, args->token_file != NULL, why)
               : PGD_OK;
}

static pgd_err parse_args(worker_args *out, int argc, char **argv, pgd_why *why)
{
    *out = (worker_args){.level = LOG_INFO};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc)
            return pgd_fail(why, PGD_EINVAL, "%s: expected a value after it", argv[i]);
        PGD_TRY(set_arg(out, argv[i], argv[i + 1], why));
    }
    return check_args(out, why);
}

/* --- started by the engine -------------------------------------------------------------------- */

/* Up to the newline, byte by byte: what follows on stdin is not ours to read here. */
static pgd_err read_spawn_line(attach_key *key, long *engine_pid, pgd_why *why)
{
    char line[256];
    size_t n = 0;
    char hex[2 * ATTACH_MIN_KEY_BYTES + 1];
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
    if (sscanf(line, "key=%64[0-9a-f] engine_pid=%ld", hex, engine_pid) != 2 ||
        strlen(hex) != 2 * ATTACH_MIN_KEY_BYTES)
        return pgd_fail(why, PGD_EPROTO, "stdin: expected `key=HEX engine_pid=N`");
    key->n_bytes = ATTACH_MIN_KEY_BYTES;
    for (size_t i = 0; i < key->n_bytes; i++) {
        unsigned byte;
        (void)sscanf(hex + 2 * i, "%2x", &byte);
        key->data[i] = (uint8_t)byte;
    }
    return PGD_OK;
}

static pgd_err meet_parent(engine_link **link, uint8_t proof[CONTROL_PROOF_BYTES],
                           const worker_args *args, pgd_why *why)
{
    attach_key key;
    long engine_pid;
    PGD_TRY(read_spawn_line(&key, &engine_pid, why));
    /* The engine may have died before prctl: then we have been given another parent. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != (pid_t)engine_pid)
        return pgd_fail(why, PGD_ECLOSED, "the engine (pid %ld) is gone", engine_pid);
    PGD_TRY(engine_link_dial(link, args->connect_url, HANDSHAKE_MAX_RECV_BYTES, why));
    pgd_err err = handshake_run(proof, *link, &key, SPAWN_ANSWER_MS, why);
    explicit_bzero(&key, sizeof key);
    return err;
}

/* --- started by an operator ------------------------------------------------------------------- */

static const char *volatile listening_path; /* of the ipc socket that waits for an engine */

static void on_term(int signum)
{
    (void)signum;
    if (listening_path != NULL)
        (void)unlink(listening_path);
    _exit(EXIT_SUCCESS);
}

static pgd_err await_engine(engine_link **link, uint8_t proof[CONTROL_PROOF_BYTES],
                            const worker_args *args, pgd_why *why)
{
    attach_key key = {0};
    struct sigaction action = {.sa_handler = on_term};
    if (args->token_file != NULL)
        PGD_TRY(attach_read_key(&key, args->token_file, why));
    (void)umask(0177); /* of the ipc socket; nothing else is made */
    (void)sigaction(SIGTERM, &action, NULL);
    (void)sigaction(SIGINT, &action, NULL);
    log_info("worker", "waiting for an engine at %s device=%s token=%s", args->listen_url,
             args->device, args->token_file != NULL ? "yes" : "no");
    listening_path = attach_ipc_path(args->listen_url);
    pgd_err err = handshake_await(link, proof, args->listen_url, &key, why);
    listening_path = NULL; /* another worker may be there by now */
    if (err == PGD_OK)
        log_info("worker", "an engine has attached at %s", args->listen_url);
    explicit_bzero(&key, sizeof key);
    return err;
}

/* --- both ------------------------------------------------------------------------------------- */

/* Of a failure before an engine was there: settings are not mended by starting again. */
static int start_status(pgd_err err)
{
    return err == PGD_EINVAL || err == PGD_ENOENT ? EXIT_USAGE : EXIT_SOFTWARE_FAULT;
}

static pgd_err create_runner(step_runner **out, const char *device, pgd_why *why)
{
    return strcmp(device, "sim") == 0 ? sim_runner_create(out, why)
                                      : model_runner_create(out, device, why);
}

static pgd_err serve(const worker_args *args, step_runner *runner, engine_link *link,
                     const uint8_t proof[CONTROL_PROOF_BYTES])
{
    pgd_why why = {0};
    heartbeat *beat;
    uint64_t last_step_id = 0;
    heartbeat_opts beat_opts = {.link = link,
                                .progress = &runner->progress,
                                .last_step_id = &last_step_id,
                                .stdin_fd = args->connect_url != NULL ? STDIN_FILENO : -1};
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
    memcpy(opts.proof, proof, sizeof opts.proof);
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
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        fputs(USAGE, stdout);
        return EXIT_SUCCESS;
    }
    if (parse_args(&args, argc, argv, &why) != PGD_OK) {
        fprintf(stderr, "paged-worker: %s; --help tells more\n", why.text);
        return EXIT_USAGE;
    }
    snprintf(role, sizeof role, "worker%ld", args.rank);
    log_init(role, args.level);
    thread_set_role(THREAD_WORKER);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    step_runner *runner = NULL;
    engine_link *link = NULL;
    uint8_t proof[CONTROL_PROOF_BYTES];
    pgd_err err = create_runner(&runner, args.device, &why);
    if (err == PGD_OK)
        err = args.listen_url != NULL ? await_engine(&link, proof, &args, &why)
                                      : meet_parent(&link, proof, &args, &why);
    int status = EXIT_SUCCESS;
    if (err != PGD_OK) {
        log_error("worker", "%s", pgd_why_text(&why, err));
        status = start_status(err);
    } else if (serve(&args, runner, link, proof) != PGD_OK) {
        status = EXIT_SOFTWARE_FAULT;
    }
    engine_link_close(link);
    if (runner != NULL)
        runner->vtbl->destroy(runner);
    return status;
}
