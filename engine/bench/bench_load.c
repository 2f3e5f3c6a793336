/* A slot is one request at a time. Slots are made when the load first needs them and then used
 * again; `pump` is the one place that begins requests: it runs when a slot becomes free and when
 * the next request is due.
 *
 *   free → busy → free            the answer was whole
 *            └──→ cooling → free  closed loop, it failed: the slot counts as busy for COOL_US more,
 *                                 so that a server that refuses everything is not hammered
 *
 * It begins a few at a time, so that answers are read, and timed, in between.
 *
 * In open loop a request that finds max_concurrency reached waits; its latency counts from when it
 * is sent, how late that was is a figure of its own. */
#include "engine/bench/bench_load.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "engine/bench/bench_prompt.h"
#include "engine/bench/stream_event.h"
#include "engine/http/sse_reader.h"

#define COOL_US           10000u
#define MAX_SLOTS         65536
#define MAX_BEGINS        32 /* between two looks at the answers */
#define MAX_EVENT_BYTES   (1u << 20)
#define MAX_DETAIL_BYTES  1000 /* of an error answer's body */
#define GIVE_UP_UNREACHED 20   /* in a row, and twice the slots */
#define GAP_STREAM        (UINT64_C(4) << 40)

typedef struct load load;

typedef struct slot {
    http_call call;
    load *load;
    list_node node; /* busy, cooling or free */
    sse_reader sse;
    strbuf body;    /* of the request */
    strbuf refusal; /* body of an answer that is no 200 */
    uint64_t sent_us;
    uint64_t first_us; /* 0 = no text yet */
    uint64_t last_us;
    uint64_t cool_until_us;
    int64_t n_wanted;
    uint64_t n_chunks;
    int64_t n_prompt, n_output, n_cached; /* by usage */
    bool has_usage;
    bool is_finished;
    bool is_done; /* [DONE] */
    bool has_event;
    bool is_failed; /* failure says how */
    bench_failure failure;
} slot;

struct load {
    const bench_load_opts *opts;
    bench_result *out;
    uv_loop_t *loop;
    http_client *client;
    uv_timer_t timer;
    list_node busy;
    list_node cooling; /* in the order of cool_until_us */
    list_node free;
    int64_t n_busy; /* cooling ones too */
    int64_t n_slots;
    uint64_t start_us;
    uint64_t end_us;      /* the last answer's end */
    double next_due_us;   /* since start */
    uint64_t n_unreached; /* in a row */
    bool is_stopping;
    bool is_pumping;
    bool is_closed;
};

static void pump(load *l);

const char *bench_failure_name(bench_failure kind)
{
    static const char *const names[] = {
#define BENCH_FAILURE_NAME(kind, name) [kind] = name,
        BENCH_FAILURES(BENCH_FAILURE_NAME)
#undef BENCH_FAILURE_NAME
    };
    return names[kind];
}

pgd_err bench_result_init(bench_result *r)
{
    *r = (bench_result){0};
    if (latency_hist_init(&r->ttft) == PGD_OK && latency_hist_init(&r->tpot) == PGD_OK &&
        latency_hist_init(&r->itl) == PGD_OK && latency_hist_init(&r->e2e) == PGD_OK &&
        latency_hist_init(&r->late) == PGD_OK)
        return PGD_OK;
    bench_result_deinit(r);
    return PGD_ENOMEM;
}

void bench_result_deinit(bench_result *r)
{
    latency_hist_deinit(&r->ttft);
    latency_hist_deinit(&r->tpot);
    latency_hist_deinit(&r->itl);
    latency_hist_deinit(&r->e2e);
    latency_hist_deinit(&r->late);
}

uint64_t bench_result_n_failed(const bench_result *r)
{
    uint64_t n = 0;
    for (int i = 0; i < BENCH_N_FAILURES; i++)
        n += r->n_failed[i];
    return n;
}

/* --- an answer -------------------------------------------------------------------------------- */

