/* POST /v1/completions: take the request in (completion_intake), one generation per choice, answer
 * whole or as a stream.
 *
 * A completion owns everything of its request. It ends in exactly one of three ways: the answer is
 * out, the client left (every generation is cancelled), or a refusal was sent. The last of
 * what refers to it (connection, jobs on the pool, live generations) frees it.
 *
 * One file although long: who frees a completion, and when, shows only with all of its callbacks
 * side by side.
 *
 * A token is rendered when it comes. What grows with the request is done on the pool: taking it in,
 * rendering a prompt (its generation is held meanwhile), putting a whole answer together, and
 * freeing one that nobody wants any more. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"
#include "engine/http/completion_intake.h"
#include "engine/http/completion_limits.h"
#include "engine/http/completion_render.h"
#include "engine/http/http_api.h"
#include "engine/http/http_errors.h"
#include "engine/http/pool_free.h"

static const char queue_full_text[] =
    "too many requests are waiting (max_queued_requests); try again after the time in Retry-After";

typedef struct completion completion;

typedef struct choice {
    completion *owner;
    generation *gen; /* NULL: not begun, or ended */
    int32_t idx;
    int32_t prompt_idx;
    completion_render render;
    bool has_begun; /* its prompt is rendered, or on the way */
    uv_work_t prompt_work;
    token_logprob *prompt_logprobs; /* for prompt_work */
    double logprob;                 /* of all tokens, for best_of */
    int32_t n_output_tokens;
    int32_t n_cached_tokens;
    int32_t n_host_tokens; /* of the cached ones */
    int32_t n_disk_tokens;
} choice;

struct completion {
    http_api *api;
    http_conn *conn; /* NULL once the client left or the answer is out */
    completion_params params;
    choice *choices; /* [n_choices], prompt-major, best_of of each prompt */
    int32_t n_choices;
    int32_t n_begun;
    int32_t n_ended;
    int32_t n_live; /* generations */
    int32_t n_pins; /* functions and jobs on the pool that go on using it */
    uint64_t arrival_us;
    int64_t created_s;
    char id[HTTP_HEAD_ID_BYTES + 8];
    strbuf chunk_head;      /* what every chunk of a stream begins with */
    strbuf chunk;           /* the one being written */
    bool is_being_taken_in; /* params are being made on the pool */
    bool streaming;
    bool answered;
    completion_intake intake;
    uv_work_t answer_work;
    strbuf answer; /* whole, made by answer_work */
    uv_work_t free_work;
};

static void free_completion(completion *c)
{
    for (int32_t i = 0; i < c->n_choices; i++)
        completion_render_deinit(&c->choices[i].render);
    for (int32_t i = 0; i < c->params.n_prompts; i++) {
        if (c->params.prompts[i].text != NULL)
            mem_free(c->params.prompts[i].ids);
        mem_free(c->params.prompts[i].block_hashes);
    }
    mem_free(c->choices);
    strbuf_deinit(&c->chunk_head);
    strbuf_deinit(&c->chunk);
    strbuf_deinit(&c->answer);
    completion_params_deinit(&c->params);
}

static void free_on_pool(uv_work_t *work)
{
    free_completion(LIST_ENTRY(work, completion, free_work));
}

static void after_free(uv_work_t *work, int status)
{
    (void)status;
    mem_free(LIST_ENTRY(work, completion, free_work));
}

static void start_work(completion *c, uv_work_t *work, uv_work_cb fn, uv_after_work_cb after)
{
    int rc = uv_queue_work(engine_get_loop(c->api->engine), work, fn, after);
    PGD_ASSERT(rc == 0);
}

static bool holds_much(const completion *c)
{
    size_t n_bytes = c->answer.cap_bytes;
    for (int32_t i = 0; i < c->n_choices; i++)
        n_bytes += completion_render_held_bytes(&c->choices[i].render);
    for (int32_t i = 0; i < c->params.n_prompts; i++)
        n_bytes += (size_t)c->params.prompts[i].n_ids * sizeof(token_id) +
                   c->params.prompts[i].n_text_bytes;
    return n_bytes >= POOL_FREE_MIN_BYTES;
}

