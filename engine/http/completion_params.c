/* One row per field: its name, what reads it, what the OpenAPI document says of it. A plain number or
 * flag is read by its row alone (place and range), so the document cannot differ from the check;
 * other fields have a reader, which sees the JSON item (never null) and either fills its field or
 * words the fault. Fields of peers' APIs that change what comes back, but are not built here, are
 * refused unless they ask for the neutral value: ignoring them would answer something else than was
 * asked. One file although long: the table, and what its rows are read with. */
#include "engine/http/completion_params.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/json.h"
#include "common/mem.h"
#include "engine/http/http_errors.h"

#define ARENA_FACTOR 8 /* arena bytes per body byte, for ids (4 bytes from "1,") */

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
        FAIL(c, name, "%s: expected %.15g to %.15g, got %.15g", name, min, max, item->valuedouble);
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
        FAIL(c, name, "%s: expected an integer, got %.15g", name, item->valuedouble);
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
        FAIL(c, name, "%s: token id %.20g is outside the vocabulary (0 to %d)", name, v,
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
        return fail(c, 404, name, "model_not_found", HTTP_ERROR_NO_MODEL, model, c->model_name);
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

static bool field_seed(parse_ctx *c, const char *name, const cJSON *item)
{
    int64_t v = 0;
    if (!read_int(c, name, item, &v, -9223372036854775808.0, 9223372036854775807.0))
        return false;
    c->p->has_seed = v != -1;
    c->p->sampling.seed = (uint64_t)v;
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
        char digits[24]; /* one way of writing each id: no sign, no leading zeros */
        snprintf(digits, sizeof(digits), "%lld", id);
        if (end == e->string || strcmp(digits, e->string) != 0)
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
    if (n == 0 || n > COMPLETION_MAX_SALT_BYTES || strlen(c->p->cache_salt) != n)
        FAIL(c, name, "cache_salt: expected 1 to %d bytes without NUL, got %zu",
             COMPLETION_MAX_SALT_BYTES, n);
    return true;
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

/* --- the table -------------------------------------------------------------------------------- */

typedef enum field_kind {
    FIELD_CUSTOM,
    FIELD_BOOL,
    FIELD_INT,    /* int32_t */
    FIELD_NUMBER, /* float */
    FIELD_ABOVE   /* float, more than min */
} field_kind;

typedef struct field_row {
    const char *name;
    field_kind kind;
    size_t at; /* in completion_params */
    double min, max;
    double (*max_of)(const config *cfg, int32_t vocab_size); /* NULL: max */
    field_fn read;                                           /* FIELD_CUSTOM */
    const char *schema;                                      /* FIELD_CUSTOM, see api_openapi.c */
    const char *help;
} field_row;

static double max_logprobs(const config *cfg, int32_t vocab_size)
{
    return (double)PGD_MIN(cfg->max_logprobs, vocab_size - 1);
}

#define AT(field)               offsetof(completion_params, field)
#define BOOL(field)             FIELD_BOOL, AT(field), 0, 0, NULL, NULL, NULL
#define INT(field, min, max)    FIELD_INT, AT(field), min, max, NULL, NULL, NULL
#define INT_TO(field, min, fn)  FIELD_INT, AT(field), min, 0, fn, NULL, NULL
#define NUMBER(field, min, max) FIELD_NUMBER, AT(field), min, max, NULL, NULL, NULL
#define ABOVE(field, min, max)  FIELD_ABOVE, AT(field), min, max, NULL, NULL, NULL
#define CUSTOM(read, schema)    FIELD_CUSTOM, 0, 0, 0, NULL, read, schema
#define UNBUILT                 CUSTOM(field_unbuilt, "'enum':[null,false,'',0]"), "Not supported by this server."

static const field_row fields[] = {
    {"model", CUSTOM(field_model, "'enum':[@model,null]"), "The served model; may be left out."},
    {"prompt",
     CUSTOM(field_prompt,
            "'oneOf':[{'type':'string','minLength':1},"
            "{'type':'array','items':{'type':'string','minLength':1},'minItems':1,"
            "'maxItems':@max_prompts},"
            "{'type':'array','items':@token_id,'minItems':1},"
            "{'type':'array','items':{'type':'array','items':@token_id,'minItems':1},'minItems':1,"
            "'maxItems':@max_prompts}]"),
     "One prompt or several, as text or as token ids."},
    {"max_tokens", INT(max_tokens, 0, 2147483647.0),
     "Most output tokens; @default_tokens when left out, 0 only with echo. Prompt and output "
     "together must fit "
     "the context."},
    {"min_tokens", INT(sampling.min_tokens, 0, 2147483647.0),
     "Neither end of text nor stop tokens before so many output tokens; at most max_tokens."},
    {"n", INT(n, 1, COMPLETION_MAX_N), "Choices per prompt; more than 1 needs a temperature."},
    {"temperature", NUMBER(sampling.temperature, 0, 2), "0 is greedy."},
    {"top_p", ABOVE(sampling.top_p, 0, 1), "Sample from the likeliest tokens of this mass."},
    {"top_k", INT(sampling.top_k, -1, 2147483647.0),
     "Sample from this many likeliest tokens; 0 or -1: all."},
    {"min_p", NUMBER(sampling.min_p, 0, 1),
     "Only tokens at least this likely, relative to the likeliest."},
    {"seed",
     CUSTOM(
         field_seed,
         "'type':['integer','null'],'minimum':-9223372036854775808,'maximum':9223372036854775807"),
     "The same seed gives the same tokens; -1: none."},
    {"presence_penalty", NUMBER(sampling.presence_penalty, -2, 2),
     "Taken off the logit of a token that has occurred in the output."},
    {"frequency_penalty", NUMBER(sampling.frequency_penalty, -2, 2),
     "Taken off for each time it has occurred in the output."},
    {"repetition_penalty", NUMBER(sampling.repetition_penalty, 0.001, 1e6),
     "Divides positive and multiplies negative logits of tokens in prompt or output."},
    {"stop",
     CUSTOM(field_stop,
            "'oneOf':[{'type':'null'},{'type':'string','minLength':1,'maxLength':@max_stop_bytes},"
            "{'type':'array','items':{'type':'string','minLength':1,'maxLength':@max_stop_bytes},"
            "'maxItems':@max_stop_strings}]"),
     "Strings that end the output; @max_stop_bytes bytes in all."},
    {"stop_token_ids",
     CUSTOM(field_stop_token_ids,
            "'type':['array','null'],'items':@token_id,'maxItems':@max_stop_ids"),
     "Tokens that end the output, besides those of the model."},
    {"logit_bias",
     CUSTOM(field_logit_bias,
            "'type':['object','null'],'propertyNames':{'pattern':@token_id_pattern},"
            "'additionalProperties':{'type':'number','minimum':-100,'maximum':100},"
            "'maxProperties':@max_logit_bias"),
     "Token id of the vocabulary to what is added to its logit."},
    {"logprobs", INT_TO(sampling.n_logprobs, 0, max_logprobs),
     "Log probabilities of this many likeliest tokens, and of the sampled one."},
    {"priority",
     CUSTOM(field_priority,
            "'type':['integer','null'],'minimum':@min_priority,'maximum':@max_priority"),
     "Smaller first; 0 unless scheduling_policy is priority."},
    {"cache_salt",
     CUSTOM(field_cache_salt, "'type':['string','null'],'minLength':1,'maxLength':@max_salt_bytes,"
                              "'pattern':'^[^\\u0000]*$'"),
     "Prefix-cache hits only among requests of the same salt; at most @max_salt_bytes bytes."},
    {"ignore_eos", BOOL(ignore_eos), "Go on after the end of text."},
    {"stream", BOOL(stream), "Answer with server-sent events."},
    {"stream_options",
     CUSTOM(field_stream_options,
            "'type':['object','null'],'properties':{'include_usage':{'type':['boolean','null']}}"),
     "Only with stream: include_usage adds a last event with the usage."},
    {"skip_special_tokens", BOOL(skip_special), "Leave special tokens out of the text."},
    {"include_stop_str_in_output", BOOL(include_stop), "Keep what ended the output in the text."},
    {"return_token_ids", BOOL(return_token_ids), "Add the token ids of each choice."},
    {"return_cached_tokens_details", BOOL(return_cached_details),
     "Tell in the usage in which tier of the KV cache the cached tokens were."},
    {"user", CUSTOM(field_ignored, "'default':null"), "Ignored."},
    {"echo", BOOL(echo), "Put the prompt before the text, and with logprobs its own too."},
    {"suffix", UNBUILT},
    {"best_of", INT(best_of, 1, COMPLETION_MAX_BEST_OF),
     "Generate so many, answer the n likeliest; not less than n, not with stream."},
    {"prompt_logprobs", UNBUILT},
    {"response_format", UNBUILT},
    {"structured_outputs", UNBUILT},
    {"guided_json", UNBUILT},
    {"guided_regex", UNBUILT},
    {"guided_choice", UNBUILT},
    {"guided_grammar", UNBUILT},
    {"grammar", UNBUILT},
    {"json_schema", UNBUILT},
    {"allowed_token_ids", UNBUILT},
    {"bad_words", UNBUILT},
    {"logprob_token_ids", UNBUILT},
    {"truncate_prompt_tokens", UNBUILT},
    {"use_beam_search", UNBUILT},
};

static double row_max(const field_row *row, const config *cfg, int32_t vocab_size)
{
    return row->max_of != NULL ? row->max_of(cfg, vocab_size) : row->max;
}

static bool read_field(parse_ctx *c, const field_row *row, const cJSON *item)
{
    void *at = (char *)c->p + row->at;
    double max = row_max(row, c->cfg, c->vocab_size);
    int64_t i = 0;
    double d = 0;
    switch (row->kind) {
    case FIELD_CUSTOM:
        break;
    case FIELD_BOOL:
        return read_bool(c, row->name, item, at);
    case FIELD_INT:
        if (!read_int(c, row->name, item, &i, row->min, max))
            return false;
        *(int32_t *)at = (int32_t)i;
        return true;
    case FIELD_NUMBER:
    case FIELD_ABOVE:
        if (!read_number(c, row->name, item, &d, row->min, max))
            return false;
        if (row->kind == FIELD_ABOVE && !(d > row->min))
            FAIL(c, row->name, "%s: expected more than %g and at most %g, got %.15g", row->name,
                 row->min, max, d);
        /* A double above 0 must not round to 0, nor to a number that the wire refuses. */
        *(float *)at = d > 0 ? PGD_MAX((float)d, SAMPLING_TINY) : (float)d;
        return true;
    }
    return row->read(c, row->name, item);
}

void completion_params_append_schema(strbuf *out, const config *cfg, int32_t vocab_size)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(fields); i++) {
        const field_row *row = &fields[i];
        strbuf_appendf(out, "%s'%s':{'description':'%s',", i > 0 ? "," : "", row->name, row->help);
        double max = row_max(row, cfg, vocab_size);
        switch (row->kind) {
        case FIELD_CUSTOM:
            strbuf_append_str(out, row->schema);
            break;
        case FIELD_BOOL:
            strbuf_append_str(out, "'type':['boolean','null']");
            break;
        case FIELD_INT:
            strbuf_appendf(out, "'type':['integer','null'],'minimum':%.0f,'maximum':%.0f", row->min,
                           max);
            break;
        case FIELD_NUMBER:
            strbuf_appendf(out, "'type':['number','null'],'minimum':%g,'maximum':%g", row->min,
                           max);
            break;
        case FIELD_ABOVE:
            strbuf_appendf(out, "'type':['number','null'],'exclusiveMinimum':%g,'maximum':%g",
                           row->min, max);
            break;
        }
        strbuf_append_char(out, '}');
    }
}