static void set_failure(slot *s, bench_failure kind, const char *detail, size_t n_bytes)
{
    bench_result *out = s->load->out;
    if (s->is_failed)
        return;
    s->is_failed = true;
    s->failure = kind;
    if (out->n_failed[kind] > 0)
        return;
    snprintf(out->detail[kind], sizeof(out->detail[kind]), "%.*s", (int)PGD_MIN(n_bytes, 199u),
             detail);
    for (char *c = out->detail[kind]; *c != '\0'; c++) {
        if ((unsigned char)*c < ' ')
            *c = ' ';
    }
}

static void fail(slot *s, bench_failure kind, const char *detail)
{
    set_failure(s, kind, detail, strlen(detail));
}

static bool on_event(void *arg, const char *data, size_t n_bytes)
{
    slot *s = arg;
    stream_event e;
    if (!stream_event_read(&e, data, n_bytes)) {
        set_failure(s, BENCH_MALFORMED, data, n_bytes);
        return false;
    }
    s->has_event = true;
    s->is_done |= e.is_done;
    s->is_finished |= e.is_finished;
    if (e.error != NULL)
        set_failure(s, BENCH_ERROR_EVENT, e.error, e.n_error_bytes);
    if (e.has_usage) {
        s->has_usage = true;
        s->n_prompt = e.n_prompt_tokens;
        s->n_output = e.n_completion_tokens;
        s->n_cached = e.n_cached_tokens;
    }
    if (!e.has_text)
        return true;
    uint64_t now = s->call.moved_us;
    bench_result *out = s->load->out;
    s->n_chunks++;
    if (s->first_us == 0) {
        s->first_us = now;
        latency_hist_add(&out->ttft, now - s->sent_us);
    } else {
        latency_hist_add(&out->itl, now - s->last_us);
    }
    s->last_us = now;
    return true;
}

static void end_slot(slot *s);

static void on_body(http_call *call, const char *data, size_t n_bytes)
{
    slot *s = call->arg;
    if (call->status != 200) {
        size_t room = MAX_DETAIL_BYTES - PGD_MIN(s->refusal.n_bytes, (size_t)MAX_DETAIL_BYTES);
        strbuf_append(&s->refusal, data, PGD_MIN(n_bytes, room));
        return;
    }
    if (sse_reader_feed(&s->sse, data, n_bytes, on_event, s))
        return;
    fail(s, BENCH_MALFORMED, "an event of more than 1 MiB");
    http_client_cancel(call);
    end_slot(s);
}

/* The message of an error in the OpenAI shape, else the body as it is. */
static void fail_status(slot *s)
{
    int status = s->call.status;
    bench_failure kind = status == 429                   ? BENCH_HTTP_429
                         : status >= 400 && status < 500 ? BENCH_HTTP_4XX
                         : status >= 500                 ? BENCH_HTTP_5XX
                                                         : BENCH_HTTP_OTHER;
    char text[200];
    stream_event e;
    const char *message = s->refusal.data != NULL ? s->refusal.data : "";
    size_t n = s->refusal.n_bytes;
    if (n > 0 && stream_event_read(&e, message, n) && e.error != NULL && e.n_error_bytes > 0) {
        message = e.error;
        n = e.n_error_bytes;
    }
    snprintf(text, sizeof(text), "status %d: %.*s", status, (int)PGD_MIN(n, 180u), message);
    fail(s, kind, text);
}

static void check_answer(slot *s)
{
    if (s->is_failed)
        return;
    if (s->call.status != 200)
        fail_status(s);
    else if (!s->has_event)
        fail(s, BENCH_MALFORMED, "status 200 without an event of a stream");
    else if (!s->is_finished && !s->is_done)
        fail(s, BENCH_CLOSED, "the stream ended without finish_reason");
    else if (s->n_chunks == 0 && s->n_output == 0)
        fail(s, BENCH_EMPTY, "no token");
}

static void count_success(slot *s, uint64_t now)
{
    bench_result *out = s->load->out;
    int64_t n_tokens = s->has_usage ? s->n_output : (int64_t)s->n_chunks;
    out->n_succeeded++;
    out->n_without_usage += !s->has_usage;
    out->n_short += n_tokens < s->n_wanted;
    latency_hist_add(&out->e2e, now - s->sent_us);
    if (n_tokens > 1 && s->first_us != 0)
        latency_hist_add(&out->tpot, (s->last_us - s->first_us) / (uint64_t)(n_tokens - 1));
}