static void free_if_unused(completion *c)
{
    if (c->conn != NULL || c->is_being_taken_in || c->n_live > 0 || c->n_pins > 0)
        return;
    if (holds_much(c)) {
        start_work(c, &c->free_work, free_on_pool, after_free);
    } else {
        free_completion(c);
        mem_free(c);
    }
}

static void unpin(completion *c)
{
    c->n_pins--;
    free_if_unused(c);
}

static void cancel_all(completion *c)
{
    for (int32_t i = 0; i < c->n_choices; i++) {
        choice *ch = &c->choices[i];
        if (ch->gen != NULL) {
            engine_cancel(c->api->engine, ch->gen);
            ch->gen = NULL;
            c->n_live--;
        }
    }
}

static completion_usage get_usage(const completion *c)
{
    completion_usage usage = {0};
    if (c->is_being_taken_in)
        return usage;
    usage.has_tiers = c->params.return_cached_details;
    for (int32_t i = 0; i < c->params.n_prompts; i++)
        usage.n_prompt_tokens += c->params.prompts[i].n_ids;
    for (int32_t i = 0; i < c->n_choices; i++) {
        const choice *ch = &c->choices[i];
        usage.n_output_tokens += ch->n_output_tokens;
        if (i % c->params.best_of != 0)
            continue;
        usage.n_cached_tokens += ch->n_cached_tokens;
        usage.n_host_tokens += ch->n_host_tokens;
        usage.n_disk_tokens += ch->n_disk_tokens;
    }
    return usage;
}

static void release_conn(completion *c)
{
    completion_usage usage = get_usage(c);
    http_conn_note_tokens(c->conn, usage.n_prompt_tokens, usage.n_output_tokens);
    c->conn = NULL;
}

static void on_disconnect(void *arg)
{
    completion *c = arg;
    release_conn(c);
    cancel_all(c);
    free_if_unused(c);
}

/* The answer is complete: the connection is not ours any more. */
static void let_go(completion *c)
{
    c->answered = true;
    release_conn(c);
    cancel_all(c);
}

static void respond_error(completion *c, int status, const char *param, const char *code,
                          const char *message)
{
    if (c->conn == NULL || c->answered)
        return;
    http_conn *conn = c->conn;
    if (c->streaming) {
        strbuf b;
        strbuf_init(&b);
        strbuf_append_str(&b, "data: ");
        http_error_append(&b, status, param, code, message);
        strbuf_append_str(&b, "\n\ndata: [DONE]\n\n");
        bool alive = http_conn_stream_write(
            conn, b.data, b.n_bytes); /* a failed write has called on_disconnect */
        strbuf_deinit(&b);
        if (!alive)
            return;
        let_go(c);
        http_conn_stream_end(conn);
    } else {
        let_go(c);
        http_error_respond_code(conn, status, param, code, message);
    }
}

static void on_deadline(void *arg)
{
    completion *c = arg;
    c->n_pins++;
    respond_error(c, 504, NULL, NULL,
                  "the request took longer than this server allows (request_timeout)");
    unpin(c);
}

static void append_head(strbuf *b, const completion *c)
{
    completion_render_append_head(b, c->id, c->created_s, engine_model_name(c->api->engine));
}

static void append_usage(strbuf *b, const completion *c)
{
    completion_usage usage = get_usage(c);
    completion_render_append_usage(b, &usage);
}

/* --- progress --------------------------------------------------------------------------------- */

