/* POST /tokenize and /detokenize: text to ids and back, without the model.
 *
 * The body is read on the io thread, the work and the answer's JSON are made on libuv's pool, so that
 * a megabyte of text delays nobody's tokens. What waits for the pool is bounded like everything else:
 * by max_queued_requests in number and by what bodies may hold in bytes. A job outlives its client;
 * its answer is dropped then. */
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

typedef struct text_job {
    uv_work_t work;
    http_api *api;
    http_conn *conn; /* NULL when the client left */
    const tokenizer *tok;
    size_t n_held_bytes; /* what it counts for */
    char *text;          /* tokenize */
    size_t n_text_bytes;
    bool add_special;
    bool with_strs;
    int32_t max_model_len;
    token_id *ids; /* given, or the result */
    int32_t n_ids;
    pgd_err err;
    strbuf answer;
} text_job;

static void free_job(text_job *job)
{
    mem_free(job->text);
    mem_free(job->ids);
    strbuf_deinit(&job->answer);
    mem_free(job);
}

static void on_disconnect(void *arg)
{
    text_job *job = arg;
    job->conn = NULL;
}

/* --- on the pool ------------------------------------------------------------------------------ */

static void tokenize(uv_work_t *work)
{
    text_job *job = work->data;
    strbuf *b = &job->answer;
    unsigned flags = TOKENIZER_PARSE_SPECIAL | (job->add_special ? TOKENIZER_ADD_SPECIAL : 0u);
    job->err = tokenizer_encode(&job->ids, &job->n_ids, job->tok, job->text, job->n_text_bytes,
                                flags, MAX_IDS);
    if (job->err != PGD_OK)
        return;
    strbuf_appendf(b, "{\"count\":%d,\"max_model_len\":%d,\"tokens\":[", job->n_ids,
                   job->max_model_len);
    for (int32_t i = 0; i < job->n_ids; i++)
        strbuf_appendf(b, i > 0 ? ",%d" : "%d", job->ids[i]);
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

static void detokenize(uv_work_t *work)
{
    text_job *job = work->data;
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

/* --- on the io thread ------------------------------------------------------------------------- */

static void on_done(uv_work_t *work, int status)
{
    text_job *job = work->data;
    job->api->n_text_jobs--;
    job->api->n_text_bytes -= job->n_held_bytes;
    if (job->conn != NULL) {
        if (status != 0 || job->err == PGD_ENOMEM || job->answer.failed)
            http_error_respond(job->conn, 503, NULL, "out of memory for this request");
        else if (job->err == PGD_ERANGE)
            http_error_respond(job->conn, 400, "prompt",
                               "prompt: expected at most %d tokens, got more", MAX_IDS);
        else if (job->err != PGD_OK)
            http_error_respond(job->conn, 500, "prompt", "the prompt could not be tokenized");
        else
            http_conn_respond(job->conn, 200, "application/json", NULL, job->answer.data,
                              job->answer.n_bytes);
    }
    free_job(job);
}

/* Answers and frees the job itself when it cannot start. */
static void start(text_job *job, http_conn *conn, uv_work_cb work)
{
    http_api *api = job->api;
    const config *cfg = engine_get_config(api->engine);
    job->n_held_bytes = job->n_text_bytes + (size_t)job->n_ids * sizeof(token_id);
    if (api->n_text_jobs >= cfg->max_queued_requests ||
        api->n_text_bytes + job->n_held_bytes >
            (size_t)cfg->max_body_bytes * HTTP_CONN_MAX_BODIES) {
        api->n_refused_queue++;
        http_error_respond(conn, 429, NULL, "too many texts are waiting (max_queued_requests)");
        free_job(job);
        return;
    }
    job->work.data = job;
    if (uv_queue_work(engine_get_loop(api->engine), &job->work, work, on_done) != 0) {
        http_error_respond(conn, 503, NULL, "out of memory for this request");
        free_job(job);
        return;
    }
    api->n_text_jobs++;
    api->n_text_bytes += job->n_held_bytes;
    job->conn = conn;
    http_conn_on_disconnect(conn, on_disconnect, job);
}

/* NULL when the body is refused or there is no memory; the answer is out. */
static cJSON *read_body(http_api *api, http_conn *conn, const http_request *req)
{
    cJSON *tree;
    pgd_why why;
    pgd_err err = json_parse_bounded(&tree, req->body, req->n_body_bytes, JSON_MAX_DEPTH,
                                     COMPLETION_MAX_VALUES, &why);
    if (err != PGD_OK) {
        http_error_respond(conn, err == PGD_ENOMEM ? 503 : 400, NULL, "%s", why.text);
        return NULL;
    }
    const char *name = engine_model_name(api->engine);
    const cJSON *model = json_get(tree, "model");
    if (!cJSON_IsObject(tree)) {
        http_error_respond(conn, 400, NULL, "the body must be a JSON object");
    } else if (model != NULL && !cJSON_IsString(model)) {
        http_error_respond(conn, 400, "model", "model: expected a string");
    } else if (model != NULL && strcmp(json_string(model), name) != 0) {
        http_error_respond_no_model(conn, json_string(model), name);
    } else {
        return tree;
    }
    cJSON_Delete(tree);
    return NULL;
}

static text_job *create_job(http_api *api)
{
    text_job *job = mem_calloc(1, sizeof(*job));
    if (job == NULL)
        return NULL;
    job->api = api;
    job->tok = engine_get_tokenizer(api->engine);
    strbuf_init(&job->answer);
    return job;
}

static bool read_flag(http_conn *conn, const cJSON *tree, const char *name, bool *out)
{
    const cJSON *item = json_get(tree, name);
    if (item != NULL && !cJSON_IsBool(item)) {
        http_error_respond(conn, 400, name, "%s: expected true or false", name);
        return false;
    }
    if (item != NULL)
        *out = cJSON_IsTrue(item);
    return true;
}

static bool read_tokenize(text_job *job, http_conn *conn, const cJSON *tree)
{
    core_stats stats;
    const cJSON *prompt = json_get(tree, "prompt");
    job->add_special = true;
    if (!read_flag(conn, tree, "add_special_tokens", &job->add_special) ||
        !read_flag(conn, tree, "return_token_strs", &job->with_strs))
        return false;
    if (!cJSON_IsString(prompt)) {
        http_error_respond(conn, 400, "prompt", "prompt: expected a string, got %s",
                           prompt == NULL ? "nothing" : "something else");
        return false;
    }
    engine_get_stats(job->api->engine, &stats);
    job->max_model_len = stats.max_model_len;
    job->text = json_string_dup(prompt, &job->n_text_bytes);
    if (job->text == NULL)
        http_error_respond(conn, 503, NULL, "out of memory for this request");
    return job->text != NULL;
}

static bool read_detokenize(text_job *job, http_conn *conn, const cJSON *tree)
{
    const cJSON *tokens = json_get(tree, "tokens");
    int32_t vocab_size = engine_get_model(job->api->engine)->vocab_size;
    if (!cJSON_IsArray(tokens)) {
        http_error_respond(conn, 400, "tokens", "tokens: expected an array of token ids");
        return false;
    }
    job->ids = mem_calloc((size_t)cJSON_GetArraySize(tokens), sizeof(token_id));
    if (job->ids == NULL) {
        http_error_respond(conn, 503, NULL, "out of memory for this request");
        return false;
    }
    for (const cJSON *e = tokens->child; e != NULL; e = e->next) {
        double v = e->valuedouble;
        if (!cJSON_IsNumber(e) || !(v >= 0 && v < vocab_size) || v != (double)(token_id)v) {
            http_error_respond(conn, 400, "tokens",
                               "tokens: expected token ids (integers from 0 to %d) at index %d",
                               vocab_size - 1, job->n_ids);
            return false;
        }
        job->ids[job->n_ids++] = (token_id)v;
    }
    return true;
}

static void handle(http_api *api, http_conn *conn, const http_request *req,
                   bool (*read)(text_job *job, http_conn *conn, const cJSON *tree), uv_work_cb work)
{
    cJSON *tree = read_body(api, conn, req);
    if (tree == NULL)
        return;
    text_job *job = create_job(api);
    if (job == NULL)
        http_error_respond(conn, 503, NULL, "out of memory for this request");
    else if (read(job, conn, tree))
        start(job, conn, work);
    else
        free_job(job);
    cJSON_Delete(tree);
}

void api_tokenize_handle(http_api *api, http_conn *conn, const http_request *req)
{
    handle(api, conn, req, read_tokenize, tokenize);
}

void api_detokenize_handle(http_api *api, http_conn *conn, const http_request *req)
{
    handle(api, conn, req, read_detokenize, detokenize);
}
