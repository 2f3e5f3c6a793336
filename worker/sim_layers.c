/* Hand-written: three kinds and two numbers. */
#include "worker/sim_layers.h"

#include <stdlib.h>
#include <string.h>

static bool take_number(int32_t *out, const char **at, char sign, int32_t max)
{
    char *end;
    if (**at != sign)
        return true;
    if ((*at)[1] < '0' || (*at)[1] > '9')
        return false;
    long n = strtol(*at + 1, &end, 10);
    *at = end;
    *out = (int32_t)PGD_MIN(n, INT32_MAX);
    return n >= 1 && n <= max;
}

static bool parse_entry(kv_layer_spec *layer, const char **at)
{
    static const char *const words[] = {"full", "sliding", "chunked"};
    static const attention_kind kinds[] = {ATTENTION_FULL, ATTENTION_SLIDING, ATTENTION_CHUNKED};
    int32_t weight = 1;
    for (size_t i = 0; i < PGD_ARRAY_LEN(words); i++) {
        if (strncmp(*at, words[i], strlen(words[i])) != 0)
            continue;
        *at += strlen(words[i]);
        *layer = (kv_layer_spec){.kind = (int32_t)kinds[i]};
        if (!take_number(&layer->window, at, ':', INT32_MAX) ||
            !take_number(&weight, at, '*', SIM_LAYERS_MAX_WEIGHT))
            return false;
        layer->token_bytes = weight * SIM_LAYERS_TOKEN_BYTES;
        return (kinds[i] != ATTENTION_FULL) == (layer->window > 0);
    }
    return false;
}

pgd_err sim_layers_parse(kv_layer_spec *layers, int32_t *n_layers, const char *text, pgd_why *why)
{
    const char *at = text[0] != 0 ? text : "full";
    *n_layers = 0;
    for (;;) {
        if (*n_layers == PGD_MAX_KV_LAYERS)
            return pgd_fail(why, PGD_EINVAL, "sim_kv_layers: expected at most %d layers",
                            PGD_MAX_KV_LAYERS);
        const char *entry = at;
        if (!parse_entry(&layers[*n_layers], &at) || (*at != ',' && *at != 0))
            return pgd_fail(why, PGD_EINVAL,
                            "sim_kv_layers: expected full, sliding:WINDOW or chunked:WINDOW, each "
                            "with *WEIGHT perhaps, separated by commas, got \"%s\"",
                            entry);
        ++*n_layers;
        if (*at++ == 0)
            return PGD_OK;
    }
}
