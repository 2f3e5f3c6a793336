/* GET /openapi.json. The document is text with two conveniences: ' stands for ", so that it can be
 * read here (so no apostrophes), and @name for a value that this server knows at run time (limits,
 * vocabulary, the name of the model), for a part that stands elsewhere, for a schema (@Error), or for
 * an error answer (@e400; @r429 with Retry-After). Tests hold real answers against the document, and
 * scripts/check_openapi sends requests made from it. */
#include "engine/http/api_openapi.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/http/completion_params.h"
#include "engine/http/http_api.h"
#include "engine/http/http_errors.h"

/* clang-format off: one string per line of the document */

const char api_openapi_completions[] =
    "'operationId':'createCompletion','summary':'Continue a prompt, whole or as a stream.',"
    "'requestBody':{'required':true,'content':{'application/json':{'schema':@CompletionRequest}}},"
    "'responses':{'200':{'description':'The completion; with stream its events.',"
    "'headers':@headers,'content':{'application/json':{'schema':@Completion},"
    "'text/event-stream':{'schema':{'type':['string','object'],'required':['data'],"
    "'properties':{'data':{'type':'string'}},"
    "'description':'data is an Event as JSON, an Error as JSON, or [DONE].'}}}},"
    "@e400,@e404,@r429,@e500,@e504,@errors}";

const char api_openapi_models[] =
    "'operationId':'listModels','summary':'The model that is served.','security':[],"
    "'responses':{'200':{'description':'A list of one.','headers':@headers,"
    "'content':{'application/json':{'schema':{'type':'object','required':['object','data'],"
    "'properties':{'object':{'const':'list'},'data':{'type':'array','items':@Model}}}}}},@errors}";

const char api_openapi_model[] =
    "'operationId':'getModel','summary':'The card of one model.','security':[],"
    "'parameters':[{'name':'model','in':'path','required':true,"
    "'description':'Its id; slashes may be escaped or not.',"
    "'schema':{'type':'string','minLength':1},'example':@model}],"
    "'responses':{'200':{'description':'The card.','headers':@headers,"
    "'content':{'application/json':{'schema':@Model}}},@e404,@errors}";

const char api_openapi_tokenize[] =
    "'operationId':'tokenize','summary':'Text to token ids.',"
    "'requestBody':{'required':true,'content':{'application/json':{'schema':{'type':'object',"
    "'required':['prompt'],'properties':{'model':{'enum':[@model,null]},"
    "'prompt':{'type':'string','description':'At most @max_values tokens.'},"
    "'add_special_tokens':{'type':['boolean','null'],'default':true},"
    "'return_token_strs':{'type':['boolean','null'],'default':false}}}}}},"
    "'responses':{'200':{'description':'The ids.','headers':@headers,"
    "'content':{'application/json':{'schema':{'type':'object',"
    "'required':['count','max_model_len','tokens','token_strs'],"
    "'properties':{'count':{'type':'integer','minimum':0},"
    "'max_model_len':{'type':'integer','minimum':1},'tokens':{'type':'array','items':@token_id},"
    "'token_strs':{'type':['array','null'],'items':{'type':'string'}}}}}}},"
    "@e400,@e404,@r429,@e500,@e504,@errors}";

const char api_openapi_detokenize[] =
    "'operationId':'detokenize','summary':'Token ids to text.',"
    "'requestBody':{'required':true,'content':{'application/json':{'schema':{'type':'object',"
    "'required':['tokens'],'properties':{'model':{'enum':[@model,null]},"
    "'tokens':{'type':'array','items':@token_id,'maxItems':@max_ids}}}}}},"
    "'responses':{'200':{'description':'The text.','headers':@headers,"
    "'content':{'application/json':{'schema':{'type':'object','required':['prompt'],"
    "'properties':{'prompt':{'type':'string'}}}}}},@e400,@e404,@r429,@e504,@errors}";

const char api_openapi_reset[] =
    "'operationId':'resetPrefixCache','summary':'Forget every cached prefix.',"
    "'parameters':[{'name':'reset_external','in':'query','schema':{'type':'boolean',"
    "'default':false},'description':'Also those in host memory and on disk.'}],"
    "'responses':{'200':{'description':'Done or not.','headers':@headers,"
    "'content':{'application/json':{'schema':{'type':'object','required':['reset'],"
    "'properties':{'reset':{'type':'boolean'},"
    "'reason':{'type':'string','description':'Why it was not done.'}}}}}},@e400,@errors}";

const char api_openapi_health[] =
    "'operationId':'health','summary':'Whether requests are served now.','security':[],"
    "'responses':{'200':{'description':'Yes.','headers':@headers,"
    "'content':{'application/json':{'schema':@Health}}},"
    "'503':{'description':'Loading, recovering, draining or failed.','headers':@retry_headers,"
    "'content':{'application/json':{'schema':{'anyOf':[@Health,@Error]}}}},@errors_but_503}";

