/* Against a scripted server: a thread on a Unix socket that reads a request, then writes pieces. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/thread.h"
#include "engine/http/http_client.h"

#define MAX_CONNS 8

typedef struct script {
    const char *pieces[12]; /* written one after the other; NULL ends */
    size_t step;            /* > 0: every piece is cut into this many bytes, some 100 us apart */
    bool hold;              /* do not close behind the last one until the client does */
    int n_answers;          /* of this connection; 0 = 1 */
} script;

typedef struct server {
    char path[100];
    int listener;
    pthread_t thread;
    script conns[MAX_CONNS]; /* [n_conns] one connection after the other */
    int n_conns;
    char request[4096]; /* the last one */
} server;

static void write_piece(int fd, const char *piece, size_t step)
{
    size_t n = strlen(piece);
    for (size_t at = 0; at < n;) {
        size_t len = step > 0 ? PGD_MIN(step, n - at) : n - at;
        if (send(fd, piece + at, len, MSG_NOSIGNAL) < 0)
            return;
        at += len;
        if (step > 0)
            usleep(100);
    }
}

static bool read_request(server *s, int fd)
{
    size_t n = 0;
    while (n < sizeof(s->request) - 1) {
        ssize_t got = read(fd, s->request + n, sizeof(s->request) - 1 - n);
        if (got <= 0)
            return false;
        n += (size_t)got;
        s->request[n] = '\0';
        if (strstr(s->request, "\r\n\r\n") != NULL)
            return true;
    }
    return true;
}

static void serve(void *arg)
{
    server *s = arg;
    for (int c = 0; c < s->n_conns; c++) {
        const script *k = &s->conns[c];
        int fd = accept(s->listener, NULL, NULL);
        if (fd < 0)
            return;
        for (int a = 0; a < PGD_MAX(k->n_answers, 1) && read_request(s, fd); a++) {
            for (size_t i = 0; i < PGD_ARRAY_LEN(k->pieces) && k->pieces[i] != NULL; i++)
                write_piece(fd, k->pieces[i], k->step);
        }
        char rest;
        if (k->hold)
            (void)!read(fd, &rest, 1);
        close(fd);
    }
}