/* The call is over, well or badly. */
static void end_slot(slot *s)
{
    load *l = s->load;
    uint64_t now = clock_now_us();
    bench_result *out = l->out;
    check_answer(s);
    out->n_chunks += s->n_chunks;
    out->n_prompt_tokens += (uint64_t)s->n_prompt;
    out->n_cached_tokens += (uint64_t)s->n_cached;
    out->n_output_tokens += s->has_usage ? (uint64_t)s->n_output : s->n_chunks;
    l->end_us = now;
    l->n_unreached = s->is_failed && s->failure == BENCH_UNREACHED ? l->n_unreached + 1 : 0;
    list_remove(&s->node);
    if (s->is_failed)
        out->n_failed[s->failure]++;
    else
        count_success(s, now);
    if (s->is_failed && l->opts->request_rate == 0) {
        s->cool_until_us = now + COOL_US;
        list_append(&l->cooling, &s->node);
    } else {
        l->n_busy--;
        list_prepend(&l->free, &s->node);
    }
    if (l->n_unreached >= (uint64_t)(GIVE_UP_UNREACHED + 2 * l->n_slots)) {
        out->gave_up = true;
        l->is_stopping = true;
    }
    pump(l);
}

static void on_end(http_call *call, http_call_end end, const char *detail)
{
    static const bench_failure kinds[] = {
        [HTTP_CALL_UNREACHED] = BENCH_UNREACHED, [HTTP_CALL_CLOSED] = BENCH_CLOSED,
        [HTTP_CALL_MALFORMED] = BENCH_MALFORMED, [HTTP_CALL_TIMEOUT] = BENCH_TIMEOUT,
        [HTTP_CALL_NO_RESOURCE] = BENCH_LOCAL,
    };
    slot *s = call->arg;
    if (end != HTTP_CALL_DONE)
        fail(s, kinds[end], detail);
    end_slot(s);
}

/* --- beginning requests ----------------------------------------------------------------------- */

static slot *take_slot(load *l)
{
    if (!list_is_empty(&l->free)) {
        slot *s = LIST_ENTRY(l->free.next, slot, node);
        list_remove(&s->node);
        return s;
    }
    slot *s = mem_calloc(1, sizeof(*s));
    if (s == NULL)
        return NULL;
    l->n_slots++;
    s->load = l;
    sse_reader_init(&s->sse, MAX_EVENT_BYTES);
    strbuf_init(&s->body);
    strbuf_init(&s->refusal);
    return s;
}

static void free_slots(list_node *list)
{
    while (!list_is_empty(list)) {
        slot *s = LIST_ENTRY(list->next, slot, node);
        list_remove(&s->node);
        sse_reader_deinit(&s->sse);
        strbuf_deinit(&s->body);
        strbuf_deinit(&s->refusal);
        mem_free(s);
    }
}

static bool begin(load *l, uint64_t due_us)
{
    slot *s = take_slot(l);
    if (s == NULL)
        return false;
    sse_reader_reset(&s->sse);
    strbuf_reset(&s->body);
    strbuf_reset(&s->refusal);
    s->first_us = s->last_us = 0;
    s->n_chunks = 0;
    s->n_prompt = s->n_output = s->n_cached = 0;
    s->has_usage = s->is_finished = s->is_done = s->has_event = s->is_failed = false;
    s->n_wanted = bench_prompt_write(&s->body, l->opts, l->out->n_started++);
    s->call = (http_call){
        .method = "POST",
        .path = "/v1/completions",
        .headers = l->opts->headers,
        .body = s->body.data,
        .n_body_bytes = s->body.n_bytes,
        .on_body = on_body,
        .on_end = on_end,
        .arg = s,
    };
    l->n_busy++;
    list_append(&l->busy, &s->node);
    s->sent_us = clock_now_us();
    if (l->opts->request_rate > 0)
        latency_hist_add(&l->out->late, s->sent_us - PGD_MIN(due_us, s->sent_us));
    if (s->body.failed) {
        fail(s, BENCH_LOCAL, "out of memory");
        end_slot(s);
        return true;
    }
    http_client_start(l->client, &s->call);
    return true;
}

