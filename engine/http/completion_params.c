/* One row per field: name, reader. A reader sees the JSON item (never null) and either fills its
 * field or words the fault. Fields of peers' APIs that change what comes back, but are not built
 * here, are refused unless they ask for the neutral value: ignoring them would answer something
 * else than was asked. */
#include "engine/http/completion_params.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>

#include "common/json.h"
#include "common/log.h"
#include "common/mem.h"

#define ARENA_FACTOR       8 /* arena bytes per body byte, for ids (4 bytes from "1,") */
#define MAX_SALT_BYTES     128
#define MAX_LOGGED_UNKNOWN 64

typedef struct parse_ctx {
    completion_params *p;
    const config *cfg;
    const char *model_name;
    int32_t vocab_size;
    completion_fault *fault;
} parse_ctx;

typedef bool (*field_fn)(parse_ctx *c, const char *name, const cJSON *item);

#define FAIL(c, name, ...) return fail(c, 400, name, NULL, __VA_ARGS__)

static bool fail(parse_ctx *c, int status, const char *param, const char *code, const char *fmt,
                 ...) PGD_PRINTF(5, 6);

static bool fail(parse_ctx *c, int status, const char *param, const char *code, const char *fmt,
                 ...)
{
    va_list args;
    c->fault->status = status;
    c->fault->param = param;
    c->fault->code = code;
    va_start(args, fmt);
    vsnprintf(c->fault->message, sizeof(c->fault->message), fmt, args);
    va_end(args);
    return false;
}

static bool fail_memory(parse_ctx *c)
{
    return fail(c, 503, NULL, NULL, "out of memory for this request");
}

/* --- readers of one kind ---------------------------------------------------------------------- */

static bool read_number(parse_ctx *c, const char *name, const cJSON *item, double *out, double min,
                        double max)
{
    if (!cJSON_IsNumber(item))
        FAIL(c, name, "%s: expected a number", name);
    if (!(item->valuedouble >= min && item->valuedouble <= max))
        FAIL(c, name, "%s: expected %g to %g, got %g", name, min, max, item->valuedouble);
    *out = item->valuedouble;
    return true;
}

static bool read_int(parse_ctx *c, const char *name, const cJSON *item, int64_t *out, double min,
                     double max)
{
    double v = 0;
    if (!cJSON_IsNumber(item))
        FAIL(c, name, "%s: expected an integer", name);
    if (item->valuedouble != floor(item->valuedouble))
        FAIL(c, name, "%s: expected an integer, got %g", name, item->valuedouble);
    if (!read_number(c, name, item, &v, min, max))
        return false;
    *out = v >= 9223372036854775808.0 ? INT64_MAX : (int64_t)v;
    return true;
}

static bool read_bool(parse_ctx *c, const char *name, const cJSON *item, bool *out)
{
    if (!cJSON_IsBool(item))
        FAIL(c, name, "%s: expected true or false", name);
    *out = cJSON_IsTrue(item);
    return true;
}

/* Exact bytes into the arena. */
static char *read_text(parse_ctx *c, const cJSON *item, size_t *n_bytes)
{
    char *heap = json_string_dup(item, n_bytes);
    char *copy = heap != NULL ? arena_strndup(c->p->arena, heap, *n_bytes) : NULL;
    mem_free(heap);
    return copy;
}

static bool read_token_id(parse_ctx *c, const char *name, const cJSON *item, token_id *out)
{
    double v = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    if (!(v == floor(v)))
        FAIL(c, name, "%s: expected token ids (integers)", name);
    if (v < 0 || v >= c->vocab_size)
        FAIL(c, name, "%s: token id %.0f is outside the vocabulary (0 to %d)", name, v,
             c->vocab_size - 1);
    *out = (token_id)v;
    return true;
}