static void server_start(server *s)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(s->path, sizeof(s->path), "/tmp/paged-test-client-%ld", (long)getpid());
    unlink(s->path);
    snprintf(a.sun_path, sizeof(a.sun_path), "%s", s->path);
    s->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(s->listener >= 0);
    assert_int_equal(bind(s->listener, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(listen(s->listener, 16), 0);
    assert_int_equal(thread_start(&s->thread, "server", serve, s), PGD_OK);
}

static void server_stop(server *s)
{
    shutdown(s->listener, SHUT_RDWR); /* ends an accept */
    thread_join(s->thread);
    close(s->listener);
    unlink(s->path);
}

/* One fetch through a fresh client. */
static pgd_err fetch_once(server *s, strbuf *body, size_t max_bytes, int *status, pgd_why *why)
{
    uv_loop_t loop;
    http_client *c;
    http_target target;
    char url[128];
    snprintf(url, sizeof(url), "unix:%s", s->path);
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(http_target_parse(&target, url, NULL), PGD_OK);
    assert_int_equal(http_client_create(&c, &loop, &target, 300000, NULL), PGD_OK);
    pgd_err err = http_fetch(c, "GET", "/x", "X-Test: 1\r\n", body, max_bytes, status, why);
    http_client_destroy(c);
    assert_int_equal(uv_loop_close(&loop), 0);
    return err;
}

#define OK_HEAD "HTTP/1.1 200 OK\r\n"

static void test_http_client_answers(void **state)
{
    (void)state;
    static const struct {
        const char *pieces[6];
        bool hold;
        pgd_err err;
        int status;
        const char *body;
    } rows[] = {
        {{OK_HEAD "Content-Length: 5\r\n\r\nhello"}, true, PGD_OK, 200, "hello"},
        {{OK_HEAD "Transfer-Encoding: chunked\r\n\r\n", "3\r\nabc\r\n", "2;x=y\r\nde\r\n",
          "0\r\n\r\n"},
         true,
         PGD_OK,
         200,
         "abcde"},
        {{OK_HEAD "Connection: close\r\n\r\n", "to the end"}, false, PGD_OK, 200, "to the end"},
        {{"HTTP/1.0 200 OK\r\n\r\nold"}, false, PGD_OK, 200, "old"},
        {{"HTTP/1.1 204 No Content\r\n\r\n"}, true, PGD_OK, 204, ""},
        {{"HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 429 Slow\r\nContent-Length: 2\r\n\r\nno"},
         true,
         PGD_OK,
         429,
         "no"},
        {{OK_HEAD "Content-Length: 0\r\n\r\n"}, true, PGD_OK, 200, ""},
        {{OK_HEAD "Content-Length: 9\r\n\r\nhello"}, false, PGD_ECLOSED, 200, "hello"},
        {{OK_HEAD "Transfer-Encoding: chunked\r\n\r\n3\r\nab"}, false, PGD_ECLOSED, 200, "ab"},
        {{OK_HEAD "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"},
         false,
         PGD_ECLOSED,
         200,
         "abc"},
        {{OK_HEAD "Transfer-Encoding: chunked\r\n\r\nzz\r\n"}, true, PGD_EPROTO, 200, ""},
        {{OK_HEAD}, false, PGD_ECLOSED, 0, ""},
        {{""}, false, PGD_ECLOSED, 0, ""},
        {{"garbage\r\n\r\n"}, true, PGD_EPROTO, 0, ""},
        {{"SSH-2.0-OpenSSH\r\n"}, true, PGD_EPROTO, 0, ""},
        {{OK_HEAD "Content-Length: -1\r\n\r\n"}, true, PGD_EPROTO, 0, ""},
        {{""}, true, PGD_ETIMEDOUT, 0, ""},
        {{OK_HEAD "Content-Length: 9\r\n\r\nhello"}, true, PGD_ETIMEDOUT, 200, "hello"},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        for (size_t step = 0; step <= 7; step += step == 0 ? 1 : 6) {
            server s = {.n_conns = 1};
            strbuf body;
            pgd_why why = {0};
            int status;
            memcpy(s.conns[0].pieces, rows[i].pieces, sizeof(rows[i].pieces));
            s.conns[0].step = step;
            s.conns[0].hold = rows[i].hold;
            server_start(&s);
            strbuf_init(&body);
            strbuf_append_str(&body, "");
            pgd_err err = fetch_once(&s, &body, 1000, &status, &why);
            if (err != rows[i].err || status != rows[i].status ||
                strcmp(body.data, rows[i].body) != 0)
                fail_msg("row %zu step %zu: err %d status %d body \"%s\": %s", i, step, err, status,
                         body.data, why.text);
            assert_true(err == PGD_OK || why.text[0] != '\0');
            strbuf_deinit(&body);
            server_stop(&s);
        }
    }
}

static void test_http_client_request_text(void **state)
{
    (void)state;
    server s = {.n_conns = 1, .conns = {{.pieces = {OK_HEAD "Content-Length: 0\r\n\r\n"}}}};
    strbuf body;
    int status;
    server_start(&s);
    strbuf_init(&body);
    assert_int_equal(fetch_once(&s, &body, 10, &status, NULL), PGD_OK);
    server_stop(&s);
    assert_string_equal(
        s.request, "GET /x HTTP/1.1\r\nHost: localhost\r\nUser-Agent: paged/" PGD_VERSION_STRING
                   "\r\nX-Test: 1\r\n\r\n");
    strbuf_deinit(&body);
}

static void test_http_client_is_bounded(void **state)
{
    (void)state;
    server s = {.n_conns = 1,
                .conns = {{.pieces = {OK_HEAD "Content-Length: 11\r\n\r\nhello world"}}}};
    strbuf body;
    pgd_why why = {0};
    int status;
    server_start(&s);
    strbuf_init(&body);
    assert_int_equal(fetch_once(&s, &body, 10, &status, &why), PGD_ERANGE);
    assert_true(body.n_bytes <= 10);
    server_stop(&s);

    static char big[80000];
    memset(big, 'x', sizeof(big) - 1);
    s = (server){.n_conns = 1, .conns = {{.pieces = {OK_HEAD "X-Big: ", big, "\r\n\r\n"}}}};
    server_start(&s);
    assert_int_equal(fetch_once(&s, &body, 10, &status, &why), PGD_EPROTO);
    server_stop(&s);

    /* Always moving, never done: the parser takes a chunk's extension without a word. */
    s = (server){
        .n_conns = 1,
        .conns = {{.pieces = {OK_HEAD "Transfer-Encoding: chunked\r\n\r\n1;", big}, .step = 1}}};
    server_start(&s);
    assert_int_equal(fetch_once(&s, &body, 10, &status, &why), PGD_ETIMEDOUT);
    server_stop(&s);
    strbuf_deinit(&body);
}

static void test_http_client_unreachable(void **state)
{
    (void)state;
    server s = {.path = "/tmp/paged-test-nothing-here"};
    strbuf body;
    pgd_why why = {0};
    int status = -1;
    strbuf_init(&body);
    assert_int_equal(fetch_once(&s, &body, 10, &status, &why), PGD_EIO);
    assert_int_equal(status, 0);
    strbuf_deinit(&body);
}

/* --- many calls ------------------------------------------------------------------------------- */

typedef struct probe {
    http_call call;
    int n_ends;
    http_call_end end;
    size_t n_body_bytes;
    bool cancels;
    http_client *again; /* started once more on it when the first ends */
} probe;

static void on_body(http_call *call, const char *data, size_t n_bytes)
{
    probe *p = call->arg;
    (void)data;
    p->n_body_bytes += n_bytes;
    if (p->cancels)
        http_client_cancel(call);
}

static void on_end(http_call *call, http_call_end end, const char *detail)
{
    probe *p = call->arg;
    (void)detail;
    p->n_ends++;
    p->end = end;
    if (p->again != NULL) {
        http_client *c = p->again;
        p->again = NULL;
        http_client_start(c, call);
    }
}

static void probe_init(probe *p)
{
    *p = (probe){.call = {.method = "POST",
                          .path = "/v1/x",
                          .body = "{}",
                          .n_body_bytes = 2,
                          .on_body = on_body,
                          .on_end = on_end}};
    p->call.arg = p;
}

typedef struct rig {
    uv_loop_t loop;
    http_client *client;
    server server;
} rig;

static void rig_start(rig *r, uint64_t timeout_us)
{
    http_target target;
    char url[128];
    server_start(&r->server);
    snprintf(url, sizeof(url), "unix:%s", r->server.path);
    assert_int_equal(uv_loop_init(&r->loop), 0);
    assert_int_equal(http_target_parse(&target, url, NULL), PGD_OK);
    assert_int_equal(http_client_create(&r->client, &r->loop, &target, timeout_us, NULL), PGD_OK);
}

static void rig_stop(rig *r)
{
    http_client_destroy(r->client);
    assert_int_equal(uv_loop_close(&r->loop), 0);
    server_stop(&r->server);
}

static void wait_ends(rig *r, const probe *p, int n)
{
    uint64_t end_us = clock_now_us() + 20000000;
    while (p->n_ends < n && clock_now_us() < end_us)
        uv_run(&r->loop, UV_RUN_ONCE);
    assert_int_equal(p->n_ends, n);
}

static void test_http_client_keeps_connections(void **state)
{
    (void)state;
    rig r = {
        .server = {.n_conns = 1,
                   .conns = {{.pieces = {OK_HEAD "Content-Length: 2\r\n\r\nok"}, .n_answers = 3}}}};
    probe p;
    rig_start(&r, 5000000);
    probe_init(&p);
    p.again = r.client; /* started from inside on_end */
    http_client_start(r.client, &p.call);
    wait_ends(&r, &p, 2);
    http_client_start(r.client, &p.call);
    wait_ends(&r, &p, 3);
    assert_int_equal(p.end, HTTP_CALL_DONE);
    assert_int_equal(p.n_body_bytes, 6);
    assert_int_equal(http_client_n_connects(r.client), 1);
    rig_stop(&r);
}

/* The server closes after its first answer, without having said so. */
static void test_http_client_replaces_a_stale_connection(void **state)
{
    (void)state;
    script one = {.pieces = {OK_HEAD "Content-Length: 2\r\n\r\nok"}};
    rig r = {.server = {.n_conns = 2, .conns = {one, one}}};
    probe p;
    rig_start(&r, 5000000);
    probe_init(&p);
    p.again = r.client; /* at once: the close has not been seen yet */
    http_client_start(r.client, &p.call);
    wait_ends(&r, &p, 2);
    assert_int_equal(p.end, HTTP_CALL_DONE);
    assert_int_equal(p.n_body_bytes, 4);
    assert_int_equal(http_client_n_connects(r.client), 2);
    rig_stop(&r);
}

/* More bytes than the answer has: it counts, the connection is not used again. */
static void test_http_client_drops_a_chatty_connection(void **state)
{
    (void)state;
    script one = {.pieces = {OK_HEAD "Content-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n"},
                  .hold = true};
    rig r = {.server = {.n_conns = 2, .conns = {one, one}}};
    probe p;
    rig_start(&r, 5000000);
    probe_init(&p);
    p.again = r.client;
    http_client_start(r.client, &p.call);
    wait_ends(&r, &p, 2);
    assert_int_equal(p.end, HTTP_CALL_DONE);
    assert_int_equal(http_client_n_connects(r.client), 2);
    rig_stop(&r);
}

static void test_http_client_cancel(void **state)
{
    (void)state;
    script one = {
        .pieces = {OK_HEAD "Content-Length: 20\r\n\r\nsome", "more"}, .step = 1, .hold = true};
    rig r = {.server = {.n_conns = 2, .conns = {one, one}}};
    probe p;
    rig_start(&r, 5000000);
    probe_init(&p);
    p.cancels = true; /* from inside on_body */
    http_client_start(r.client, &p.call);
    while (p.n_body_bytes == 0)
        uv_run(&r.loop, UV_RUN_ONCE);
    uv_run(&r.loop, UV_RUN_DEFAULT); /* nothing is left */
    assert_int_equal(p.n_ends, 0);
    http_client_cancel(&p.call); /* twice is harmless */
    probe_init(&p);
    http_client_start(r.client, &p.call); /* destroyed while it runs */
    while (p.n_body_bytes == 0)
        uv_run(&r.loop, UV_RUN_ONCE);
    rig_stop(&r);
    assert_int_equal(p.n_ends, 0);
}

static void test_http_client_timeout_counts_from_progress(void **state)
{
    (void)state;
    /* Slow but moving for longer than the time-out: 60 bytes with a millisecond or so each. */
    rig r = {
        .server = {.n_conns = 1,
                   .conns = {{.pieces = {OK_HEAD "Content-Length: 20\r\n\r\n0123456789abcdefghij"},
                              .step = 1,
                              .hold = true}}}};
    probe p;
    rig_start(&r, 2000000);
    probe_init(&p);
    http_client_start(r.client, &p.call);
    wait_ends(&r, &p, 1);
    assert_int_equal(p.end, HTTP_CALL_DONE);
    rig_stop(&r);
}

static void test_http_target(void **state)
{
    (void)state;
    static const struct {
        const char *url;
        const char *host;
        int port;
        const char *path;
        const char *uds;
    } good[] = {
        {"http://127.0.0.1:8000", "127.0.0.1", 8000, "", ""},
        {"http://127.0.0.1:8000/", "127.0.0.1", 8000, "", ""},
        {"http://h/v1", "h", 80, "", ""},
        {"http://h:1/a/b/v1/", "h", 1, "/a/b", ""},
        {"http://h:1/a", "h", 1, "/a", ""},
        {"localhost:8000", "localhost", 8000, "", ""},
        {"http://[::1]:99/v1", "::1", 99, "", ""},
        {"[::1]:99", "::1", 99, "", ""},
        {"unix:/run/x", "localhost", 80, "", "/run/x"},
        {"unix:///run/x", "localhost", 80, "", "/run/x"},
    };
    static const char *const bad[] = {
        "",          "host",        "https://h",     "ftp://h:1",
        "http://",   "http://:1",   "http://h:0",    "http://h:65536",
        "http://h:", "http://h:8x", "http://[::1",   "unix:",
        "h:-1",      "h:+1",        "http://u@h:80", "http://h:1/a?b"};
    http_target t;
    for (size_t i = 0; i < PGD_ARRAY_LEN(good); i++) {
        assert_int_equal(http_target_parse(&t, good[i].url, NULL), PGD_OK);
        assert_string_equal(t.host, good[i].host);
        assert_int_equal(t.port, good[i].port);
        assert_string_equal(t.base_path, good[i].path);
        assert_string_equal(t.uds, good[i].uds);
    }
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++) {
        pgd_why why = {0};
        if (http_target_parse(&t, bad[i], &why) == PGD_OK)
            fail_msg("taken: %s", bad[i]);
        assert_true(why.text[0] != '\0');
    }
    char longer[2000] = "http://";
    memset(longer + 7, 'a', sizeof(longer) - 8);
    memcpy(longer + 1900, ":80", 3);
    assert_int_equal(http_target_parse(&t, longer, NULL), PGD_EINVAL);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_http_target),
        cmocka_unit_test(test_http_client_answers),
        cmocka_unit_test(test_http_client_request_text),
        cmocka_unit_test(test_http_client_is_bounded),
        cmocka_unit_test(test_http_client_unreachable),
        cmocka_unit_test(test_http_client_keeps_connections),
        cmocka_unit_test(test_http_client_replaces_a_stale_connection),
        cmocka_unit_test(test_http_client_drops_a_chatty_connection),
        cmocka_unit_test(test_http_client_cancel),
        cmocka_unit_test(test_http_client_timeout_counts_from_progress),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
