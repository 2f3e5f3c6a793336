/* Any bytes as what a client sends on one connection, in pieces, to a handler that answers in every
 * way a handler may: whole, streamed, at once, late, never. What comes back must be HTTP, one answer
 * to each request in order; the handler is told exactly once when the client leaves.
 *
 *   byte 0   size of the pieces (0: all at once)
 *   byte 1   what the client does: reads or not, leaves early, time passes, the server drains
 *   2 .. 9   how request i (modulo 8) is answered
 *   10 ..    what the client sends
 */
#include "common/clock.h"
#include "engine/http/http_errors.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/http_rig.h"

#define N_MODES    8
#define HEAD_BYTES (2 + N_MODES)
#define MAX_OUTPUT 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

enum { NO_READING = 1, LEAVES_EARLY = 2, TIME_PASSES = 4, DRAINS = 8, HALF_CLOSES = 16 };

/* The answer that is still to be given. */
typedef struct late_answer {
    http_conn *conn; /* NULL: none */
    bool is_stream;
    int n_writes_left;
    size_t write_bytes;
} late_answer;

static http_rig rig;
static uint8_t modes[N_MODES];
static late_answer late;
static int n_answered;
static int n_disconnects;
static char text[2 * MAX_OUTPUT];

static void on_disconnect(void *arg)
{
    (void)arg;
    PGD_ASSERT(late.conn != NULL);
    late.conn = NULL;
    n_disconnects++;
}

static void on_deadline(void *arg)
{
    http_conn *conn = late.conn;
    (void)arg;
    PGD_ASSERT(conn != NULL);
    late.conn = NULL;
    n_answered++;
    if (http_conn_is_streaming(conn))
        http_conn_stream_end(conn);
    else
        http_error_respond(conn, 408, NULL, "too late");
}

/* One step of the answer; true when it is complete. */
static bool go_on(void)
{
    http_conn *conn = late.conn;
    if (!late.is_stream) {
        late.conn = NULL;
        n_answered++;
        http_conn_respond(conn, 200, "text/plain", NULL, text, late.write_bytes);
        return true;
    }
    if (!http_conn_is_streaming(conn)) {
        http_conn_stream_begin(conn, 200, "text/event-stream", "X-Line: 1\r\n");
        return false;
    }
    if (late.n_writes_left-- > 0)
        return !http_conn_stream_write(conn, text, late.write_bytes);
    late.conn = NULL;
    n_answered++;
    http_conn_stream_end(conn);
    return true;
}

static void on_request(void *arg, http_conn *conn, const http_request *req)
{
    uint8_t mode = modes[(rig.n_requests - 1) % N_MODES];
    (void)arg;
    PGD_ASSERT(late.conn == NULL); /* one request at a time */
    PGD_ASSERT(strchr(req->path, '?') == NULL);
    (void)http_conn_header(conn, "content-type");
    switch (mode % 8) {
    case 0:
        n_answered++;
        http_conn_respond(conn, 200, "text/plain", NULL, req->body, req->n_body_bytes);
        return;
    case 1:
        n_answered++;
        http_conn_respond(conn, 204, NULL, "Allow: GET\r\n", NULL, 0);
        return;
    case 2:
        n_answered++;
        http_error_respond(conn, 404, "p", "no such path: %.200s?%s", req->path, req->query);
        return;
    default:
        late = (late_answer){.conn = conn,
                             .is_stream = mode % 8 >= 4,
                             .n_writes_left = mode / 64,
                             .write_bytes = mode % 8 == 7 ? sizeof(text) / 2 + 1 : mode / 8};
        http_conn_on_disconnect(conn, on_disconnect, NULL);
        http_conn_on_deadline(conn, on_deadline, NULL);
        http_conn_note_tokens(conn, 1, mode);
        if (mode % 8 == 5) { /* the whole stream at once */
            while (late.conn != NULL && !go_on()) {
            }
        }
    }
}

static void pump(unsigned behaviour)
{
    http_rig_turn(&rig, (behaviour & NO_READING) == 0);
    if (late.conn != NULL && (modes[0] & 32) == 0)
        (void)go_on();
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fuzz_quiet();
    memset(text, 'x', sizeof(text));
    http_rig_init(&rig, on_request, NULL);
    config_init(&rig.cfg);
    rig.cfg.max_header_bytes = 1024;
    rig.cfg.max_body_bytes = 1024;
    rig.cfg.max_output_buffer_bytes = MAX_OUTPUT;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes < HEAD_BYTES)
        return 0;
    size_t piece = data[0] > 0 ? data[0] : n_bytes;
    unsigned behaviour = data[1];
    memcpy(modes, data + 2, N_MODES);
    late = (late_answer){0};
    n_answered = 0;
    n_disconnects = 0;
    http_rig_connect(&rig);
    bool is_cut = false; /* the client does not see all answers */
    for (size_t at = HEAD_BYTES; at < n_bytes && rig.conn != NULL; at += piece) {
        if (!http_rig_send(&rig, data + at, PGD_MIN(piece, n_bytes - at)))
            break;
        pump(behaviour);
        if (rig.conn != NULL && (behaviour & DRAINS) != 0 && at > n_bytes / 2)
            rig.host.draining = true;
    }
    if ((behaviour & LEAVES_EARLY) == 0) {
        for (int i = 0; i < 8 && rig.conn != NULL; i++)
            pump(behaviour);
    }
    if ((behaviour & HALF_CLOSES) != 0)
        (void)shutdown(rig.client_fd, SHUT_WR);
    for (int i = 0; i < 3 && rig.conn != NULL && (behaviour & TIME_PASSES) != 0; i++) {
        http_conn_check_time(rig.conn, clock_now_us() + (uint64_t)(i + 1) * 100000000);
        pump(behaviour);
        is_cut = true;
    }
    http_rig_turn(&rig, (behaviour & NO_READING) == 0);
    is_cut = is_cut || late.conn != NULL || n_disconnects > 0 ||
             (behaviour & (NO_READING | LEAVES_EARLY | HALF_CLOSES)) != 0;
    http_rig_leave(&rig);
    PGD_ASSERT(late.conn == NULL); /* told */
    PGD_ASSERT(rig.n_answered >= n_answered);
    PGD_ASSERTF(rig.n_requests == n_answered + n_disconnects, "%d requests, %d answers, %d left",
                rig.n_requests, n_answered, n_disconnects);
    /* At most one more answer: to bytes that were no request. */
    PGD_ASSERTF(rig.n_responses <= n_answered + 1, "%d answers to %d requests", rig.n_responses,
                n_answered);
    PGD_ASSERTF(is_cut || rig.n_responses >= n_answered, "%d answers came of %d", rig.n_responses,
                n_answered);
    return 0;
}
