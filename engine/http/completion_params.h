/* The body of POST /v1/completions, checked and made into what the engine needs.
 *
 * Every field that this version knows is range-checked; a wrong one is a 400 that names it. Fields
 * that it does not know are accepted, as clients rely on, and listed.
 * Owns:    all arrays and texts; completion_params_deinit frees
 * Thread:  any
 */
#ifndef ENGINE_HTTP_COMPLETION_PARAMS_H
#define ENGINE_HTTP_COMPLETION_PARAMS_H

#include "common/arena.h"
#include "common/strbuf.h"
#include "config/config.h"
#include "engine/text/tokenizer.h"
#include "proto/sampling_params.h"

#define COMPLETION_MAX_PROMPTS    256
#define COMPLETION_MAX_N          128
#define COMPLETION_DEFAULT_TOKENS 16 /* max_tokens when left out */
#define COMPLETION_MAX_BEST_OF    20
#define COMPLETION_MAX_VALUES     524288 /* in the JSON, token ids of prompts included */
#define COMPLETION_MAX_FIELDS     256    /* at the top level, known or not */
#define COMPLETION_MAX_STOP_BYTES 4096   /* all stop strings together */
#define COMPLETION_MAX_SALT_BYTES 128
#define COMPLETION_MAX_UNKNOWN    64 /* names that are listed */

typedef struct completion_prompt {
    const char *text; /* NULL when given as ids */
    size_t n_text_bytes;
    token_id *ids; /* given, or filled in after tokenizing (then owned by the completion, not the
                      arena) */
    int32_t n_ids;
    struct block_hash *block_hashes; /* of its full blocks; NULL: none, or not worked out */
} completion_prompt;

typedef struct completion_params {
    arena *arena;
    completion_prompt *prompts; /* [n_prompts] */
    int32_t n_prompts;
    int32_t n;          /* choices per prompt in the answer */
    int32_t best_of;    /* choices generated per prompt, >= n */
    int32_t max_tokens; /* -1: not given; 0 only with echo */
    /* n_logprobs >= 0 also for best_of, which needs the sampled tokens' own. */
    sampling_params sampling;
    bool wants_logprobs; /* in the answer */
    bool echo;
    bool has_seed;
    bool ignore_eos;
    bool stream;
    bool include_usage;
    bool return_token_ids;
    bool return_cached_details;
    bool skip_special;
    bool include_stop;
    const char **stop; /* [n_stop] */
    size_t *stop_bytes;
    int32_t n_stop;
    int32_t priority;
    char *cache_salt;     /* NULL = none */
    const char **unknown; /* [n_unknown] names of fields that were not understood */
    int32_t n_unknown;
} completion_params;

/* What went wrong, for the error object. */
typedef struct completion_fault {
    int status;
    const char *param;
    const char *code; /* NULL = the status */
    char message[480];
} completion_fault;

/* defaults: sampling defaults of the model. model_name: requests for another model are 404. False
 * with *fault filled. */
PGD_MUST_USE bool completion_params_parse(completion_params *out, const char *body, size_t n_bytes,
                                          const config *cfg, const sampling_params *defaults,
                                          const char *model_name, int32_t vocab_size,
                                          completion_fault *fault);
void completion_params_deinit(completion_params *p);
/* Appends the members of the OpenAPI schema's properties, as a template of api_openapi.c. */
void completion_params_append_schema(strbuf *out, const config *cfg, int32_t vocab_size);

#endif
