/* Any bytes as the body of a request to the API, through the real connection, routes, engine and
 * stream writer, with a core loop that this file implements: the input says which tokens come, with
 * which log probabilities, who is refused, and how requests end. Answers and events must be JSON
 * and UTF-8, an answer must come when all requests have ended, and nothing may be left behind.
 *
 *   byte 0   state of the core loop, and which submits are refused
 *   byte 1   what the client does
 *   byte 2   the route
 *   byte 3   n, length of the script
 *   4 ..     the script: two bytes per token or end
 *   4 + n .. the body
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/random.h>

#include "common/json.h"
#include "common/mem.h"
#include "common/utf8.h"
#include "engine/http/http_api.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/http_rig.h"

#define MAX_LEN     64
#define MAX_LIVE    48
#define MAX_EVENTS  256
#define MAX_JOBS    512
#define N_KV_BLOCKS 64

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

enum { NO_READING = 1, LEAVES_EARLY = 2, IS_OLD = 4, IS_DRAINING = 8 };

struct core_loop {
    core_loop_opts opts;
    core_state state;
    request *live[MAX_LIVE];
    int32_t n_live;
    core_event events[MAX_EVENTS]; /* a ring */
    int32_t first_event;
    int32_t n_events;
    bool reset_asked;
};

typedef struct pool_job {
    uv_work_t *req;
    uv_work_cb work;
    uv_after_work_cb after;
} pool_job;

static core_loop core;
static pool_job jobs[MAX_JOBS];
static int n_jobs;
static int refuse_every; /* this many submits; 0 = none */
static int n_submits;
static fuzz_input script;
static http_rig rig;
static http_api api;
static engine *eng;
static http_counters counters;

/* The same numbers in every run, so that an input does the same in every run. */
ssize_t getrandom(void *out, size_t n_bytes, unsigned flags)
{
    (void)flags;
    memset(out, 0x5a, n_bytes);
    return (ssize_t)n_bytes;
}

/* --- the pool --------------------------------------------------------------------------------- */

int uv_queue_work(uv_loop_t *loop, uv_work_t *req, uv_work_cb work_cb,
                  uv_after_work_cb after_work_cb)
{
    (void)loop;
    if (n_jobs == MAX_JOBS)
        return UV_ENOMEM;
    jobs[n_jobs++] = (pool_job){req, work_cb, after_work_cb};
    return 0;
}

static void run_jobs(void)
{
    while (n_jobs > 0) {
        pool_job job = jobs[--n_jobs];
        job.work(job.req);
        job.after(job.req, 0);
    }
}

/* --- the core loop ---------------------------------------------------------------------------- */

static void push(const core_event *event)
{
    PGD_ASSERT(core.n_events < MAX_EVENTS);
    core.events[(core.first_event + core.n_events++) % MAX_EVENTS] = *event;
}

static void end_request(int32_t at, request_status status, core_refusal refusal)
{
    request *req = core.live[at];
    core_event e = {.kind = CORE_EVENT_FINISHED,
                    .request_id = req->id,
                    .status = status,
                    .refusal = refusal,
                    .error = status == REQUEST_FINISHED_ERROR && refusal == CORE_REFUSAL_NONE
                                 ? REQUEST_ERROR_NAN_LOGITS
                                 : REQUEST_ERROR_NONE,
                    .stop_token = req->stop_token};
    core.live[at] = core.live[--core.n_live];
    push(&e);
    request_destroy(req);
}

static int32_t vocab_size(void)
{
    return engine_get_model(eng)->vocab_size;
}

static void fill_prompt_logprobs(request *req)
{
    int64_t n = (int64_t)req->n_prompt_tokens * req->params.n_prompt_logprobs_per_token;
    for (int64_t i = 0; req->prompt_logprobs != NULL && i < n; i++)
        req->prompt_logprobs[i] = (token_logprob){(token_id)(i * 7 % vocab_size()), -1.5f};
}

/* One more token for the request at this place; it may be the last. */
static void give_token(int32_t at, token_id token)
{
    request *req = core.live[at];
    fill_prompt_logprobs(req);
    core_event e = {.kind = CORE_EVENT_TOKEN,
                    .request_id = req->id,
                    .token = token,
                    .stop_token = -1,
                    .n_logprobs = req->params.n_logprobs + 1,
                    .prompt_logprobs = request_take_prompt_logprobs(req)};
    for (int32_t i = 0; i < e.n_logprobs; i++)
        e.logprobs[i] = (token_logprob){(token + PGD_MAX(i - 1, 0)) % vocab_size(), -(float)i};
    push(&e);
    request_append_token(req, token, NULL);
    if (request_check_stop(req, MAX_LEN))
        end_request(at, req->status, CORE_REFUSAL_NONE);
}

