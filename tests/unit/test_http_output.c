/* One turn's writes arrive together and in order, also when the client takes little at a time; what
 * was given and taken is counted; the end is told once everything is out, or cannot be. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/http/http_output.h"

typedef struct rig {
    uv_loop_t loop;
    http_output_queue queue;
    uv_pipe_t pipe;
    http_output out;
    int client_fd;
    int n_told;
    int status;
    bool adds_more; /* on_flushed commits again, as a pipelined request does */
} rig;

static void on_flushed(void *arg, int status)
{
    rig *r = arg;
    r->n_told++;
    r->status = status;
    if (r->adds_more) {
        r->adds_more = false;
        strbuf_append_str(&r->out.bytes, "next");
        http_output_commit(&r->out);
    }
}

static void open_rig(rig *r)
{
    int fds[2];
    memset(r, 0, sizeof(*r));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    r->client_fd = fds[0];
    assert_int_equal(uv_loop_init(&r->loop), 0);
    assert_int_equal(uv_pipe_init(&r->loop, &r->pipe, 0), 0);
    assert_int_equal(uv_pipe_open(&r->pipe, fds[1]), 0);
    http_output_queue_init(&r->queue, &r->loop, r);
    http_output_init(&r->out, &r->queue, (uv_stream_t *)&r->pipe, on_flushed, r);
}

static void close_rig(rig *r)
{
    http_output_close(&r->out);
    uv_close((uv_handle_t *)&r->pipe, NULL);
    http_output_queue_close(&r->queue, NULL);
    uv_run(&r->loop, UV_RUN_DEFAULT);
    http_output_deinit(&r->out);
    uv_run(&r->loop, UV_RUN_DEFAULT); /* until the pool has freed what was large */
    assert_int_equal(uv_loop_close(&r->loop), 0);
    if (r->client_fd >= 0)
        close(r->client_fd);
}

static void turn(rig *r)
{
    uv_run(&r->loop, UV_RUN_NOWAIT);
}

static void test_http_output_gathers_a_turn(void **state)
{
    (void)state;
    rig r;
    char buf[64];
    open_rig(&r);
    strbuf_append_str(&r.out.bytes, "one ");
    http_output_commit(&r.out);
    strbuf_append_str(&r.out.bytes, "two");
    http_output_commit(&r.out);
    assert_int_equal(recv(r.client_fd, buf, sizeof(buf), 0), -1); /* nothing before the turn ends */
    assert_int_equal(http_output_unsent_bytes(&r.out), 7);
    turn(&r);
    assert_int_equal(recv(r.client_fd, buf, sizeof(buf), 0), 7);
    assert_memory_equal(buf, "one two", 7);
    assert_int_equal(r.n_told, 1);
    assert_int_equal(r.status, 0);
    assert_int_equal(http_output_unsent_bytes(&r.out), 0);
    assert_int_equal(http_output_taken_bytes(&r.out), 7);
    http_output_commit(&r.out); /* nothing to send: told all the same, by the turn */
    assert_int_equal(r.n_told, 1);
    r.adds_more = true;
    turn(&r);
    assert_int_equal(r.n_told, 2);
    assert_int_equal(recv(r.client_fd, buf, sizeof(buf), 0), -1); /* of the next turn */
    turn(&r);
    assert_int_equal(r.n_told, 3);
    assert_int_equal(recv(r.client_fd, buf, sizeof(buf), 0), 4);
    assert_false(uv_is_active((uv_handle_t *)&r.queue.flusher)); /* an idle loop may sleep */
    close_rig(&r);
}

/* Far more than the socket holds, written while it drains: every byte once and in order. */
static void test_http_output_keeps_order_with_a_slow_client(void **state)
{
    (void)state;
    rig r;
    open_rig(&r);
    uint64_t n_written = 0, n_read = 0;
    static const uint64_t n_total = 3u << 20;
    while (n_read < n_total) {
        for (int i = 0; i < 3 && n_written < n_total; i++) {
            char piece[7919];
            for (size_t k = 0; k < sizeof(piece); k++)
                piece[k] = (char)((n_written + k) * 31 >> 3);
            strbuf_append(&r.out.bytes, piece, sizeof(piece));
            http_output_commit(&r.out);
            n_written += sizeof(piece);
        }
        turn(&r);
        assert_true(http_output_given_bytes(&r.out) == n_written);
        assert_true(http_output_taken_bytes(&r.out) >= n_read);
        char buf[5003];
        ssize_t n = recv(r.client_fd, buf, sizeof(buf), 0);
        for (ssize_t k = 0; k < n; k++)
            assert_true(buf[k] == (char)((n_read + (uint64_t)k) * 31 >> 3));
        n_read += n > 0 ? (uint64_t)n : 0;
        assert_int_equal(r.status, 0);
    }
    close_rig(&r);
}