static bool read_id_array(parse_ctx *c, const char *name, const cJSON *array, token_id **ids,
                          int32_t *n_ids)
{
    int n = cJSON_GetArraySize(array);
    *ids = arena_calloc(c->p->arena, (size_t)n, sizeof(token_id));
    if (*ids == NULL)
        return fail_memory(c);
    *n_ids = 0;
    for (const cJSON *e = array->child; e != NULL; e = e->next) {
        if (!read_token_id(c, name, e, &(*ids)[*n_ids]))
            return false;
        (*n_ids)++;
    }
    return true;
}

/* --- fields ----------------------------------------------------------------------------------- */

static bool field_model(parse_ctx *c, const char *name, const cJSON *item)
{
    const char *model = json_string(item);
    if (model == NULL)
        FAIL(c, name, "model: expected a string");
    if (strcmp(model, c->model_name) != 0)
        return fail(c, 404, name, "model_not_found",
                    "the model `%.200s` does not exist here; this server has `%.120s`", model,
                    c->model_name);
    return true;
}

static bool field_prompt(parse_ctx *c, const char *name, const cJSON *item)
{
    completion_params *p = c->p;
    bool is_one = cJSON_IsString(item) || (cJSON_IsArray(item) && cJSON_IsNumber(item->child));
    if (!is_one && !cJSON_IsArray(item))
        FAIL(c, name,
             "prompt: expected a string, an array of strings, an array of token ids or an array of "
             "such arrays");
    int n = is_one ? 1 : cJSON_GetArraySize(item);
    if (n == 0)
        FAIL(c, name, "prompt: expected at least one prompt, got an empty array");
    if (n > COMPLETION_MAX_PROMPTS)
        FAIL(c, name, "prompt: expected at most %d prompts, got %d", COMPLETION_MAX_PROMPTS, n);
    p->prompts = arena_calloc(p->arena, (size_t)n, sizeof(*p->prompts));
    if (p->prompts == NULL)
        return fail_memory(c);
    for (const cJSON *e = is_one ? item : item->child; p->n_prompts < n; e = e->next) {
        completion_prompt *prompt = &p->prompts[p->n_prompts];
        if (cJSON_IsString(e)) {
            prompt->text = read_text(c, e, &prompt->n_text_bytes);
            if (prompt->text == NULL)
                return fail_memory(c);
        } else if (cJSON_IsArray(e)) {
            if (!read_id_array(c, name, e, &prompt->ids, &prompt->n_ids))
                return false;
            if (prompt->n_ids == 0)
                FAIL(c, name, "prompt: prompt %d holds no token", p->n_prompts);
        } else {
            FAIL(c, name, "prompt: expected a string or an array of token ids at index %d",
                 p->n_prompts);
        }
        p->n_prompts++;
    }
    return true;
}

static bool field_max_tokens(parse_ctx *c, const char *name, const cJSON *item)
{
    int64_t v = 0;
    if (!read_int(c, name, item, &v, 0, 2147483647.0))
        return false;
    c->p->max_tokens = (int32_t)v;
    return true;
}

static bool field_min_tokens(parse_ctx *c, const char *name, const cJSON *item)
{
    int64_t v = 0;
    if (!read_int(c, name, item, &v, 0, 2147483647.0))
        return false;
    c->p->sampling.min_tokens = (int32_t)v;
    return true;
}

static bool field_n(parse_ctx *c, const char *name, const cJSON *item)
{
    int64_t v = 0;
    if (!read_int(c, name, item, &v, 1, COMPLETION_MAX_N))
        return false;
    c->p->n = (int32_t)v;
    return true;
}

static bool field_best_of(parse_ctx *c, const char *name, const cJSON *item)
{
    int64_t v = 0;
    if (!read_int(c, name, item, &v, 1, COMPLETION_MAX_BEST_OF))
        return false;
    c->p->best_of = (int32_t)v;
    return true;
}

static bool field_echo(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_bool(c, name, item, &c->p->echo);
}

static bool read_f32(parse_ctx *c, const char *name, const cJSON *item, float *out, double min,
                     double max)
{
    double v = 0;
    if (!read_number(c, name, item, &v, min, max))
        return false;
    *out = (float)v;
    return true;
}