/* A step: every live request gets a token, or its end. */
static void step_core(void)
{
    for (int32_t i = core.n_live - 1; i >= 0; i--) {
        uint8_t what = fuzz_u8(&script);
        uint8_t more = fuzz_u8(&script);
        if (what >= 254)
            end_request(i, REQUEST_FINISHED_ERROR,
                        (core_refusal)(more % (CORE_REFUSAL_DRAINING + 1)));
        else if (what == 253)
            end_request(i, REQUEST_FINISHED_ABORTED, CORE_REFUSAL_NONE);
        else if (what < 250)
            give_token(i, (what * 256 + more) % vocab_size());
    }
    if (core.reset_asked) {
        core_event e = {.kind = CORE_EVENT_CACHE_RESET,
                        .reset = core.n_live == 0 ? CORE_RESET_DONE : CORE_RESET_HELD};
        core.reset_asked = false;
        push(&e);
    }
    core.opts.wake(core.opts.wake_arg);
}

pgd_err core_loop_create(core_loop **out, const core_loop_opts *opts, pgd_why *why)
{
    (void)why;
    core.opts = *opts;
    *out = &core;
    return PGD_OK;
}

pgd_err core_loop_start(core_loop *c, pgd_why *why)
{
    (void)c;
    (void)why;
    return PGD_OK;
}

void core_loop_stop(core_loop *c, uint32_t drain_s)
{
    (void)c;
    (void)drain_s;
}

void core_loop_drain(core_loop *c, uint32_t drain_s)
{
    (void)c;
    (void)drain_s;
}

void core_loop_destroy(core_loop *c)
{
    (void)c;
}

core_refusal core_loop_submit(core_loop *c, request *r)
{
    PGD_ASSERT(r->n_prompt_tokens >= 1 && r->max_tokens >= 1);
    n_submits++;
    if (c->n_live == MAX_LIVE)
        return CORE_REFUSAL_QUEUE_FULL;
    if (refuse_every > 0 && n_submits % refuse_every == 0)
        return n_submits % 2 != 0 ? CORE_REFUSAL_DRAINING : CORE_REFUSAL_WORKER;
    r->num_cached_tokens = 0;
    c->live[c->n_live++] = r;
    return CORE_REFUSAL_NONE;
}

static void end_by_id(uint64_t request_id, request_status status)
{
    for (int32_t i = 0; i < core.n_live; i++) {
        if (core.live[i]->id == request_id) {
            end_request(i, status, CORE_REFUSAL_NONE);
            core.opts.wake(core.opts.wake_arg);
            return;
        }
    }
}

void core_loop_abort(core_loop *c, uint64_t request_id)
{
    (void)c;
    end_by_id(request_id, REQUEST_FINISHED_ABORTED);
}

void core_loop_end_at_stop(core_loop *c, uint64_t request_id)
{
    (void)c;
    end_by_id(request_id, REQUEST_FINISHED_STOPPED);
}

bool core_loop_poll(core_loop *c, core_event *out)
{
    if (c->n_events == 0)
        return false;
    *out = c->events[c->first_event];
    c->first_event = (c->first_event + 1) % MAX_EVENTS;
    c->n_events--;
    return true;
}

void core_loop_get_stats(const core_loop *c, core_stats *out)
{
    *out = (core_stats){.state = c->state,
                        .n_kv_blocks = N_KV_BLOCKS,
                        .max_model_len = MAX_LEN,
                        .max_pool_len = MAX_LEN,
                        .n_kv_groups = 1,
                        .kv_groups = {{{ATTENTION_SLIDING, 20, 16}, 2}},
                        .load_done_bytes = 1,
                        .load_total_bytes = 3,
                        .device = "sim",
                        .device_name = "simulated \"one\"",
                        .why = "because \x7f\n\"of\""};
}

const kv_residency *core_loop_get_residency(const core_loop *c)
{
    (void)c;
    return NULL;
}

bool core_loop_reset_prefix_cache(core_loop *c, bool with_tiers)
{
    (void)with_tiers;
    bool was_asked = c->reset_asked;
    c->reset_asked = true;
    return !was_asked;
}

int32_t http_server_n_connections(const http_server *s)
{
    (void)s;
    return 1;
}

int32_t http_server_n_keys(const http_server *s)
{
    (void)s;
    return 0;
}

const http_counters *http_server_get_counters(const http_server *s)
{
    (void)s;
    return &counters;
}

/* --- what comes back -------------------------------------------------------------------------- */

static void check_json(const char *text, size_t n_bytes)
{
    cJSON *tree;
    pgd_why why;
    PGD_ASSERTF(json_parse(&tree, text, n_bytes, JSON_MAX_DEPTH, &why) == PGD_OK, "%s: %.*s",
                why.text, (int)n_bytes, text);
    cJSON_Delete(tree);
}