const char api_openapi_metrics[] =
    "'operationId':'metrics','summary':'Prometheus metrics.',"
    "'responses':{'200':{'description':'The text format, version 0.0.4.','headers':@headers,"
    "'content':{'text/plain':{'schema':{'type':'string'}}}},@errors}";

const char api_openapi_version[] =
    "'operationId':'version','summary':'The version that runs.',"
    "'responses':{'200':{'description':'The version.','headers':@headers,"
    "'content':{'application/json':{'schema':{'type':'object','required':['version'],"
    "'properties':{'version':{'type':'string'},'kv_events':{'type':'object','description':'Where "
    "this server publishes what is in its KV cache, if it does.','required':['url','replay_url',"
    "'topic'],'properties':{'url':{'type':'string'},'replay_url':{'type':'string'},'topic':{'type':"
    "'string'}}}}}}}},@errors}";

const char api_openapi_document[] =
    "'operationId':'openapi','summary':'This document.',"
    "'responses':{'200':{'description':'The document.','headers':@headers,"
    "'content':{'application/json':{'schema':{'type':'object','required':['openapi','paths']}}}},"
    "@errors}";

static const char document[] =
    "{'openapi':'3.1.0','info':{'title':'paged','version':@version,"
    "'description':'Completions of one language model. Unknown fields of a request are ignored; "
    "null means left out. Bodies are read as JSON, whatever their Content-Type says.'},"
    "'security':@security,'paths':{@paths},'components':{"
    "'securitySchemes':{'bearer':{'type':'http','scheme':'bearer'},"
    "'x_api_key':{'type':'apiKey','in':'header','name':'X-Api-Key'}},"
    "'headers':{'RequestId':{'description':'The X-Request-Id of the request, or a new one.',"
    "'required':true,'schema':{'type':'string','pattern':'^[!-~]{1,128}$'}},"
    "'RetryAfter':{'description':'Seconds to wait.','required':true,"
    "'schema':{'type':'integer','minimum':0}}},"
    "'responses':{'Error':{'description':'Refused or failed; error.message says why.',"
    "'headers':@headers,'content':{'application/json':{'schema':@Error}}},"
    "'Retry':{'description':'Not now.','headers':@retry_headers,"
    "'content':{'application/json':{'schema':@Error}}}},"
    "'schemas':{"
    "'Error':{'type':'object','required':['error'],'properties':{'error':{'type':'object',"
    "'required':['message','type','param','code'],'properties':{'message':{'type':'string'},"
    "'type':{'type':'string'},"
    "'param':{'type':['string','null'],'description':'The field at fault.'},"
    "'code':{'type':['string','integer']}}}}},"
    "'Health':{'type':'object','required':['status'],'properties':{"
    "'status':{'enum':['ok','starting','loading','recovering','draining','failed','stopped',"
    "'stalled','ready']},"
    "'progress':{'type':'number','minimum':0,'maximum':1},'reason':{'type':'string'}}},"
    "'Model':{'type':'object','required':['id','object','created','owned_by','root','parent',"
    "'max_model_len','meta'],'properties':{'id':{'const':@model},'object':{'const':'model'},"
    "'created':{'type':'integer'},'owned_by':{'type':'string'},'root':{'type':'string'},"
    "'parent':{'type':'null'},'max_model_len':{'type':'integer','minimum':1},"
    "'meta':{'type':'object','required':['n_ctx_train','n_vocab','n_embd'],'properties':{"
    "'n_ctx_train':{'type':'integer'},'n_vocab':{'type':'integer'},"
    "'n_embd':{'type':'integer'}}}}},"
    "'CompletionRequest':{'type':'object','required':['prompt'],'maxProperties':@max_fields,"
    "'dependentSchemas':{'stream_options':{'if':{'properties':{'stream_options':"
    "{'type':'object'}}},'then':{'required':['stream'],'properties':{'stream':{'const':true}}}}},"
    "'allOf':["
    "{'if':{'required':['max_tokens'],'properties':{'max_tokens':{'const':0}}},"
    "'then':{'required':['echo'],'properties':{'echo':{'const':true}}}},"
    "{'if':{'required':['temperature'],'properties':{'temperature':{'const':0}}},"
    "'then':{'properties':{'n':{'enum':[1,null]}}}},"
    "{'if':{'required':['stream'],'properties':{'stream':{'const':true}}},"
    "'then':{'properties':{'best_of':{'enum':[1,null]}}}}],"
    "'properties':{@completion_fields}},"
    "'Completion':{'type':'object','required':['id','object','created','model','choices','usage'],"
    "'properties':{@answer_head,'choices':{'type':'array','minItems':1,'items':{'allOf':[@Choice,"
    "{'properties':{'finish_reason':{'type':'string'}}}]}},'usage':@Usage}},"
    "'Event':{'type':'object','required':['id','object','created','model','choices'],"
    "'description':'The text since the event before; the last one of a choice has finish_reason.',"
    "'properties':{@answer_head,'choices':{'type':'array','maxItems':1,'items':@Choice},"
    "'usage':{'anyOf':[{'type':'null'},@Usage]}}},"
    "'Choice':{'type':'object','required':['index','text','logprobs','finish_reason',"
    "'stop_reason'],'properties':{'index':{'type':'integer','minimum':0},"
    "'text':{'type':'string'},'finish_reason':{'enum':['stop','length','abort',null]},"
    "'stop_reason':{'type':['string','integer','null']},"
    "'token_ids':{'type':'array','items':@token_id},"
    "'prompt_token_ids':{'type':['array','null'],'items':@token_id},"
    "'logprobs':{'anyOf':[{'type':'null'},@Logprobs]}}},"
    "'Logprobs':{'type':'object','required':['tokens','token_logprobs','top_logprobs',"
    "'text_offset'],'properties':{'tokens':{'type':'array','items':{'type':'string'}},"
    "'token_logprobs':{'type':'array','items':{'type':['number','null']}},"
    "'top_logprobs':{'type':'array','items':{'type':['object','null'],"
    "'additionalProperties':{'type':'number'}}},"
    "'text_offset':{'type':'array','items':{'type':'integer','minimum':0}}}},"
    "'Usage':{'type':'object','required':['prompt_tokens','completion_tokens','total_tokens',"
    "'prompt_tokens_details'],'properties':{'prompt_tokens':{'type':'integer','minimum':0},"
    "'completion_tokens':{'type':'integer','minimum':0},"
    "'total_tokens':{'type':'integer','minimum':0},'prompt_tokens_details':{'type':'object',"
    "'required':['cached_tokens'],'properties':{'cached_tokens':{'type':'integer',"
    "'minimum':0},'cached_tokens_details':{'type':'object','description':"
    "'Only with return_cached_tokens_details: where they were; the sum is cached_tokens.',"
    "'required':['device','host','storage'],'properties':{'device':{'type':'integer','minimum':0},"
    "'host':{'type':'integer','minimum':0},'storage':{'type':'integer','minimum':0}}}}}}}}}}";

