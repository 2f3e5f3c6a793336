/* The life of a worker as the engine sees it, with workers that misbehave in ways a real one does
 * not: this program plays them itself (`--connect`), after the script that FAKE_WORKER names.
 *
 * What a real worker can do - be killed, stopped, slow, poisoned - is in test_core_loop.c.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <nng/nng.h>
#include <nng/protocol/pair0/pair.h>

#include "common/clock.h"
#include "common/log.h"
#include "engine/core/worker_life.h"
#include "worker/handshake.h"

/* --- the worker ------------------------------------------------------------------------------- */

typedef struct fake {
    const char *script;
    const char *url;
    engine_link *link;
    uint32_t epoch; /* counts the lives, from 1 */
    attach_key key;
    hello_msg hello;
} fake;

static void say(const fake *f, wire_type type, const wire_record *rec, const void *msg)
{
    if (engine_link_send(f->link, type, rec, msg, true) != PGD_OK)
        exit(3);
}

static engine_frame hear(const fake *f)
{
    engine_frame frame;
    if (engine_link_recv(f->link, &frame, NULL) != PGD_OK || frame.type == WIRE_SHUTDOWN)
        exit(0);
    return frame;
}

static void read_spawn_line(fake *f)
{
    char hex[2 * ATTACH_MIN_KEY_BYTES + 1];
    if (scanf("key=%64[0-9a-f]", hex) != 1)
        exit(4);
    f->key.n_bytes = ATTACH_MIN_KEY_BYTES;
    for (size_t i = 0; i < ATTACH_MIN_KEY_BYTES; i++) {
        unsigned byte;
        (void)sscanf(hex + 2 * i, "%2x", &byte);
        f->key.data[i] = (uint8_t)byte;
    }
}

/* A challenge of another build, which the engine cannot read beyond its header. */
PGD_NORETURN static void run_other_version(const fake *f)
{
    nng_socket sock;
    nng_msg *m;
    uint16_t version = WIRE_VERSION + 1;
    challenge_msg challenge = {0};
    size_t n_bytes = wire_frame_bytes(&control_challenge_record, &challenge);
    if (nng_pair0_open(&sock) != 0 || nng_dial(sock, f->url, NULL, 0) != 0 ||
        nng_msg_alloc(&m, n_bytes) != 0)
        exit(5);
    wire_encode(nng_msg_body(m), n_bytes, WIRE_CHALLENGE, 0, &control_challenge_record, &challenge);
    memcpy((uint8_t *)nng_msg_body(m) + 4, &version, sizeof version);
    if (nng_sendmsg(sock, m, 0) != 0)
        exit(6);
    for (;;)
        pause();
}

/* Alive by its heartbeat, but its main thread answers nothing. */
PGD_NORETURN static void run_mute(const fake *f)
{
    heartbeat_msg beat = {0};
    for (;; usleep(100000))
        say(f, WIRE_HEARTBEAT, &control_heartbeat_record, &beat);
}

/* Of the script "levels" each life is told one: the first while it waits for steps, the second
 * before it loads. */
static void take_level(const engine_frame *frame)
{
    log_level_msg m;
    if (control_decode_log_level(&m, frame->data, frame->n_bytes, NULL) != PGD_OK ||
        m.level != LOG_WARN)
        exit(9);
}

PGD_NORETURN static void run_steps(const fake *f)
{
    heartbeat_msg beat = {0};
    step_result result = {0};
    int n_levels = f->epoch - 1;
    for (;;) {
        engine_frame frame = hear(f);
        if (frame.type == WIRE_PING) {
            say(f, WIRE_PONG, &control_heartbeat_record, &beat);
            continue;
        }
        if (frame.type == WIRE_LOG_LEVEL) {
            take_level(&frame);
            n_levels++;
            continue;
        }
        if (strcmp(f->script, "levels") == 0 && n_levels != 1)
            exit(10);
        usleep(50000);
        result.step_id++;
        say(f, WIRE_RESULT, &step_result_record, &result);
    }
}