static bool field_temperature(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_f32(c, name, item, &c->p->sampling.temperature, 0, 2);
}

static bool field_top_p(parse_ctx *c, const char *name, const cJSON *item)
{
    if (cJSON_IsNumber(item) && !(item->valuedouble > 0))
        FAIL(c, name, "top_p: expected more than 0 and at most 1, got %g", item->valuedouble);
    if (!read_f32(c, name, item, &c->p->sampling.top_p, 0, 1))
        return false;
    if (c->p->sampling.top_p <= 0) /* a double that rounds to nothing */
        FAIL(c, name, "top_p: expected more than 0 and at most 1, got %g", item->valuedouble);
    return true;
}

static bool field_min_p(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_f32(c, name, item, &c->p->sampling.min_p, 0, 1);
}

static bool field_top_k(parse_ctx *c, const char *name, const cJSON *item)
{
    int64_t v = 0;
    if (!read_int(c, name, item, &v, -1, 2147483647.0))
        return false;
    c->p->sampling.top_k = v < 0 ? 0 : (int32_t)v;
    return true;
}

static bool field_seed(parse_ctx *c, const char *name, const cJSON *item)
{
    int64_t v = 0;
    if (!read_int(c, name, item, &v, -9223372036854775808.0, 9223372036854775807.0))
        return false;
    c->p->has_seed = v != -1;
    c->p->sampling.seed = (uint64_t)v;
    return true;
}

static bool field_presence_penalty(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_f32(c, name, item, &c->p->sampling.presence_penalty, -2, 2);
}

static bool field_frequency_penalty(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_f32(c, name, item, &c->p->sampling.frequency_penalty, -2, 2);
}

static bool field_repetition_penalty(parse_ctx *c, const char *name, const cJSON *item)
{
    float v = 0;
    if (!read_f32(c, name, item, &v, 0, 1e6))
        return false;
    if (v <= 0)
        FAIL(c, name, "repetition_penalty: expected more than 0, got %g", item->valuedouble);
    c->p->sampling.repetition_penalty = v;
    return true;
}

static bool field_stop(parse_ctx *c, const char *name, const cJSON *item)
{
    completion_params *p = c->p;
    bool is_one = cJSON_IsString(item);
    if (!is_one && !cJSON_IsArray(item))
        FAIL(c, name, "stop: expected a string or an array of strings");
    int n = is_one ? 1 : cJSON_GetArraySize(item);
    if (n > c->cfg->max_stop_strings)
        FAIL(c, name, "stop: expected at most %lld strings (max_stop_strings), got %d",
             (long long)c->cfg->max_stop_strings, n);
    p->stop = arena_calloc(p->arena, (size_t)n, sizeof(*p->stop));
    p->stop_bytes = arena_calloc(p->arena, (size_t)n, sizeof(*p->stop_bytes));
    if (p->stop == NULL || p->stop_bytes == NULL)
        return fail_memory(c);
    size_t n_total = 0;
    for (const cJSON *e = is_one ? item : item->child; p->n_stop < n; e = e->next) {
        if (!cJSON_IsString(e))
            FAIL(c, name, "stop: expected a string at index %d", p->n_stop);
        n_total += strlen(e->valuestring);
        if (n_total > COMPLETION_MAX_STOP_BYTES)
            FAIL(c, name, "stop: expected at most %d bytes in all stop strings together",
                 COMPLETION_MAX_STOP_BYTES);
        p->stop[p->n_stop] = read_text(c, e, &p->stop_bytes[p->n_stop]);
        if (p->stop[p->n_stop] == NULL)
            return fail_memory(c);
        if (p->stop_bytes[p->n_stop] == 0)
            FAIL(c, name, "stop: an empty stop string would end every answer");
        p->n_stop++;
    }
    return true;
}

