/* One job of the pool per request, whatever its number of prompts: a request with many of them
 * takes its turn like any other. Rejected: small bodies on the io thread, which would be a second
 * path for the few microseconds that a hop to the pool costs. */
#include "engine/http/completion_intake.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"

PGD_PRINTF(5, 6)
static void fail(completion_intake *in, int status, const char *param, const char *code,
                 const char *fmt, ...)
{
    va_list args;
    in->fault.status = status;
    in->fault.param = param;
    in->fault.code = code;
    va_start(args, fmt);
    vsnprintf(in->fault.message, sizeof(in->fault.message), fmt, args);
    va_end(args);
}

static void fail_memory(completion_intake *in)
{
    fail(in, 503, NULL, NULL, "out of memory for this request");
}

static bool tokenize(completion_intake *in, completion_prompt *prompt)
{
    /* Twice the context is room enough to tell the user the real count in most cases. */
    int32_t max_ids = (int32_t)PGD_MIN(PGD_MAX(2 * (int64_t)in->max_model_len, 1024), INT32_MAX);
    pgd_err err = tokenizer_encode(&prompt->ids, &prompt->n_ids, engine_get_tokenizer(in->engine),
                                   prompt->text, prompt->n_text_bytes,
                                   TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, max_ids);
    if (err == PGD_ERANGE)
        fail(in, 400, "prompt", "context_length_exceeded",
             "This model's maximum context length is %d tokens. You requested more than %d tokens "
             "in the prompt; shorten the prompt.",
             in->max_model_len, max_ids);
    else if (err == PGD_ENOMEM)
        fail_memory(in);
    else if (err != PGD_OK)
        fail(in, 500, "prompt", NULL, "the prompt could not be tokenized");
    return err == PGD_OK;
}

/* A prompt that is too long is refused later, with numbers. */
static bool hash(completion_intake *in, completion_prompt *prompt)
{
    if (prompt->n_ids >= in->max_model_len)
        return true;
    pgd_err err = engine_hash_prompt(&prompt->block_hashes, in->engine, prompt->ids, prompt->n_ids,
                                     in->params->cache_salt);
    if (err != PGD_OK)
        fail_memory(in);
    return err == PGD_OK;
}

static void work_on_pool(uv_work_t *work)
{
    completion_intake *in = LIST_ENTRY(work, completion_intake, work);
    completion_params *p = in->params;
    const char *body = in->body.bytes.data != NULL ? in->body.bytes.data : "";
    sampling_params defaults;
    engine_default_params(in->engine, &defaults);
    if (!completion_params_parse(p, body, in->body.bytes.n_bytes, engine_get_config(in->engine),
                                 &defaults, engine_model_name(in->engine),
                                 engine_get_model(in->engine)->vocab_size, &in->fault))
        return;
    for (int32_t i = 0; i < p->n_prompts; i++) {
        completion_prompt *prompt = &p->prompts[i];
        if ((prompt->text != NULL && !tokenize(in, prompt)) || !hash(in, prompt))
            return;
    }
}

static void after_work(uv_work_t *work, int status)
{
    completion_intake *in = LIST_ENTRY(work, completion_intake, work);
    http_body_release(&in->body);
    if (status != 0)
        fail_memory(in);
    in->fn(in->arg);
}

void completion_intake_start(completion_intake *in, completion_params *params, engine *e,
                             http_conn *conn, void (*fn)(void *arg), void *arg)
{
    core_stats stats;
    engine_get_stats(e, &stats);
    in->params = params;
    in->engine = e;
    in->max_model_len = engine_max_source(e) > 0 ? engine_max_source(e) : stats.max_model_len;
    in->fn = fn;
    in->arg = arg;
    http_conn_take_body(&in->body, conn);
    int rc = uv_queue_work(engine_get_loop(e), &in->work, work_on_pool, after_work);
    if (rc != 0)
        after_work(&in->work, rc);
}