static bool has_more(const load *l, uint64_t now)
{
    const bench_load_opts *o = l->opts;
    return !l->is_stopping &&
           (o->num_prompts == 0 || l->out->n_started < (uint64_t)o->num_prompts) &&
           (o->duration_s == 0 || (double)(now - l->start_us) < o->duration_s * 1e6);
}

static bool has_room(const load *l)
{
    int64_t most = l->opts->max_concurrency > 0 ? l->opts->max_concurrency : MAX_SLOTS;
    return l->n_busy < most;
}

static void on_timer(uv_timer_t *timer)
{
    pump(timer->data);
}

/* When pump has something to do without an answer coming in. */
static void set_timer(load *l, uint64_t now)
{
    double wake_us = INFINITY;
    if (!list_is_empty(&l->cooling))
        wake_us = (double)LIST_ENTRY(l->cooling.next, slot, node)->cool_until_us;
    if (has_more(l, now) && has_room(l)) {
        wake_us = fmin(wake_us, (double)l->start_us + l->next_due_us);
        if (l->opts->duration_s > 0)
            wake_us = fmin(wake_us, (double)l->start_us + l->opts->duration_s * 1e6);
    }
    uv_timer_stop(&l->timer);
    if (isinf(wake_us))
        return;
    uv_update_time(l->loop);
    double wait_ms = fmax(ceil((wake_us - (double)now) / 1e3), 0);
    uv_timer_start(&l->timer, on_timer, (uint64_t)wait_ms, 0);
}

static void pump(load *l)
{
    /* A call may end while it is being started. */
    if (l->is_pumping)
        return;
    l->is_pumping = true;
    uint64_t now = clock_now_us();
    while (!list_is_empty(&l->cooling)) {
        slot *s = LIST_ENTRY(l->cooling.next, slot, node);
        if (s->cool_until_us > now && has_more(l, now))
            break;
        list_remove(&s->node);
        l->n_busy--;
        list_prepend(&l->free, &s->node);
    }
    for (int n = 0; n < MAX_BEGINS && has_more(l, now) && has_room(l); n++) {
        double due_us = (double)l->start_us + l->next_due_us;
        if (l->opts->request_rate > 0 && due_us > (double)now)
            break;
        if (!begin(l, (uint64_t)due_us)) {
            l->is_stopping = true;
            l->out->n_failed[BENCH_LOCAL]++;
            break;
        }
        if (l->opts->request_rate > 0)
            l->next_due_us -=
                log(bench_prompt_uniform(l->opts->seed, GAP_STREAM, l->out->n_started)) * 1e6 /
                l->opts->request_rate;
        now = clock_now_us();
    }
    l->is_pumping = false;
    set_timer(l, now);
}

static void stop_all(load *l)
{
    l->is_stopping = true;
    while (!list_is_empty(&l->busy)) {
        slot *s = LIST_ENTRY(l->busy.next, slot, node);
        http_client_cancel(&s->call);
        fail(s, BENCH_CANCELLED, "interrupted");
        end_slot(s);
    }
    pump(l);
}

static void on_closed(uv_handle_t *handle)
{
    load *l = handle->data;
    l->is_closed = true;
}

pgd_err bench_load_run(uv_loop_t *loop, http_client *client, const bench_load_opts *opts,
                       const bool *stop, bench_result *out)
{
    load l = {.opts = opts, .out = out, .loop = loop, .client = client};
    if (uv_timer_init(loop, &l.timer) != 0)
        return PGD_EIO;
    l.timer.data = &l;
    list_init(&l.busy);
    list_init(&l.cooling);
    list_init(&l.free);
    uint64_t n_connects = http_client_n_connects(client);
    l.start_us = l.end_us = clock_now_us();
    pump(&l);
    while (l.n_busy > 0 || has_more(&l, clock_now_us())) {
        uv_run(loop, UV_RUN_ONCE);
        if (*stop && !l.is_stopping)
            stop_all(&l);
    }
    out->duration_us = l.end_us - l.start_us;
    out->n_connects = http_client_n_connects(client) - n_connects;
    uv_close((uv_handle_t *)&l.timer, on_closed);
    while (!l.is_closed)
        uv_run(loop, UV_RUN_ONCE);
    free_slots(&l.free);
    return PGD_OK;
}