PGD_NORETURN static void run_fake(const char *url)
{
    pgd_why why = {0};
    fake f = {.script = getenv("FAKE_WORKER"),
              .url = url,
              .hello = {.protocol_version = WIRE_VERSION, .device = "sim"}};
    load_done_msg done = {.n_kv_layers = 1,
                          .kv_layers = {{ATTENTION_FULL, 0, 64}},
                          .vocab_size = 100,
                          .memory_free_bytes = 1 << 30};
    kv_ready_msg ready = {0};
    read_spawn_line(&f);
    if (strcmp(f.script, "other version") == 0)
        run_other_version(&f);
    if (engine_link_dial(&f.link, url, 64 << 20, &why) != PGD_OK)
        exit(7);
    pgd_err err = strcmp(f.script, "no challenge") == 0
                      ? engine_link_adopt(f.link, 1, 64 << 20)
                      : handshake_run(f.hello.proof, f.link, &f.key, 5000, &why);
    if (err != PGD_OK)
        exit(8);
    if (strcmp(f.script, "wrong proof") == 0)
        f.hello.proof[0] ^= 1;
    say(&f, WIRE_HELLO, &control_hello_record, &f.hello);
    engine_frame frame = hear(&f);
    f.epoch = frame.worker_epoch;
    if (strcmp(f.script, "levels") == 0 && f.epoch > 1) {
        take_level(&frame);
        frame = hear(&f);
    }
    if (frame.type != WIRE_LOAD)
        exit(11);
    if (strcmp(f.script, "file is away for a while") == 0 && f.epoch == 2) {
        error_msg gone = {.err = PGD_ENOENT, .is_fatal = 2, .text = "no such file"};
        say(&f, WIRE_ERROR, &control_error_record, &gone);
        (void)hear(&f);
    }
    if (strcmp(f.script, "model is replaced") == 0)
        done.model_fingerprint[31] = (uint8_t)f.epoch;
    if (strcmp(f.script, "a layer is replaced") == 0)
        done.kv_layers[0].token_bytes += (int32_t)f.epoch;
    if (strcmp(f.script, "windows without a size") == 0)
        done.kv_layers[0].kind = ATTENTION_SLIDING;
    say(&f, WIRE_LOAD_DONE, &control_load_done_record, &done);
    (void)hear(&f); /* kv_config */
    say(&f, WIRE_KV_READY, &control_kv_ready_record, &ready);
    if (strcmp(f.script, "mute") == 0)
        run_mute(&f);
    run_steps(&f);
}

/* --- the engine ------------------------------------------------------------------------------- */

typedef struct rig {
    config cfg;
    worker_life *life;
    int wake_fd;
    char dir[64];
    uint64_t n_sent;
    uint64_t n_results;
    int n_lost;
    int n_failed;
    char why[512]; /* of the last loss or failure */
} rig;

static pgd_err on_ready(void *arg, const worker_facts *facts, pgd_why *why)
{
    (void)arg;
    (void)facts;
    (void)why;
    return PGD_OK;
}

static bool can_take_result(void *arg)
{
    (void)arg;
    return true;
}

static pgd_err on_result(void *arg, const step_result *result, pgd_why *why)
{
    rig *r = arg;
    (void)why;
    assert_int_equal(result->step_id, ++r->n_results);
    return PGD_OK;
}

static poison_verdict on_lost(void *arg, const char *why)
{
    rig *r = arg;
    r->n_lost++;
    snprintf(r->why, sizeof r->why, "%s", why);
    return POISON_UNKNOWN;
}

static void on_failed(void *arg, const char *why)
{
    rig *r = arg;
    r->n_failed++;
    snprintf(r->why, sizeof r->why, "%s", why);
}