static void finish_stream(completion *c)
{
    http_conn *conn = c->conn;
    strbuf b;
    strbuf_init(&b);
    if (c->params.include_usage) {
        strbuf_append_str(&b, "data: ");
        append_head(&b, c);
        strbuf_append_str(&b, ",\"choices\":[],");
        append_usage(&b, c);
        strbuf_append_str(&b, "}\n\n");
    }
    strbuf_append_str(&b, "data: [DONE]\n\n");
    bool alive = !b.failed && http_conn_stream_write(conn, b.data, b.n_bytes);
    bool failed = b.failed;
    strbuf_deinit(&b);
    if (failed) {
        http_conn_close(conn);
    } else if (alive) {
        let_go(c);
        http_conn_stream_end(conn);
    }
}

static double mean_logprob(const choice *ch)
{
    return ch->n_output_tokens > 0 ? ch->logprob / ch->n_output_tokens : 0;
}

/* The n best of a prompt's choices, best first; ties: the earlier one. Each is freed once it is in
 * the answer. */
static void append_choices(strbuf *b, completion *c, int32_t prompt_idx)
{
    const completion_params *p = &c->params;
    choice *all = &c->choices[prompt_idx * p->best_of];
    choice *order[COMPLETION_MAX_N];
    for (int32_t i = 0; i < p->best_of; i++) {
        int32_t at = i;
        for (; p->best_of > p->n && at > 0 && mean_logprob(&all[i]) > mean_logprob(order[at - 1]);
             at--)
            order[at] = order[at - 1];
        order[at] = &all[i];
    }
    for (int32_t i = 0; i < p->best_of; i++) {
        if (i < p->n && prompt_idx + i > 0)
            strbuf_append_char(b, ',');
        if (i < p->n)
            completion_render_append_choice(b, &order[i]->render, prompt_idx * p->n + i);
        completion_render_deinit(&order[i]->render);
    }
}

static void make_answer_on_pool(uv_work_t *work)
{
    completion *c = LIST_ENTRY(work, completion, answer_work);
    strbuf *b = &c->answer;
    append_head(b, c);
    strbuf_append_str(b, ",\"choices\":[");
    for (int32_t i = 0; i < c->params.n_prompts; i++)
        append_choices(b, c, i);
    strbuf_append_str(b, "],");
    append_usage(b, c);
    strbuf_append_char(b, '}');
}

static void after_answer(uv_work_t *work, int status)
{
    (void)status;
    completion *c = LIST_ENTRY(work, completion, answer_work);
    c->api->n_renders--;
    http_conn *conn = c->conn; /* NULL: the client left, or was told that it took too long */
    if (conn != NULL && c->answer.failed) {
        respond_error(c, 503, NULL, NULL, "out of memory for the answer");
    } else if (conn != NULL) {
        let_go(c);
        http_conn_respond_given(conn, 200, "application/json", &c->answer);
    }
    unpin(c);
}

static void finish_whole(completion *c)
{
    c->n_pins++;
    c->api->n_renders++;
    start_work(c, &c->answer_work, make_answer_on_pool, after_answer);
}

static void stream_choice(completion *c, choice *ch)
{
    strbuf *b = &c->chunk;
    strbuf_reset(b);
    strbuf_append(b, c->chunk_head.data, c->chunk_head.n_bytes);
    completion_render_append_choice(b, &ch->render, ch->idx);
    strbuf_append_str(b, c->params.include_usage ? "],\"usage\":null}\n\n" : "]}\n\n");
    completion_render_reset(&ch->render);
    if (b->failed || c->chunk_head.failed)
        http_conn_close(c->conn); /* calls on_disconnect */
    else
        (void)!http_conn_stream_write(c->conn, b->data, b->n_bytes);
}

static void render_prompt_on_pool(uv_work_t *work)
{
    choice *ch = LIST_ENTRY(work, choice, prompt_work);
    const completion_params *params = &ch->owner->params;
    const completion_prompt *p = &params->prompts[ch->prompt_idx];
    completion_render_add_prompt_ids(&ch->render, p->ids, p->n_ids);
    if (params->echo) {
        completion_render_prompt prompt = {
            .text = p->text,
            .n_text_bytes = p->n_text_bytes,
            .ids = p->ids,
            .n_ids = p->n_ids,
            .logprobs = ch->prompt_logprobs,
            .n_logprobs_per_token = params->sampling.n_prompt_logprobs_per_token,
        };
        completion_render_echo(&ch->render, &prompt);
    }
    mem_free(ch->prompt_logprobs);
    ch->prompt_logprobs = NULL;
}

