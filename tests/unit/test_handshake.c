/* A listening worker and the engines that come to it, good and bad, over real sockets. The worker's
 * side runs in a thread; each test plays the engine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/thread.h"
#include "engine/core/worker_link.h"
#include "proto/scheduler_output.h"
#include "worker/handshake.h"

#define EPOCH     41
#define MAX_FRAME 100000

static char dir_[] = "/tmp/paged-test-XXXXXX";
static char url_[64];
static int wake_fd_;

/* --- the worker ------------------------------------------------------------------------------- */

typedef struct waiting {
    attach_key key;
    pthread_t thread;
    engine_link *link;
    uint8_t proof[CONTROL_PROOF_BYTES];
    pgd_err err;
} waiting;

static void await_engine(void *arg)
{
    waiting *w = arg;
    w->err = handshake_await(&w->link, w->proof, url_, &w->key, NULL);
}

static void listen_with(waiting *w, const char *key)
{
    memset(w, 0, sizeof *w);
    w->key.n_bytes = strlen(key);
    memcpy(w->key.data, key, w->key.n_bytes);
    assert_int_equal(thread_start(&w->thread, "worker", await_engine, w), PGD_OK);
}

/* --- the engine ------------------------------------------------------------------------------- */

typedef struct caller {
    worker_link *link;
    attach_key key;
    attach_terms terms;
} caller;

static void wait_woken(void)
{
    uint64_t count;
    struct pollfd p = {.fd = wake_fd_, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 20000), 1);
    (void)!read(wake_fd_, &count, sizeof count);
}

/* PGD_ECLOSED: the worker has parted. */
static pgd_err hear(caller *c, worker_frame *f)
{
    pgd_err err;
    while ((err = worker_link_recv(c->link, f, NULL)) == PGD_EAGAIN) {
        if (worker_link_is_lost(c->link))
            return PGD_ECLOSED;
        wait_woken();
    }
    return err;
}

static void hang_up(caller *c)
{
    worker_link_close(c->link);
    c->link = NULL;
}

/* Connects and takes the challenge; again as long as the worker is still busy with the caller before. */
static void call(caller *c, const char *key)
{
    pgd_why why = {0};
    worker_frame f;
    challenge_msg challenge;
    memset(c, 0, sizeof *c);
    c->key.n_bytes = strlen(key);
    memcpy(c->key.data, key, c->key.n_bytes);
    for (int i = 0; c->link == NULL && i < 400; i++) {
        worker_link_opts o = {
            .dial = url_, .worker_epoch = EPOCH, .max_recv_bytes = 1 << 20, .wake_fd = wake_fd_};
        if (worker_link_open(&c->link, &o, &why) != PGD_OK)
            fail_msg("%s", why.text);
        if (hear(c, &f) != PGD_OK) {
            hang_up(c);
            usleep(50000);
        }
    }
    assert_non_null(c->link);
    assert_int_equal(f.type, WIRE_CHALLENGE);
    assert_int_equal(control_decode_challenge(&challenge, f.data, f.n_bytes, NULL), PGD_OK);
    memcpy(c->terms.worker_nonce, challenge.nonce, sizeof challenge.nonce);
    c->terms.worker_epoch = EPOCH;
    c->terms.max_frame_bytes = MAX_FRAME;
    assert_int_equal(attach_draw_nonce(c->terms.engine_nonce, NULL), PGD_OK);
}

static attach_msg make_attach(const caller *c)
{
    attach_msg m = {.max_frame_bytes = c->terms.max_frame_bytes};
    memcpy(m.nonce, c->terms.engine_nonce, sizeof m.nonce);
    assert_int_equal(attach_prove(m.proof, &c->key, ATTACH_ENGINE, &c->terms), PGD_OK);
    return m;
}

static void send_attach(caller *c, const attach_msg *m)
{
    assert_int_equal(worker_link_send(c->link, WIRE_ATTACH, &control_attach_record, m), PGD_OK);
}