static bool field_stop_token_ids(parse_ctx *c, const char *name, const cJSON *item)
{
    token_id *ids;
    int32_t n;
    if (!cJSON_IsArray(item))
        FAIL(c, name, "stop_token_ids: expected an array of token ids");
    if (cJSON_GetArraySize(item) > PGD_MAX_STOP_IDS)
        FAIL(c, name, "stop_token_ids: expected at most %d ids, got %d", PGD_MAX_STOP_IDS,
             cJSON_GetArraySize(item));
    if (!read_id_array(c, name, item, &ids, &n))
        return false;
    c->p->sampling.stop_ids = ids;
    c->p->sampling.n_stop_ids = n;
    return true;
}

static bool field_logit_bias(parse_ctx *c, const char *name, const cJSON *item)
{
    if (!cJSON_IsObject(item))
        FAIL(c, name, "logit_bias: expected an object of token id to bias");
    int n = cJSON_GetArraySize(item);
    if (n > PGD_MAX_LOGIT_BIAS)
        FAIL(c, name, "logit_bias: expected at most %d entries, got %d", PGD_MAX_LOGIT_BIAS, n);
    logit_bias *bias = arena_calloc(c->p->arena, (size_t)n, sizeof(*bias));
    if (bias == NULL)
        return fail_memory(c);
    int32_t i = 0;
    for (const cJSON *e = item->child; e != NULL; e = e->next) {
        char *end;
        long long id = strtoll(e->string, &end, 10);
        double value;
        bool is_number = strspn(e->string, "-0123456789") == strlen(e->string);
        if (!is_number || end == e->string || *end != '\0')
            FAIL(c, name, "logit_bias: expected a token id as key, got \"%.60s\"", e->string);
        if (id < 0 || id >= c->vocab_size)
            FAIL(c, name, "logit_bias: token id %lld is outside the vocabulary (0 to %d)", id,
                 c->vocab_size - 1);
        if (!read_number(c, name, e, &value, -100, 100))
            return false;
        bias[i].id = (token_id)id;
        bias[i++].bias = (float)value;
    }
    c->p->sampling.logit_bias = bias;
    c->p->sampling.n_logit_bias = n;
    return true;
}

static bool field_logprobs(parse_ctx *c, const char *name, const cJSON *item)
{
    int64_t v = 0;
    if (!read_int(c, name, item, &v, 0, (double)PGD_MIN(c->cfg->max_logprobs, c->vocab_size - 1)))
        return false;
    c->p->sampling.n_logprobs = (int32_t)v;
    return true;
}

static bool field_priority(parse_ctx *c, const char *name, const cJSON *item)
{
    int64_t v = 0;
    if (!read_int(c, name, item, &v, -2147483648.0, 2147483647.0))
        return false;
    if (v != 0 && c->cfg->scheduling_policy != CONFIG_POLICY_PRIORITY)
        FAIL(c, name,
             "priority: this server runs with scheduling_policy = fcfs; only 0 is possible");
    c->p->priority = (int32_t)v;
    return true;
}

static bool field_cache_salt(parse_ctx *c, const char *name, const cJSON *item)
{
    size_t n;
    if (!cJSON_IsString(item))
        FAIL(c, name, "cache_salt: expected a string");
    c->p->cache_salt = read_text(c, item, &n);
    if (c->p->cache_salt == NULL)
        return fail_memory(c);
    if (n == 0 || n > MAX_SALT_BYTES || strlen(c->p->cache_salt) != n)
        FAIL(c, name, "cache_salt: expected 1 to %d bytes without NUL, got %zu", MAX_SALT_BYTES, n);
    return true;
}

static bool field_ignore_eos(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_bool(c, name, item, &c->p->ignore_eos);
}

static bool field_stream(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_bool(c, name, item, &c->p->stream);
}

static bool field_skip_special(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_bool(c, name, item, &c->p->skip_special);
}

static bool field_include_stop(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_bool(c, name, item, &c->p->include_stop);
}