/* Parts that stand in several places. */
static const struct {
    const char *name;
    const char *template;
} parts[] = {
    {"headers", "{'X-Request-Id':{'$ref':'#/components/headers/RequestId'}}"},
    {"retry_headers", "{'X-Request-Id':{'$ref':'#/components/headers/RequestId'},"
                      "'Retry-After':{'$ref':'#/components/headers/RetryAfter'}}"},
    {"token_id", "{'type':'integer','minimum':0,'maximum':@max_token_id}"},
    {"answer_head", "'id':{'type':'string','pattern':'^cmpl-'},"
                    "'object':{'const':'text_completion'},'created':{'type':'integer'},"
                    "'model':{'const':@model}"},
    /* of every route: what the connection may answer before a handler sees the request */
    {"errors", "'503':{'$ref':'#/components/responses/Retry'},@errors_but_503"},
    {"errors_but_503", "@e401,@e408,@e413,@e417,@e431,@e505,"
                       "'default':{'$ref':'#/components/responses/Error'}"},
};
/* clang-format on */

/* --- expansion -------------------------------------------------------------------------------- */

typedef struct expansion {
    strbuf *out;
    const http_api *api;
    const config *cfg;
    const char *model;
    int32_t vocab_size;
} expansion;

static void expand(const expansion *x, const char *template);

static void put_text(const expansion *x, const char *text)
{
    strbuf_append_json(x->out, text, strlen(text));
}

static void put_int(const expansion *x, int64_t value)
{
    strbuf_appendf(x->out, "%" PRId64, value);
}

/* Decimal numbers from 0 to the last token id, without leading zeros. */
static void put_id_pattern(const expansion *x)
{
    char digits[16];
    int n = snprintf(digits, sizeof(digits), "%d", x->vocab_size - 1);
    strbuf_append_str(x->out, "\"^(0");
    if (n > 1)
        strbuf_appendf(x->out, "|[1-9][0-9]{0,%d}", n - 2); /* fewer digits */
    for (int i = 0; i < n; i++) { /* as many: equal up to digit i, which is less */
        int low = i == 0 ? 1 : 0;
        int high = digits[i] - '0' - (i < n - 1 ? 1 : 0);
        if (high >= low)
            strbuf_appendf(x->out, "|%.*s[%d-%d][0-9]{%d}", i, digits, low, high, n - 1 - i);
    }
    strbuf_append_str(x->out, ")$\"");
}