static void rig_start(rig *r, const char *script)
{
    pgd_why why = {0};
    memset(r, 0, sizeof *r);
    config_init(&r->cfg);
    snprintf(r->cfg.device, sizeof r->cfg.device, "sim");
    snprintf(r->dir, sizeof r->dir, "/tmp/paged-test-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->cfg.runtime_dir, sizeof r->cfg.runtime_dir, "%s", r->dir);
    ssize_t n = readlink("/proc/self/exe", r->cfg.worker_path, sizeof r->cfg.worker_path - 1);
    assert_true(n > 0);
    r->cfg.worker_path[n] = 0;
    r->cfg.worker_stall_timeout_s = 1;
    assert_int_equal(setenv("FAKE_WORKER", script, 1), 0);
    r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_true(r->wake_fd >= 0);
    worker_life_opts opts = {.cfg = &r->cfg,
                             .wake_fd = r->wake_fd,
                             .on_ready = on_ready,
                             .can_take_result = can_take_result,
                             .on_result = on_result,
                             .on_lost = on_lost,
                             .on_failed = on_failed,
                             .arg = r};
    assert_int_equal(core_sizes_init(&opts.sizes, &r->cfg, NULL, &why), PGD_OK);
    if (worker_life_create(&r->life, &opts, &why) != PGD_OK)
        fail_msg("%s", why.text);
}

static void turn(rig *r)
{
    struct pollfd p[1 + WORKER_LIFE_MAX_FDS] = {{.fd = r->wake_fd, .events = POLLIN}};
    int fds[WORKER_LIFE_MAX_FDS];
    uint64_t count;
    worker_life_turn(r->life);
    int n = worker_life_get_fds(r->life, fds);
    for (int i = 0; i < n; i++)
        p[1 + i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    (void)poll(p, (nfds_t)(1 + n), worker_life_timeout_ms(r->life));
    (void)!read(r->wake_fd, &count, sizeof count);
}

#define TURN_UNTIL(r, cond)                                          \
    do {                                                             \
        uint64_t end_us_ = clock_now_us() + 20000000;                \
        while (turn(r), !(cond)) {                                   \
            if (clock_now_us() > end_us_)                            \
                fail_msg("waited 20 s for %s; %s", #cond, (r)->why); \
        }                                                            \
    } while (0)

static void rig_stop(rig *r)
{
    worker_life_stop(r->life);
    worker_life_destroy(r->life);
    close(r->wake_fd);
    assert_int_equal(rmdir(r->dir), 0);
}

static bool is_ready(const rig *r)
{
    return worker_life_get_state(r->life) == WORKER_LIFE_READY;
}

static void expect_why(const rig *r, const char *text)
{
    if (strstr(r->why, text) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", text, r->why);
}

/* A worker that was ready is killed, and its loss seen. */
static void lose_one(rig *r)
{
    int n_lost = r->n_lost;
    TURN_UNTIL(r, is_ready(r));
    assert_int_equal(kill((pid_t)worker_life_get_pid(r->life), SIGKILL), 0);
    TURN_UNTIL(r, r->n_lost > n_lost);
}

/* Keeps two steps out; nothing may be lost. */
static void step_for(rig *r, uint64_t duration_us)
{
    uint64_t end_us = clock_now_us() + duration_us;
    while (clock_now_us() < end_us) {
        while (is_ready(r) && r->n_sent < r->n_results + 2) {
            scheduler_output step = {.step_id = ++r->n_sent, .n_groups = 1};
            assert_true(worker_life_send_step(r->life, &step));
        }
        turn(r);
        if (r->n_lost > 0)
            fail_msg("%s", r->why);
    }
}

/* --- tests ------------------------------------------------------------------------------------ */

static rig rig_;

/* Whoever finds the socket cannot pose as the worker. */
static void test_worker_life_wrong_proof(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "wrong proof");
    TURN_UNTIL(r, r->n_lost == 1);
    expect_why(r, "expected the proof of the same worker token");
    assert_int_equal(r->n_failed, 0);
    rig_stop(r);
}

static void test_worker_life_no_challenge(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "no challenge");
    TURN_UNTIL(r, r->n_lost == 1);
    expect_why(r, "message hello is out of turn");
    rig_stop(r);
}

/* Binaries of two builds: no restart mends that. */
static void test_worker_life_other_version(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "other version");
    TURN_UNTIL(r, r->n_failed == 1);
    expect_why(r, "expected protocol version");
    assert_int_equal(worker_life_get_facts(r->life)->fatal_err, PGD_EUNSUPPORTED);
    assert_int_equal(restart_policy_n_restarts(&worker_life_get_facts(r->life)->restarts), 0);
    rig_stop(r);
}

static void test_worker_life_model_is_replaced(void **state)
{
    (void)state;
    rig *r = &rig_;
    static const char *const scripts[] = {"model is replaced", "a layer is replaced"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(scripts); i++) {
        rig_start(r, scripts[i]);
        lose_one(r);
        TURN_UNTIL(r, r->n_failed == 1);
        expect_why(r, "the model changed while paged was running");
        rig_stop(r);
    }
}

/* Layers that contradict themselves. */
static void test_worker_life_bad_layers(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "windows without a size");
    TURN_UNTIL(r, r->n_failed == 1);
    expect_why(r, "got 0 with sliding window attention");
    rig_stop(r);
}

/* What is fatal at the first start is not once the model has been served. */
static void test_worker_life_file_is_away(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "file is away for a while");
    lose_one(r);
    TURN_UNTIL(r, r->n_lost == 2);
    expect_why(r, "no such file");
    TURN_UNTIL(r, is_ready(r));
    assert_int_equal(r->n_failed, 0);
    rig_stop(r);
}