static void expect_refused(caller *c, const char *text)
{
    worker_frame f;
    error_msg m;
    assert_int_equal(hear(c, &f), PGD_OK);
    assert_int_equal(f.type, WIRE_ERROR);
    assert_int_equal(control_decode_error(&m, f.data, f.n_bytes, NULL), PGD_OK);
    if (strstr(m.text, text) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", text, m.text);
    hang_up(c);
}

static void expect_hung_up(caller *c)
{
    worker_frame f;
    assert_int_equal(hear(c, &f), PGD_ECLOSED);
    hang_up(c);
}

/* NNG drops the connection, or the link the frame. */
static void expect_too_long(caller *c)
{
    worker_frame f;
    error_msg m;
    if (hear(c, &f) == PGD_OK) {
        assert_int_equal(control_decode_error(&m, f.data, f.n_bytes, NULL), PGD_OK);
        assert_non_null(strstr(m.text, "expected a frame of at most 4096 bytes"));
    }
    hang_up(c);
}

/* A frame of about 4 bytes per block. */
static void send_blocks(caller *c, int32_t n_blocks)
{
    static block_id blocks[MAX_FRAME];
    scheduler_output step = {
        .step_id = 1, .n_groups = 1, .n_blocks_to_zero = n_blocks, .blocks_to_zero = blocks};
    assert_int_equal(worker_link_send(c->link, WIRE_STEP, &scheduler_output_record, &step), PGD_OK);
}

/* That of the attach holds now, in a connection that was made under another one. */
static void expect_frame_limit(caller *c, engine_link *link)
{
    engine_frame f;
    worker_frame none;
    send_blocks(c, (MAX_FRAME - 1000) / 4);
    assert_int_equal(engine_link_recv_within(link, &f, 10000, NULL), PGD_OK);
    assert_int_equal(f.type, WIRE_STEP);
    assert_in_range(f.n_bytes, MAX_FRAME - 1000, MAX_FRAME);
    send_blocks(c, MAX_FRAME / 4);
    pgd_err err = engine_link_recv_within(link, &f, 10000, NULL);
    assert_true(err == PGD_ECLOSED || err == PGD_EPROTO); /* dropped by NNG, or by the link */
    if (err == PGD_ECLOSED)
        assert_int_equal(hear(c, &none), PGD_ECLOSED);
}

/* A good engine is let in, whatever came before it. */
static void attach_well(waiting *w, const char *key)
{
    caller c;
    worker_frame f;
    hello_msg hello = {.protocol_version = WIRE_VERSION};
    hello_msg got;
    call(&c, key);
    attach_msg m = make_attach(&c);
    send_attach(&c, &m);
    thread_join(w->thread);
    assert_int_equal(w->err, PGD_OK);
    assert_int_equal(attach_check(w->proof, &c.key, ATTACH_WORKER, &c.terms, NULL), PGD_OK);
    memcpy(hello.proof, w->proof, sizeof hello.proof);
    assert_int_equal(engine_link_send(w->link, WIRE_HELLO, &control_hello_record, &hello, true),
                     PGD_OK);
    assert_int_equal(hear(&c, &f), PGD_OK);
    assert_int_equal(f.type, WIRE_HELLO);
    assert_int_equal(control_decode_hello(&got, f.data, f.n_bytes, NULL), PGD_OK);
    expect_frame_limit(&c, w->link);
    hang_up(&c);
    engine_link_close(w->link);
}

/* --- tests ------------------------------------------------------------------------------------ */

static const char KEY[] = "a key of more than thirty-two bytes";
static const char OTHER[] = "b key of more than thirty-two bytes";

static void test_handshake_refusals(void **state)
{
    (void)state;
    waiting w;
    caller c;
    listen_with(&w, KEY);
    call(&c, OTHER);
    attach_msg m = make_attach(&c);
    send_attach(&c, &m);
    expect_refused(&c, "expected the proof of the same worker token");
    call(&c, "");
    m = make_attach(&c);
    send_attach(&c, &m);
    expect_refused(&c, "expected the proof of the same worker token");
    /* A proof for other terms than the frame has. */
    call(&c, KEY);
    m = make_attach(&c);
    m.max_frame_bytes++;
    send_attach(&c, &m);
    expect_refused(&c, "expected the proof");
    call(&c, KEY);
    c.terms.worker_epoch++;
    m = make_attach(&c);
    send_attach(&c, &m);
    expect_refused(&c, "expected the proof");
    /* What was good once. */
    call(&c, KEY);
    m = make_attach(&c);
    hang_up(&c);
    call(&c, KEY);
    send_attach(&c, &m);
    expect_refused(&c, "expected the proof");
    attach_well(&w, KEY);
}

/* Whoever has no key cannot have the worker make the proof for him. */
static void test_handshake_no_reflection(void **state)
{
    (void)state;
    waiting w;
    caller c;
    listen_with(&w, KEY);
    call(&c, KEY);
    attach_msg m = make_attach(&c);
    assert_int_equal(attach_prove(m.proof, &c.key, ATTACH_WORKER, &c.terms), PGD_OK);
    send_attach(&c, &m);
    expect_refused(&c, "expected the proof");
    attach_well(&w, KEY);
}

static void test_handshake_out_of_turn(void **state)
{
    (void)state;
    waiting w;
    caller c;
    load_msg load = {.block_size = 16,
                     .max_model_len = 1,
                     .max_num_seqs = 1,
                     .max_num_batched_tokens = 1,
                     .kv_dtype = 0};
    listen_with(&w, "");
    call(&c, "");
    assert_int_equal(worker_link_send(c.link, WIRE_LOAD, &control_load_record, &load), PGD_OK);
    expect_refused(&c, "expected message attach, got load");
    call(&c, "");
    assert_int_equal(worker_link_send(c.link, WIRE_SHUTDOWN, NULL, NULL), PGD_OK);
    expect_refused(&c, "expected message attach, got shutdown");
    call(&c, "");
    attach_msg m = make_attach(&c);
    m.max_frame_bytes = 1;
    send_attach(&c, &m);
    expect_refused(&c, "attach.max_frame_bytes: expected 4096..");
    call(&c, "");
    send_blocks(&c, 2000); /* longer than anything before attach */
    expect_too_long(&c);
    call(&c, "");
    hang_up(&c);
    attach_well(&w, "");
}

/* One that says nothing is sent away, so that others get their turn. */
static void test_handshake_silence(void **state)
{
    (void)state;
    waiting w;
    caller c;
    listen_with(&w, "");
    call(&c, "");
    uint64_t start_us = clock_now_us();
    expect_hung_up(&c);
    assert_in_range(clock_now_us() - start_us, 3000000, 15000000);
    attach_well(&w, "");
}

/* Nor does one stay that was refused and talks on. */
static void test_handshake_chatter(void **state)
{
    (void)state;
    waiting w;
    caller c;
    listen_with(&w, "");
    call(&c, "");
    uint64_t start_us = clock_now_us();
    while (!worker_link_is_lost(c.link)) {
        (void)!worker_link_send(c.link, WIRE_PING, NULL, NULL);
        usleep(10000);
        assert_in_range(clock_now_us() - start_us, 0, 15000000);
    }
    hang_up(&c);
    attach_well(&w, "");
}

/* After the attach the socket is gone from its path, and the worker's end of the link may be closed
 * without harm to whoever listens there now. */
static void test_handshake_path(void **state)
{
    (void)state;
    waiting w;
    waiting next;
    struct stat st;
    listen_with(&w, KEY);
    attach_well(&w, KEY);
    assert_int_not_equal(stat(attach_ipc_path(url_), &st), 0);
    listen_with(&w, KEY);
    caller c;
    call(&c, KEY);
    attach_msg m = make_attach(&c);
    send_attach(&c, &m);
    thread_join(w.thread);
    listen_with(&next, KEY);
    while (stat(attach_ipc_path(url_), &st) != 0)
        usleep(10000);
    engine_link_close(w.link);
    assert_int_equal(stat(attach_ipc_path(url_), &st), 0);
    hang_up(&c);
    attach_well(&next, KEY);
}

/* Two engines at once: the second is sent away before a word. */
static void test_handshake_second_caller(void **state)
{
    (void)state;
    waiting w;
    caller c;
    worker_link *second;
    worker_frame f;
    listen_with(&w, KEY);
    call(&c, KEY);
    worker_link_opts o = {
        .dial = url_, .worker_epoch = 1, .max_recv_bytes = 1 << 20, .wake_fd = wake_fd_};
    assert_int_equal(worker_link_open(&second, &o, NULL), PGD_OK);
    while (!worker_link_is_lost(second))
        wait_woken();
    assert_int_equal(worker_link_recv(second, &f, NULL), PGD_EAGAIN);
    worker_link_close(second);
    hang_up(&c);
    attach_well(&w, KEY);
}

static int make_dir(void **state)
{
    (void)state;
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (mkdtemp(dir_) == NULL || wake_fd_ < 0)
        return -1;
    snprintf(url_, sizeof url_, "ipc://%s/w.sock", dir_);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    close(wake_fd_);
    return rmdir(dir_);
}

int main(void)
{
    log_init("test", LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_handshake_refusals),
        cmocka_unit_test(test_handshake_no_reflection),
        cmocka_unit_test(test_handshake_out_of_turn),
        cmocka_unit_test(test_handshake_silence),
        cmocka_unit_test(test_handshake_chatter),
        cmocka_unit_test(test_handshake_path),
        cmocka_unit_test(test_handshake_second_caller),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