static void after_prompt(uv_work_t *work, int status)
{
    (void)status;
    choice *ch = LIST_ENTRY(work, choice, prompt_work);
    completion *c = ch->owner;
    c->api->n_renders--;
    if (c->conn != NULL && c->streaming && c->params.echo)
        stream_choice(c, ch);
    if (ch->gen != NULL)
        engine_resume(c->api->engine, ch->gen);
    unpin(c);
}

/* The prompt comes before anything else of a choice, an echo in a stream as a chunk of its own. */
static void begin_choice(choice *ch, generation *g)
{
    completion *c = ch->owner;
    engine_hold(g);
    c->n_pins++;
    c->api->n_renders++;
    ch->prompt_logprobs = g->prompt_logprobs;
    g->prompt_logprobs = NULL;
    start_work(c, &ch->prompt_work, render_prompt_on_pool, after_prompt);
}

static void note_chunk(choice *ch, const generation *g)
{
    const completion_params *params = &ch->owner->params;
    completion_render *r = &ch->render;
    ch->n_cached_tokens = g->n_cached_tokens;
    ch->n_host_tokens = g->n_host_tokens;
    ch->n_disk_tokens = g->n_disk_tokens;
    if (params->max_tokens == 0) { /* the one token that was sampled is nobody's */
        if (g->finish == GENERATION_STOP || g->finish == GENERATION_LENGTH)
            r->finish_reason = "length";
        else if (g->finish == GENERATION_ABORT)
            r->finish_reason = "abort";
        return;
    }
    completion_render_add_text(r, g->text.data, g->text.n_bytes);
    for (int32_t i = 0; i < g->n_tokens; i++) {
        completion_render_add_token(r, &g->tokens[i]);
        if (g->tokens[i].n_logprobs > 0)
            ch->logprob += (double)g->tokens[i].logprobs[0].logprob;
    }
    ch->n_output_tokens = g->n_output_tokens;
    if (g->finish == GENERATION_STOP) {
        r->finish_reason = "stop";
        r->stop_token = g->stop_token;
        if (g->stop_string_idx >= 0) {
            r->stop_string = params->stop[g->stop_string_idx];
            r->n_stop_string_bytes = params->stop_bytes[g->stop_string_idx];
        }
    } else if (g->finish == GENERATION_LENGTH) {
        r->finish_reason = "length";
    } else if (g->finish == GENERATION_ABORT) {
        r->finish_reason = "abort";
    }
}

static void note_choices(const completion *c)
{
    for (int32_t p = 0; p < c->params.n_prompts; p++) {
        int32_t longest = 0;
        for (int32_t i = 0; i < c->params.best_of; i++)
            longest = PGD_MAX(longest, c->choices[p * c->params.best_of + i].n_output_tokens);
        engine_metrics_note_choices(engine_get_metrics(c->api->engine), longest);
    }
}

static void on_chunk(void *arg, generation *g)
{
    choice *ch = arg;
    completion *c = ch->owner;
    if (!ch->has_begun && g->finish != GENERATION_ERROR) {
        ch->has_begun = true;
        if (c->params.echo || c->params.return_token_ids) {
            begin_choice(ch, g); /* and then we are called again */
            return;
        }
    }
    c->n_pins++;
    if (g->finish != GENERATION_RUNNING) {
        ch->gen = NULL; /* the engine frees it after this call */
        c->n_live--;
        c->n_ended++;
    }
    if (g->finish == GENERATION_ERROR) {
        respond_error(c, g->error_status != 0 ? g->error_status : 500, NULL, NULL,
                      g->error_text != NULL ? g->error_text : "out of memory");
    } else {
        note_chunk(ch, g);
        if (c->conn != NULL && c->streaming &&
            (c->params.max_tokens != 0 || ch->render.finish_reason != NULL))
            stream_choice(c, ch);
        if (c->n_ended == c->n_choices)
            note_choices(c);
        if (c->conn != NULL && c->n_ended == c->n_choices) {
            if (c->streaming)
                finish_stream(c);
            else
                finish_whole(c);
        }
    }
    unpin(c);
}