/* For the log: a name beyond the limit is one too many for it, too. */
static bool note_unknown(parse_ctx *c, const char *name)
{
    completion_params *p = c->p;
    if (p->n_unknown == COMPLETION_MAX_UNKNOWN)
        return true;
    if (p->unknown == NULL)
        p->unknown = arena_calloc(p->arena, COMPLETION_MAX_UNKNOWN, sizeof(*p->unknown));
    const char *copy = p->unknown != NULL ? arena_strndup(p->arena, name, strlen(name)) : NULL;
    if (copy == NULL)
        return fail_memory(c);
    p->unknown[p->n_unknown++] = copy;
    return true;
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
    int32_t max_tokens = p->max_tokens >= 0 ? p->max_tokens : COMPLETION_DEFAULT_TOKENS;
    if (p->sampling.min_tokens > max_tokens)
        FAIL(c, "min_tokens", "min_tokens: expected at most max_tokens (%d), got %d", max_tokens,
             p->sampling.min_tokens);
    /* They are queued together or not at all: 429 would have the client try for ever. */
    int32_t n_choices = p->n_prompts * p->best_of;
    if (n_choices > c->cfg->max_queued_requests)
        FAIL(c, p->best_of == 1 ? "prompt" : "n",
             "%d prompts of %d choices: expected at most %lld in one request "
             "(max_queued_requests), got %d",
             p->n_prompts, p->best_of, (long long)c->cfg->max_queued_requests, n_choices);
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
        bool ok = i < PGD_ARRAY_LEN(fields) ? read_field(c, &fields[i], item)
                                            : note_unknown(c, item->string);
        if (!ok)
            return false;
    }
    completion_params *p = c->p;
    p->sampling.top_k = PGD_MAX(p->sampling.top_k, 0);
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
