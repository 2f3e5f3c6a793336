/* POST /tokenize and /detokenize: text to ids and back, without the model.
 *
 * All of it, from reading the body to the answer's JSON, is done on libuv's pool, so that a megabyte
 * of text delays nobody's tokens. What waits for the pool is bounded like everything else: by
 * max_queued_requests in number and, since a job holds the body, by what bodies may hold in bytes.
 * Whose client has left, or has been told 504 (request_timeout), is not begun; if it runs already, its
 * answer is dropped. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/json.h"
#include "common/mem.h"
#include "engine/http/completion_params.h"
#include "engine/http/http_api.h"
#include "engine/http/http_errors.h"
#include "engine/text/detokenizer.h"

/* As many as a request can carry, so that every answer can be sent back as a prompt. */
#define MAX_IDS COMPLETION_MAX_VALUES

typedef struct text_job text_job;

struct text_job {
    uv_work_t work;
    http_api *api;
    http_conn *conn; /* NULL when the client left */
    const tokenizer *tok;
    http_body body;
    bool (*read)(text_job *job, const cJSON *tree);
    void (*translate)(text_job *job);
    char *text; /* tokenize */
    size_t n_text_bytes;
    bool add_special;
    bool with_strs;
    int32_t max_model_len;
    token_id *ids; /* given, or the result */
    int32_t n_ids;
    strbuf answer;
    completion_fault fault; /* status 0: the answer is good */
};

static void free_job(text_job *job)
{
    http_body_release(&job->body);
    mem_free(job->text);
    mem_free(job->ids);
    strbuf_deinit(&job->answer);
    mem_free(job);
}

/* Nobody waits for the answer any more; on_done comes all the same. */
static void let_go(text_job *job)
{
    job->conn = NULL;
    (void)uv_cancel((uv_req_t *)&job->work); /* it may be running */
}

static void on_disconnect(void *arg)
{
    let_go(arg);
}

static void on_deadline(void *arg)
{
    text_job *job = arg;
    http_conn *conn = job->conn;
    let_go(job);
    http_error_respond(conn, 504, NULL,
                       "the request took longer than this server allows (request_timeout)");
}

/* --- on the pool ------------------------------------------------------------------------------ */

PGD_PRINTF(4, 5)
static bool fail(text_job *job, int status, const char *param, const char *fmt, ...)
{
    va_list args;
    job->fault.status = status;
    job->fault.param = param;
    va_start(args, fmt);
    vsnprintf(job->fault.message, sizeof(job->fault.message), fmt, args);
    va_end(args);
    return false;
}

static bool fail_memory(text_job *job)
{
    return fail(job, 503, NULL, "out of memory for this request");
}

static bool read_flag(text_job *job, const cJSON *tree, const char *name, bool *out)
{
    const cJSON *item = json_get(tree, name);
    if (item != NULL && !cJSON_IsBool(item))
        return fail(job, 400, name, "%s: expected true or false", name);
    if (item != NULL)
        *out = cJSON_IsTrue(item);
    return true;
}

static bool read_text(text_job *job, const cJSON *tree)
{
    const cJSON *prompt = json_get(tree, "prompt");
    job->add_special = true;
    if (!read_flag(job, tree, "add_special_tokens", &job->add_special) ||
        !read_flag(job, tree, "return_token_strs", &job->with_strs))
        return false;
    if (!cJSON_IsString(prompt))
        return fail(job, 400, "prompt", "prompt: expected a string, got %s",
                    prompt == NULL ? "nothing" : "something else");
    job->text = json_string_dup(prompt, &job->n_text_bytes);
    return job->text != NULL || fail_memory(job);
}

static bool read_ids(text_job *job, const cJSON *tree)
{
    const cJSON *tokens = json_get(tree, "tokens");
    int32_t vocab_size = engine_get_model(job->api->engine)->vocab_size;
    if (!cJSON_IsArray(tokens))
        return fail(job, 400, "tokens", "tokens: expected an array of token ids");
    job->ids = mem_calloc((size_t)cJSON_GetArraySize(tokens), sizeof(token_id));
    if (job->ids == NULL)
        return fail_memory(job);
    for (const cJSON *e = tokens->child; e != NULL; e = e->next) {
        double v = e->valuedouble;
        if (!cJSON_IsNumber(e) || !(v >= 0 && v < vocab_size) || v != (double)(token_id)v)
            return fail(job, 400, "tokens",
                        "tokens: expected token ids (integers from 0 to %d) at index %d",
                        vocab_size - 1, job->n_ids);
        job->ids[job->n_ids++] = (token_id)v;
    }
    return true;
}

static bool read_tree(text_job *job, const cJSON *tree)
{
    const char *name = engine_model_name(job->api->engine);
    const cJSON *model = json_get(tree, "model");
    if (!cJSON_IsObject(tree))
        return fail(job, 400, NULL, "the body must be a JSON object");
    if (model != NULL && !cJSON_IsString(model))
        return fail(job, 400, "model", "model: expected a string");
    if (model != NULL && strcmp(json_string(model), name) != 0) {
        job->fault.code = "model_not_found";
        return fail(job, 404, "model", HTTP_ERROR_NO_MODEL, json_string(model), name);
    }
    return job->read(job, tree);
}