/* --- start ------------------------------------------------------------------------------------ */

static void respond_refusal(completion *c, core_refusal refusal)
{
    if (refusal == CORE_REFUSAL_QUEUE_FULL) {
        c->api->n_refused_queue++;
        respond_error(c, 429, NULL, NULL, queue_full_text);
    } else if (refusal == CORE_REFUSAL_DRAINING) {
        respond_error(c, 503, NULL, NULL, "the server is shutting down");
    } else {
        respond_error(c, 503, NULL, NULL, "the model worker is not available");
    }
}

/* All prompts are ids now: begin every choice, or none. */
static void begin(completion *c)
{
    engine *e = c->api->engine;
    core_stats stats;
    completion_fault fault;
    engine_get_stats(e, &stats);
    int32_t max_source = engine_max_source(e);
    if (!completion_limits_check(&fault, &c->params, &stats, engine_get_config(e), max_source)) {
        respond_error(c, fault.status, fault.param, fault.code, fault.message);
        return;
    }
    for (int32_t i = 0; i < c->n_choices; i++) {
        choice *ch = &c->choices[i];
        const completion_prompt *prompt = &c->params.prompts[ch->prompt_idx];
        int32_t max_tokens = c->params.max_tokens;
        if (max_tokens < 0) /* the API's default, or what the context leaves */
            max_tokens = PGD_MIN(COMPLETION_DEFAULT_TOKENS,
                                 stats.max_model_len - (max_source > 0 ? 1 : prompt->n_ids));
        max_tokens = PGD_MAX(max_tokens, 1); /* 0: a step is run all the same, for the prompt */
        generation_opts opts = {
            .prompt = prompt->ids,
            .n_prompt_tokens = prompt->n_ids,
            .prompt_hashes = prompt->block_hashes,
            .max_tokens = max_tokens,
            .params = c->params.sampling,
            .ignore_eos = c->params.ignore_eos,
            .stop = c->params.stop,
            .stop_bytes = c->params.stop_bytes,
            .n_stop = c->params.n_stop,
            .include_stop = c->params.include_stop,
            .skip_special = c->params.skip_special,
            .keep_tokens = c->params.return_token_ids || c->params.sampling.n_logprobs >= 0,
            .priority = c->params.priority,
            .cache_salt = c->params.cache_salt,
            .arrival_us = c->arrival_us,
            .on_chunk = on_chunk,
            .arg = ch,
        };
        opts.params.choice_idx = i % c->params.best_of;
        if (opts.params.choice_idx == 0)
            engine_metrics_note_params(engine_get_metrics(e), c->params.n, max_tokens);
        core_refusal refusal = engine_generate(e, &ch->gen, &opts);
        if (refusal != CORE_REFUSAL_NONE) {
            respond_refusal(c, refusal); /* cancels those already begun */
            return;
        }
        c->n_live++;
    }
    if (c->params.stream) {
        c->streaming = true;
        strbuf_append_str(&c->chunk_head, "data: ");
        append_head(&c->chunk_head, c);
        strbuf_append_str(&c->chunk_head, ",\"choices\":[");
        http_conn_stream_begin(c->conn, 200, "text/event-stream; charset=utf-8",
                               "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
    }
}

static bool make_choices(completion *c)
{
    int32_t n_choices = c->params.n_prompts * c->params.best_of;
    c->choices = mem_calloc((size_t)n_choices, sizeof(choice));
    if (c->choices == NULL)
        return false;
    c->n_choices = n_choices;
    for (int32_t i = 0; i < n_choices; i++) {
        c->choices[i].owner = c;
        c->choices[i].idx = i;
        c->choices[i].prompt_idx = i / c->params.best_of;
        completion_render_init(&c->choices[i].render, engine_get_tokenizer(c->api->engine),
                               c->params.return_token_ids, c->params.wants_logprobs,
                               c->params.skip_special);
    }
    return true;
}

/* Each name once, and only so many of them: a client's typing error is worth a line, not a flood. */
static void log_unknown_fields(http_api *api, const completion_params *p)
{
    for (int32_t k = 0; k < p->n_unknown; k++) {
        uint64_t hash = hash_bytes(p->unknown[k], strlen(p->unknown[k]), 0);
        int32_t i = 0;
        while (i < api->n_unknown_fields && api->unknown_fields[i] != hash)
            i++;
        if (i < api->n_unknown_fields || i == HTTP_API_MAX_UNKNOWN)
            continue;
        api->unknown_fields[api->n_unknown_fields++] = hash;
        log_warn("http", "unknown field %.60s in a completion request is ignored (told once)",
                 p->unknown[k]);
    }
}

static void on_taken_in(void *arg)
{
    completion *c = arg;
    const completion_fault *fault = &c->intake.fault;
    c->n_pins++;
    c->is_being_taken_in = false;
    c->api->n_intakes--;
    log_unknown_fields(c->api, &c->params);
    if (fault->status != 0) {
        respond_error(c, fault->status, fault->param, fault->code, fault->message);
    } else if (c->conn != NULL) {
        if (!c->params.has_seed)
            c->params.sampling.seed = engine_draw_seed(c->api->engine);
        if (make_choices(c))
            begin(c);
        else
            respond_error(c, 503, NULL, NULL, "out of memory for this request");
    }
    unpin(c);
}

/* False when the server cannot take a request now; the answer is out. */
static bool check_ready(http_api *api, http_conn *conn)
{
    core_stats stats;
    engine_get_stats(api->engine, &stats);
    if (api->draining || stats.state == CORE_DRAINING || stats.state == CORE_STOPPED) {
        http_error_respond(conn, 503, NULL, "the server is shutting down");
    } else if (stats.state == CORE_STARTING || stats.state == CORE_LOADING) {
        http_error_respond(conn, 503, NULL, "the model is loading (%.0f %%)",
                           stats.load_total_bytes > 0 ? 100.0 * (double)stats.load_done_bytes /
                                                            (double)stats.load_total_bytes
                                                      : 0.0);
    } else if (stats.state == CORE_FAILED) {
        http_error_respond(conn, 503, NULL, "the model worker could not be kept running: %.300s",
                           stats.why);
    } else if (engine_n_generations(api->engine) + api->n_intakes >=
               engine_get_config(api->engine)->max_queued_requests) {
        /* Told before the body is looked at: an overload must not cost parsing and tokenizing. */
        api->n_refused_queue++;
        http_error_respond(conn, 429, NULL, "%s", queue_full_text);
        return false;
    } else {
        return true;
    }
    return false;
}

void api_completions_handle(http_api *api, http_conn *conn, const http_request *req)
{
    (void)req;
    if (!check_ready(api, conn))
        return;
    completion *c = mem_calloc(1, sizeof(*c));
    if (c == NULL) {
        http_error_respond(conn, 503, NULL, "out of memory for this request");
        return;
    }
    c->api = api;
    c->arrival_us = clock_now_us();
    c->created_s = clock_wall_s();
    c->conn = conn;
    snprintf(c->id, sizeof(c->id), "cmpl-%s", http_conn_request_id(conn));
    http_conn_on_disconnect(conn, on_disconnect, c);
    http_conn_on_deadline(conn, on_deadline, c);
    c->is_being_taken_in = true;
    api->n_intakes++;
    completion_intake_start(&c->intake, &c->params, api->engine, conn, on_taken_in, c);
}