/* Its heart beats, but nobody is at home. */
static void test_worker_life_mute_when_idle(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "mute");
    TURN_UNTIL(r, is_ready(r));
    TURN_UNTIL(r, r->n_lost == 1);
    expect_why(r, "did not answer a ping");
    rig_stop(r);
}

/* Each step has its own time: many short ones in a row may take longer than step_timeout. */
static void test_worker_life_steps_in_a_row(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "steps");
    r->cfg.worker_stall_timeout_s = 3;
    r->cfg.step_timeout_s = 3;
    TURN_UNTIL(r, is_ready(r));
    step_for(r, 4500000);
    assert_true(r->n_results > 2);
    rig_stop(r);
}

/* Engine and worker are stopped for longer than any timeout, as a frozen container is, and the
 * engine wakes first: its own sleep is not the worker's fault. */
static void test_worker_life_both_stopped(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "steps");
    r->cfg.worker_stall_timeout_s = 3;
    r->cfg.step_timeout_s = 3;
    TURN_UNTIL(r, is_ready(r));
    step_for(r, 200000);
    pid_t worker = (pid_t)worker_life_get_pid(r->life);
    pid_t engine = getpid();
    pid_t helper = fork();
    assert_true(helper >= 0);
    if (helper == 0) {
        (void)kill(worker, SIGSTOP);
        (void)kill(engine, SIGSTOP);
        sleep(6);
        (void)kill(engine, SIGCONT);
        usleep(300000);
        (void)kill(worker, SIGCONT);
        _exit(0);
    }
    uint64_t n_results = r->n_results;
    step_for(r, 7000000);
    assert_int_equal(waitpid(helper, NULL, 0), helper);
    assert_true(r->n_results > n_results);
    rig_stop(r);
}

/* Something cleaned /tmp: the next life makes the directory of the sockets anew. */
static void test_worker_life_directory_is_gone(void **state)
{
    (void)state;
    rig *r = &rig_;
    char command[128];
    rig_start(r, "steps");
    TURN_UNTIL(r, is_ready(r));
    snprintf(command, sizeof command, "rm -r %.63s", r->dir);
    assert_int_equal(system(command), 0);
    lose_one(r);
    TURN_UNTIL(r, is_ready(r));
    assert_int_equal(r->n_lost, 1);
    rig_stop(r);
}

/* The engine's log level goes to the worker while it runs, and to the next one. */
static void test_worker_life_log_level(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "levels");
    TURN_UNTIL(r, is_ready(r));
    log_set_level(LOG_WARN);
    turn(r);
    step_for(r, 200000);
    assert_true(r->n_results > 0);
    lose_one(r);
    TURN_UNTIL(r, is_ready(r));
    assert_int_equal(r->n_lost, 1);
    r->n_sent = r->n_results = r->n_lost = 0;
    step_for(r, 200000);
    assert_true(r->n_results > 0);
    rig_stop(r);
    log_set_level(LOG_ERROR);
}

/* However often it changes, the queue to a worker that is busy keeps room for steps. */
static void test_worker_life_many_log_levels(void **state)
{
    (void)state;
    rig *r = &rig_;
    rig_start(r, "mute");
    r->cfg.worker_stall_timeout_s = 100;
    TURN_UNTIL(r, is_ready(r));
    for (int i = 0; i < 1000; i++) {
        log_set_level(i % 2 != 0 ? LOG_ERROR : LOG_WARN);
        worker_life_turn(r->life);
    }
    step_for(r, 200000);
    assert_int_equal(r->n_sent, 2);
    rig_stop(r);
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], "--connect") == 0)
        run_fake(argv[2]);
    log_init("test", LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worker_life_wrong_proof),
        cmocka_unit_test(test_worker_life_no_challenge),
        cmocka_unit_test(test_worker_life_other_version),
        cmocka_unit_test(test_worker_life_model_is_replaced),
        cmocka_unit_test(test_worker_life_bad_layers),
        cmocka_unit_test(test_worker_life_file_is_away),
        cmocka_unit_test(test_worker_life_mute_when_idle),
        cmocka_unit_test(test_worker_life_steps_in_a_row),
        cmocka_unit_test(test_worker_life_both_stopped),
        cmocka_unit_test(test_worker_life_directory_is_gone),
        cmocka_unit_test(test_worker_life_log_level),
        cmocka_unit_test(test_worker_life_many_log_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