static bool field_return_token_ids(parse_ctx *c, const char *name, const cJSON *item)
{
    return read_bool(c, name, item, &c->p->return_token_ids);
}

static bool field_stream_options(parse_ctx *c, const char *name, const cJSON *item)
{
    if (!cJSON_IsObject(item))
        FAIL(c, name, "stream_options: expected an object");
    const cJSON *usage = json_get(item, "include_usage");
    return usage == NULL ||
           read_bool(c, "stream_options.include_usage", usage, &c->p->include_usage);
}

/* Known from peers, not built: only a value that changes nothing passes. */
static bool field_unbuilt(parse_ctx *c, const char *name, const cJSON *item)
{
    bool is_neutral = cJSON_IsFalse(item) ||
                      (cJSON_IsString(item) && item->valuestring[0] == '\0') ||
                      (cJSON_IsNumber(item) && item->valuedouble == 0);
    if (!is_neutral)
        FAIL(c, name, "%s is not supported by this server; leave it out", name);
    return true;
}

static bool field_ignored(parse_ctx *c, const char *name, const cJSON *item)
{
    (void)c;
    (void)name;
    (void)item;
    return true;
}

typedef struct field_row {
    const char *name;
    field_fn read;
} field_row;

static const field_row fields[] = {
    {"model", field_model},
    {"prompt", field_prompt},
    {"max_tokens", field_max_tokens},
    {"min_tokens", field_min_tokens},
    {"n", field_n},
    {"temperature", field_temperature},
    {"top_p", field_top_p},
    {"top_k", field_top_k},
    {"min_p", field_min_p},
    {"seed", field_seed},
    {"presence_penalty", field_presence_penalty},
    {"frequency_penalty", field_frequency_penalty},
    {"repetition_penalty", field_repetition_penalty},
    {"stop", field_stop},
    {"stop_token_ids", field_stop_token_ids},
    {"logit_bias", field_logit_bias},
    {"logprobs", field_logprobs},
    {"priority", field_priority},
    {"cache_salt", field_cache_salt},
    {"ignore_eos", field_ignore_eos},
    {"stream", field_stream},
    {"stream_options", field_stream_options},
    {"skip_special_tokens", field_skip_special},
    {"include_stop_str_in_output", field_include_stop},
    {"return_token_ids", field_return_token_ids},
    {"user", field_ignored},
    {"echo", field_echo},
    {"best_of", field_best_of},
    {"suffix", field_unbuilt},
    {"prompt_logprobs", field_unbuilt},
    {"response_format", field_unbuilt},
    {"structured_outputs", field_unbuilt},
    {"guided_json", field_unbuilt},
    {"guided_regex", field_unbuilt},
    {"guided_choice", field_unbuilt},
    {"guided_grammar", field_unbuilt},
    {"grammar", field_unbuilt},
    {"json_schema", field_unbuilt},
    {"allowed_token_ids", field_unbuilt},
    {"bad_words", field_unbuilt},
    {"logprob_token_ids", field_unbuilt},
    {"truncate_prompt_tokens", field_unbuilt},
    {"use_beam_search", field_unbuilt},
};

/* Each unknown name is logged once, and only so many of them. */
static void log_unknown(const char *name)
{
    static uint64_t seen[MAX_LOGGED_UNKNOWN];
    static size_t n_seen;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of both */
    uint64_t h = 1469598103934665603ULL;
    for (const char *s = name; *s != '\0'; s++)
        h = (h ^ (unsigned char)*s) * 1099511628211ULL;
    pthread_mutex_lock(&lock);
    size_t i = 0;
    while (i < n_seen && seen[i] != h)
        i++;
    bool is_new = i == n_seen && n_seen < MAX_LOGGED_UNKNOWN;
    if (is_new)
        seen[n_seen++] = h;
    pthread_mutex_unlock(&lock);
    if (is_new)
        log_warn("http", "unknown field %.60s in a completion request is ignored (told once)",
                 name);
}