static bool read_body(text_job *job)
{
    cJSON *tree;
    pgd_why why;
    const strbuf *body = &job->body.bytes;
    pgd_err err = json_parse_bounded(&tree, body->data != NULL ? body->data : "", body->n_bytes,
                                     JSON_MAX_DEPTH, COMPLETION_MAX_VALUES, &why);
    if (err != PGD_OK)
        return fail(job, err == PGD_ENOMEM ? 503 : 400, NULL, "%s", why.text);
    bool ok = read_tree(job, tree);
    cJSON_Delete(tree);
    return ok;
}

static void tokenize(text_job *job)
{
    strbuf *b = &job->answer;
    unsigned flags = TOKENIZER_PARSE_SPECIAL | (job->add_special ? TOKENIZER_ADD_SPECIAL : 0u);
    pgd_err err = tokenizer_encode(&job->ids, &job->n_ids, job->tok, job->text, job->n_text_bytes,
                                   flags, MAX_IDS);
    if (err == PGD_ENOMEM) {
        fail_memory(job);
        return;
    }
    if (err != PGD_OK) {
        if (err == PGD_ERANGE)
            fail(job, 400, "prompt", "prompt: expected at most %d tokens, got more", MAX_IDS);
        else
            fail(job, 500, "prompt", "the prompt could not be tokenized");
        return;
    }
    strbuf_appendf(b, "{\"count\":%d,\"max_model_len\":%d,\"tokens\":[", job->n_ids,
                   job->max_model_len);
    for (int32_t i = 0; i < job->n_ids; i++) {
        if (i > 0)
            strbuf_append_char(b, ',');
        strbuf_append_int(b, job->ids[i]);
    }
    strbuf_append_str(b, "],\"token_strs\":");
    if (!job->with_strs) {
        strbuf_append_str(b, "null}");
        return;
    }
    strbuf_append_char(b, '[');
    for (int32_t i = 0; i < job->n_ids; i++) {
        size_t n;
        const char *piece = tokenizer_piece(job->tok, job->ids[i], &n);
        if (i > 0)
            strbuf_append_char(b, ',');
        strbuf_append_json(b, piece, n);
    }
    strbuf_append_str(b, "]}");
}

static void detokenize(text_job *job)
{
    detokenizer d;
    strbuf text;
    strbuf_init(&text);
    detokenizer_init(&d, job->tok, false, false);
    for (int32_t i = 0; i < job->n_ids; i++)
        detokenizer_push(&d, job->ids[i], &text);
    detokenizer_flush(&d, &text);
    strbuf_append_str(&job->answer, "{\"prompt\":");
    strbuf_append_json(&job->answer, text.data != NULL ? text.data : "", text.n_bytes);
    strbuf_append_char(&job->answer, '}');
    job->answer.failed = job->answer.failed || text.failed;
    strbuf_deinit(&text);
}

static void work_on_pool(uv_work_t *work)
{
    text_job *job = work->data;
    if (read_body(job))
        job->translate(job);
    if (job->answer.failed)
        fail_memory(job);
}

/* --- on the io thread ------------------------------------------------------------------------- */

static void on_done(uv_work_t *work, int status)
{
    text_job *job = work->data;
    const completion_fault *fault = &job->fault;
    job->api->n_text_jobs--;
    if (status != 0)
        fail_memory(job);
    if (job->conn != NULL && fault->status != 0)
        http_error_respond_code(job->conn, fault->status, fault->param, fault->code,
                                fault->message);
    else if (job->conn != NULL)
        http_conn_respond_given(job->conn, 200, "application/json", &job->answer);
    free_job(job);
}

static void start(http_api *api, http_conn *conn, bool (*read)(text_job *job, const cJSON *tree),
                  void (*translate)(text_job *job))
{
    core_stats stats;
    if (api->n_text_jobs >= engine_get_config(api->engine)->max_queued_requests) {
        api->n_refused_queue++;
        http_error_respond(conn, 429, NULL, "too many texts are waiting (max_queued_requests)");
        return;
    }
    text_job *job = mem_calloc(1, sizeof(*job));
    if (job == NULL) {
        http_error_respond(conn, 503, NULL, "out of memory for this request");
        return;
    }
    engine_get_stats(api->engine, &stats);
    job->api = api;
    job->conn = conn;
    job->tok = engine_get_tokenizer(api->engine);
    job->max_model_len = stats.max_model_len;
    job->read = read;
    job->translate = translate;
    job->work.data = job;
    strbuf_init(&job->answer);
    http_conn_take_body(&job->body, conn);
    http_conn_on_disconnect(conn, on_disconnect, job);
    http_conn_on_deadline(conn, on_deadline, job);
    api->n_text_jobs++;
    int rc = uv_queue_work(engine_get_loop(api->engine), &job->work, work_on_pool, on_done);
    if (rc != 0)
        on_done(&job->work, rc);
}

void api_tokenize_handle(http_api *api, http_conn *conn, const http_request *req)
{
    (void)req;
    start(api, conn, read_text, tokenize);
}

void api_detokenize_handle(http_api *api, http_conn *conn, const http_request *req)
{
    (void)req;
    start(api, conn, read_ids, detokenize);
}
