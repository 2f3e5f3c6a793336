/* Any bytes as the body of a completion request. The first byte chooses the server's settings. What
 * is accepted must lie in the ranges that the engine and the worker rely on; what is refused must
 * say why. */
#include <math.h>
#include <string.h>

#include "common/json.h"
#include "common/mem.h"
#include "common/utf8.h"
#include "engine/http/completion_params.h"
#include "tests/fuzz/fuzz_input.h"

#define VOCAB_SIZE 300

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fuzz_quiet();
    return 0;
}

static void check_ids(const token_id *ids, int32_t n_ids)
{
    for (int32_t i = 0; i < n_ids; i++)
        PGD_ASSERTF(ids[i] >= 0 && ids[i] < VOCAB_SIZE, "token id %d", ids[i]);
}

static bool within(double v, double min, double max)
{
    return v >= min && v <= max; /* false for a NaN */
}

static void check_sampling(const sampling_params *p, const config *cfg)
{
    PGD_ASSERT(within(p->temperature, 0, 2));
    PGD_ASSERT(p->top_p > 0 && p->top_p <= 1);
    PGD_ASSERT(within(p->min_p, 0, 1));
    PGD_ASSERT(p->top_k >= 0);
    PGD_ASSERT(p->repetition_penalty > 0 && isfinite(p->repetition_penalty));
    PGD_ASSERT(within(p->presence_penalty, -2, 2));
    PGD_ASSERT(within(p->frequency_penalty, -2, 2));
    PGD_ASSERT(p->n_logprobs >= -1 && p->n_logprobs <= cfg->max_logprobs);
    PGD_ASSERT(p->min_tokens >= 0);
    PGD_ASSERT(p->n_stop_ids >= 0 && p->n_stop_ids <= PGD_MAX_STOP_IDS);
    check_ids(p->stop_ids, p->n_stop_ids);
    PGD_ASSERT(p->n_logit_bias >= 0 && p->n_logit_bias <= PGD_MAX_LOGIT_BIAS);
    for (int32_t i = 0; i < p->n_logit_bias; i++) {
        check_ids(&p->logit_bias[i].id, 1);
        PGD_ASSERT(within(p->logit_bias[i].bias, -100, 100));
    }
}

static void check_accepted(const completion_params *p, const config *cfg)
{
    PGD_ASSERT(p->n_prompts >= 1 && p->n_prompts <= COMPLETION_MAX_PROMPTS);
    PGD_ASSERT(p->n >= 1 && p->n <= COMPLETION_MAX_N);
    for (int32_t i = 0; i < p->n_prompts; i++) {
        const completion_prompt *prompt = &p->prompts[i];
        if (prompt->text != NULL) {
            PGD_ASSERT(prompt->text[prompt->n_text_bytes] == '\0');
            PGD_ASSERT(utf8_is_valid(prompt->text, prompt->n_text_bytes, NULL));
        } else {
            PGD_ASSERT(prompt->n_ids >= 1);
            check_ids(prompt->ids, prompt->n_ids);
        }
    }
    PGD_ASSERT(p->max_tokens >= -1);
    PGD_ASSERT(p->max_tokens < 0 || p->sampling.min_tokens <= p->max_tokens);
    PGD_ASSERT(p->n_stop >= 0 && p->n_stop <= cfg->max_stop_strings);
    size_t n_total = 0;
    for (int32_t i = 0; i < p->n_stop; i++) {
        PGD_ASSERT(p->stop_bytes[i] > 0 && p->stop[i][p->stop_bytes[i]] == '\0');
        n_total += p->stop_bytes[i];
    }
    PGD_ASSERT(n_total <= COMPLETION_MAX_STOP_BYTES);
    PGD_ASSERT(p->cache_salt == NULL || p->cache_salt[0] != '\0');
    PGD_ASSERT(p->priority == 0 || cfg->scheduling_policy == CONFIG_POLICY_PRIORITY);
    check_sampling(&p->sampling, cfg);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static config cfg;
    static const sampling_params defaults = {
        .temperature = 1, .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};
    uint8_t settings = n_bytes > 0 ? data[0] : 0;
    size_t n_body = n_bytes > 0 ? n_bytes - 1 : 0;
    completion_params p;
    completion_fault fault = {0};
    config_init(&cfg);
    cfg.scheduling_policy = (settings & 1) != 0 ? CONFIG_POLICY_PRIORITY : CONFIG_POLICY_FCFS;
    cfg.max_logprobs = (settings & 2) != 0 ? 0 : 20;
    cfg.max_stop_strings = (settings & 4) != 0 ? 1 : 16;
    char *body = mem_alloc(n_body + 1);
    if (n_body > 0)
        memcpy(body, data + 1, n_body);
    body[n_body] = '\0';
    if (completion_params_parse(&p, body, n_body, &cfg, &defaults, "m", VOCAB_SIZE, &fault))
        check_accepted(&p, &cfg);
    else
        PGD_ASSERTF(fault.status >= 400 && fault.status < 600 && fault.message[0] != '\0',
                    "status %d", fault.status);
    completion_params_deinit(&p);
    mem_free(body);
    return 0;
}