/* What fields must be to each other; fills what follows from several. */
static bool relate_fields(parse_ctx *c)
{
    completion_params *p = c->p;
    if (p->max_tokens == 0 && !p->echo)
        FAIL(c, "max_tokens", "max_tokens: expected at least 1, got 0 (0 is for echo = true)");
    if (p->n > 1 && p->sampling.temperature == 0)
        FAIL(
            c, "n",
            "n: greedy sampling (temperature 0) gives %d equal answers; set a temperature or n = 1",
            p->n);
    if (p->best_of == 0)
        p->best_of = p->n;
    else if (p->best_of < p->n)
        FAIL(c, "best_of", "best_of: expected at least n (%d), got %d", p->n, p->best_of);
    else if (p->best_of > 1 && p->stream)
        FAIL(c, "best_of",
             "best_of: the best of several answers is known at their end; expected "
             "stream = false or best_of = 1");
    if (p->max_tokens >= 0 && p->sampling.min_tokens > p->max_tokens)
        FAIL(c, "min_tokens", "min_tokens: expected at most max_tokens (%d), got %d", p->max_tokens,
             p->sampling.min_tokens);
    p->wants_logprobs = p->sampling.n_logprobs >= 0;
    if (p->echo && p->wants_logprobs)
        p->sampling.n_prompt_logprobs_per_token = p->sampling.n_logprobs + 1;
    if (p->best_of > p->n && !p->wants_logprobs)
        p->sampling.n_logprobs = 0;
    return true;
}

static bool read_fields(parse_ctx *c, const cJSON *tree)
{
    int n_fields = 0;
    for (const cJSON *item = tree->child; item != NULL; item = item->next) {
        /* Each is looked up once more below: their number must have a limit. */
        if (++n_fields > COMPLETION_MAX_FIELDS)
            return fail(c, 400, NULL, NULL, "expected at most %d fields in the request",
                        COMPLETION_MAX_FIELDS);
        if (json_get(tree, item->string) != item)
            continue; /* null, or a later duplicate */
        size_t i = 0;
        while (i < PGD_ARRAY_LEN(fields) && strcmp(fields[i].name, item->string) != 0)
            i++;
        if (i == PGD_ARRAY_LEN(fields))
            log_unknown(item->string);
        else if (!fields[i].read(c, fields[i].name, item))
            return false;
    }
    completion_params *p = c->p;
    if (p->n_prompts == 0)
        FAIL(c, "prompt", "prompt: this field is required");
    if (json_get(tree, "stream_options") != NULL && !p->stream)
        FAIL(c, "stream_options", "stream_options: only allowed together with stream = true");
    return relate_fields(c);
}

bool completion_params_parse(completion_params *out, const char *body, size_t n_bytes,
                             const config *cfg, const sampling_params *defaults,
                             const char *model_name, int32_t vocab_size, completion_fault *fault)
{
    memset(out, 0, sizeof(*out));
    parse_ctx c = {
        .p = out, .cfg = cfg, .model_name = model_name, .vocab_size = vocab_size, .fault = fault};
    out->n = 1;
    out->max_tokens = -1;
    out->sampling = *defaults;
    out->skip_special = true;
    if (arena_create(&out->arena, n_bytes * ARENA_FACTOR + 65536) != PGD_OK)
        return fail_memory(&c);
    cJSON *tree;
    pgd_why why;
    pgd_err err =
        json_parse_bounded(&tree, body, n_bytes, JSON_MAX_DEPTH, COMPLETION_MAX_VALUES, &why);
    if (err != PGD_OK)
        return fail(&c, err == PGD_ENOMEM ? 503 : 400, NULL, NULL, "%s", why.text);
    bool ok = cJSON_IsObject(tree) ? read_fields(&c, tree)
                                   : fail(&c, 400, NULL, NULL, "the body must be a JSON object");
    cJSON_Delete(tree);
    return ok;
}

void completion_params_deinit(completion_params *p)
{
    arena_destroy(p->arena);
    p->arena = NULL;
}