static void put_paths(const expansion *x)
{
    for (int i = 0; http_api_route_path(i) != NULL; i++) {
        bool is_get = strcmp(http_api_route_method(i), "GET") == 0;
        strbuf_appendf(x->out, "%s\"%s\":{\"%s\":{", i > 0 ? "," : "", http_api_route_path(i),
                       is_get ? "get" : "post");
        expand(x, http_api_route_operation(i));
        strbuf_append_str(x->out, "}}");
    }
}

static void put_fields(const expansion *x)
{
    strbuf fields;
    strbuf_init(&fields);
    completion_params_append_schema(&fields, x->cfg, x->vocab_size);
    strbuf_append_char(&fields, '\0');
    if (fields.failed)
        x->out->failed = true;
    else
        expand(x, fields.data);
    strbuf_deinit(&fields);
}

static void put_value(const expansion *x, const char *name, size_t n)
{
    static const struct {
        const char *name;
        int64_t value;
    } constants[] = {
        {"default_tokens", COMPLETION_DEFAULT_TOKENS},
        {"max_prompts", COMPLETION_MAX_PROMPTS},
        {"max_values", COMPLETION_MAX_VALUES},
        {"max_ids", COMPLETION_MAX_VALUES - 3},
        {"max_fields", COMPLETION_MAX_FIELDS},
        {"max_stop_bytes", COMPLETION_MAX_STOP_BYTES},
        {"max_salt_bytes", COMPLETION_MAX_SALT_BYTES},
        {"max_stop_ids", PGD_MAX_STOP_IDS},
        {"max_logit_bias", PGD_MAX_LOGIT_BIAS},
    };
#define IS(text) (n == sizeof(text) - 1 && memcmp(name, text, n) == 0)
    bool by_priority = x->cfg->scheduling_policy == CONFIG_POLICY_PRIORITY;
    for (size_t i = 0; i < PGD_ARRAY_LEN(constants); i++) {
        if (strlen(constants[i].name) == n && memcmp(constants[i].name, name, n) == 0) {
            put_int(x, constants[i].value);
            return;
        }
    }
    for (size_t i = 0; i < PGD_ARRAY_LEN(parts); i++) {
        if (strlen(parts[i].name) == n && memcmp(parts[i].name, name, n) == 0) {
            expand(x, parts[i].template);
            return;
        }
    }
    if (name[0] >= 'A' && name[0] <= 'Z')
        strbuf_appendf(x->out, "{\"$ref\":\"#/components/schemas/%.*s\"}", (int)n, name);
    else if (n == 4 && (name[0] == 'e' || name[0] == 'r') && name[1] <= '9')
        strbuf_appendf(x->out, "\"%.3s\":{\"$ref\":\"#/components/responses/%s\"}", name + 1,
                       name[0] == 'e' ? "Error" : "Retry");
    else if (IS("model"))
        put_text(x, x->model);
    else if (IS("version"))
        put_text(x, PGD_VERSION_STRING);
    else if (IS("max_token_id"))
        put_int(x, x->vocab_size - 1);
    else if (IS("token_id_pattern"))
        put_id_pattern(x);
    else if (IS("max_stop_strings"))
        put_int(x, x->cfg->max_stop_strings);
    else if (IS("min_priority"))
        put_int(x, by_priority ? INT32_MIN : 0);
    else if (IS("max_priority"))
        put_int(x, by_priority ? INT32_MAX : 0);
    else if (IS("security"))
        expand(x,
               http_server_n_keys(x->api->server) > 0 ? "[{'bearer':[]},{'x_api_key':[]}]" : "[]");
    else if (IS("paths"))
        put_paths(x);
    else if (IS("completion_fields"))
        put_fields(x);
    else
        PGD_PANIC("the OpenAPI document has no value for @%.*s", (int)n, name);
#undef IS
}

static void expand(const expansion *x, const char *template)
{
    for (const char *c = template; *c != '\0'; c++) {
        if (*c != '@') {
            strbuf_append_char(x->out, (char)(*c == '\'' ? '"' : *c));
            continue;
        }
        size_t n = strspn(c + 1, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789");
        put_value(x, c + 1, n);
        c += n;
    }
}

void api_openapi_handle(http_api *api, http_conn *conn, const http_request *req)
{
    strbuf b;
    (void)req;
    strbuf_init(&b);
    expansion x = {.out = &b,
                   .api = api,
                   .cfg = engine_get_config(api->engine),
                   .model = engine_model_name(api->engine),
                   .vocab_size = engine_get_model(api->engine)->vocab_size};
    expand(&x, document);
    if (b.failed)
        http_error_respond(conn, 503, NULL, "out of memory");
    else
        http_conn_respond(conn, 200, "application/json", NULL, b.data, b.n_bytes);
    strbuf_deinit(&b);
}