static void check_events(const char *text, size_t n_bytes)
{
    static const char done[] = "data: [DONE]\n\n";
    PGD_ASSERT(n_bytes >= sizeof(done) - 1);
    const char *last = text + n_bytes - (sizeof(done) - 1);
    PGD_ASSERT(memcmp(last, done, sizeof(done) - 1) == 0);
    while (text < last) {
        const char *end = memmem(text, (size_t)(last - text), "\n\n", 2);
        PGD_ASSERT(end != NULL && memcmp(text, "data: ", 6) == 0);
        check_json(text + 6, (size_t)(end - text) - 6);
        text = end + 2;
    }
}

static void check_answer(void)
{
    const strbuf *b = &rig.body;
    PGD_ASSERT(b->n_bytes == 0 || utf8_is_valid(b->data, b->n_bytes, NULL));
    if (b->n_bytes > 6 && memcmp(b->data, "data: ", 6) == 0)
        check_events(b->data, b->n_bytes);
    else if (b->n_bytes > 0 && (b->data[0] == '{' || rig.status >= 400))
        check_json(b->data, b->n_bytes);
}

/* --- runs ------------------------------------------------------------------------------------- */

static void on_request(void *arg, http_conn *conn, const http_request *req)
{
    http_api_handle(arg, conn, req);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    pgd_why why = {{0}};
    (void)argc;
    (void)argv;
    fuzz_quiet();
    http_rig_init(&rig, on_request, &api);
    config_init(&rig.cfg);
    (void)snprintf(rig.cfg.device, sizeof(rig.cfg.device), "sim");
    (void)snprintf(rig.cfg.model, sizeof(rig.cfg.model), "tests/data/models/llama31-tiny");
    (void)snprintf(rig.cfg.served_model_name, sizeof(rig.cfg.served_model_name), "m\"\n");
    rig.cfg.max_output_buffer_bytes = 65536;
    rig.cfg.scheduling_policy = CONFIG_POLICY_PRIORITY;
    if (engine_create(&eng, &rig.loop, &rig.cfg, &why) != PGD_OK)
        PGD_PANIC("%s (run this at the root of the tree)", why.text);
    api.engine = eng;
    http_metrics_init(&api.metrics);
    return 0;
}

static void send_request(uint8_t route, unsigned behaviour, const uint8_t *body, size_t n_body)
{
    static const char *const routes[] = {
        "POST /v1/completions", "POST /v1/completions", "POST /tokenize",
        "POST /detokenize",     "GET /metrics",         "POST /reset_prefix_cache?reset_external=1",
        "GET /health",          "GET /v1/models",       "GET /v1/models/m",
        "GET /version",         "GET /openapi.json"};
    char head[256];
    int n =
        snprintf(head, sizeof(head), "%s HTTP/1.%d\r\nHost: a\r\nContent-Length: %zu\r\n\r\n",
                 routes[route % PGD_ARRAY_LEN(routes)], (behaviour & IS_OLD) != 0 ? 0 : 1, n_body);
    (void)http_rig_send(&rig, head, (size_t)n);
    (void)http_rig_send(&rig, body, n_body);
}

static void turn(unsigned behaviour)
{
    http_rig_turn(&rig, (behaviour & NO_READING) == 0);
    run_jobs();
    step_core();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static const core_state states[] = {CORE_READY,   CORE_READY,  CORE_READY,    CORE_RECOVERING,
                                        CORE_LOADING, CORE_FAILED, CORE_DRAINING, CORE_STARTING};
    if (n_bytes < 4 || n_bytes < 4 + (size_t)data[3])
        return 0;
    core.state = states[data[0] % PGD_ARRAY_LEN(states)];
    refuse_every = data[0] / 32;
    n_submits = 0;
    unsigned behaviour = data[1];
    api.draining = (behaviour & IS_DRAINING) != 0;
    script = (fuzz_input){data + 4, data[3], 0};
    http_rig_connect(&rig);
    send_request(data[2], behaviour, data + 4 + data[3], n_bytes - 4 - data[3]);
    bool leaves_early = (behaviour & LEAVES_EARLY) != 0;
    for (int i = 0; i < (leaves_early ? 3 : 2 * MAX_LEN + data[3]); i++) {
        turn(behaviour);
        if (rig.n_responses > 0)
            break;
    }
    if (rig.n_responses > 0)
        check_answer();
    PGD_ASSERT(rig.n_responses > 0 || (behaviour & (NO_READING | LEAVES_EARLY | IS_OLD)) != 0);
    http_rig_leave(&rig);
    for (int i = 0; i < 4; i++) {
        run_jobs();
        step_core();
        http_rig_run(&rig);
    }
    PGD_ASSERTF(core.n_live == 0 && core.n_events == 0 && n_jobs == 0, "%d live, %d events",
                core.n_live, core.n_events);
    PGD_ASSERTF(engine_n_generations(eng) == 0, "%d generations", engine_n_generations(eng));
    PGD_ASSERT(http_api_n_pool_jobs(&api) == 0);
    return 0;
}