/* A body of its own goes out behind what was written, whole, and never much of it in one turn. */
static void test_http_output_sends_what_it_is_given_in_pieces(void **state)
{
    (void)state;
    rig r;
    static const size_t n_total = 5u << 20;
    static char buf[1 << 20];
    strbuf body;
    open_rig(&r);
    strbuf_init(&body);
    for (size_t k = 0; k < n_total; k++)
        strbuf_append_char(&body, (char)(k * 31 >> 3));
    strbuf_append_str(&r.out.bytes, "head");
    http_output_give(&r.out, &body);
    assert_null(body.data);
    http_output_commit(&r.out);
    assert_true(http_output_given_bytes(&r.out) == n_total + 4);
    assert_true(http_output_unsent_bytes(&r.out) == n_total + 4);
    size_t n_read = 0;
    for (int n_turns = 0; n_read < n_total + 4; n_turns++) {
        assert_true(n_turns < 100000);
        uint64_t n_taken = http_output_taken_bytes(&r.out);
        turn(&r);
        assert_true(http_output_taken_bytes(&r.out) - n_taken <= 2 * 262144);
        for (ssize_t n; (n = recv(r.client_fd, buf, sizeof(buf), 0)) > 0;)
            for (ssize_t k = 0; k < n; k++, n_read++)
                assert_true(n_read < 4 ? buf[k] == "head"[n_read]
                                       : buf[k] == (char)((n_read - 4) * 31 >> 3));
    }
    turn(&r);
    assert_int_equal(r.n_told, 1);
    assert_int_equal(r.status, 0);
    assert_int_equal(http_output_unsent_bytes(&r.out), 0);
    assert_true(http_output_taken_bytes(&r.out) == n_total + 4);
    close_rig(&r);
}

/* What is left of a large body is freed, on the pool, when the connection goes. */
static void test_http_output_drops_what_it_was_given(void **state)
{
    (void)state;
    rig r;
    strbuf body;
    open_rig(&r);
    strbuf_init(&body);
    for (size_t k = 0; k < (5u << 20); k++)
        strbuf_append_char(&body, 'x');
    http_output_give(&r.out, &body);
    http_output_commit(&r.out);
    for (int i = 0; i < 5; i++)
        turn(&r);
    assert_true(http_output_unsent_bytes(&r.out) > 0);
    close_rig(&r);
}

static void test_http_output_tells_that_the_client_left(void **state)
{
    (void)state;
    rig r;
    open_rig(&r);
    close(r.client_fd);
    r.client_fd = -1;
    strbuf_append_str(&r.out.bytes, "lost");
    http_output_commit(&r.out);
    turn(&r);
    assert_int_equal(r.n_told, 1);
    assert_int_equal(r.status, UV_EPIPE);
    close_rig(&r);
}

static void test_http_output_tells_that_memory_ran_out(void **state)
{
    (void)state;
    rig r;
    open_rig(&r);
    strbuf_append(&r.out.bytes, NULL, SIZE_MAX);
    http_output_commit(&r.out);
    turn(&r);
    assert_int_equal(r.n_told, 1);
    assert_int_equal(r.status, UV_ENOMEM);
    close_rig(&r);
}

static void test_http_output_is_silent_once_closed(void **state)
{
    (void)state;
    rig r;
    char buf[64];
    open_rig(&r);
    strbuf_append_str(&r.out.bytes, "late");
    http_output_commit(&r.out);
    http_output_close(&r.out);
    http_output_commit(&r.out);
    turn(&r);
    assert_int_equal(r.n_told, 0);
    assert_int_equal(recv(r.client_fd, buf, sizeof(buf), 0), -1);
    close_rig(&r);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_http_output_gathers_a_turn),
        cmocka_unit_test(test_http_output_keeps_order_with_a_slow_client),
        cmocka_unit_test(test_http_output_sends_what_it_is_given_in_pieces),
        cmocka_unit_test(test_http_output_drops_what_it_was_given),
        cmocka_unit_test(test_http_output_tells_that_the_client_left),
        cmocka_unit_test(test_http_output_tells_that_memory_ran_out),
        cmocka_unit_test(test_http_output_is_silent_once_closed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
