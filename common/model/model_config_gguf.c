/* Translates GGUF metadata keys into a model_config.
 *
 * Keys of an architecture begin with its name ("llama.block_count"). An absent optional key takes
 * the default that the writers of such files assume; a key of the wrong type is a fault, never a
 * default. Flags that GGUF does not state (biases) follow from which tensors the first layer has.
 * What would change the computation and is not implemented is refused by name rather than ignored.
 * What differs between layers, and rope, is read in model_config_gguf_layers.c.
 */
#include "common/model/model_config_gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/model/model_config_gguf_internal.h"

static const gguf_traits archs[] = {
    {.name = "llama", .rope = ROPE_ADJACENT}, /* also Mistral, Mixtral and SmolLM2 */
    {.name = "qwen2", .rope = ROPE_HALVES, .always_qkv_bias = true},
    {.name = "qwen3", .rope = ROPE_HALVES, .always_qk_norm = true},
    {.name = "smollm3", .rope = ROPE_ADJACENT, .no_rope_interval = 4},
    {.name = "gemma2",
     .rope = ROPE_HALVES,
     .full_interval = 2,
     .default_window = 4096,
     .is_gemma = true,
     .attn_soft_cap = 50,
     .final_soft_cap = 30,
     .wide_scale_layers = 46},
    {.name = "gemma3",
     .rope = ROPE_HALVES,
     .always_qk_norm = true,
     .full_interval = 6,
     .local_theta = 10000.0,
     .is_gemma = true,
     .wide_scale_layers = 62},
    {.name = "qwen3moe", .rope = ROPE_HALVES, .always_qk_norm = true, .needs_experts = true},
    {.name = "gpt-oss",
     .rope = ROPE_HALVES,
     .full_interval = 2,
     .needs_experts = true,
     .is_gpt_oss = true},
    {.name = "llama4",
     .rope = ROPE_ADJACENT,
     .no_rope_interval = 4,
     .needs_experts = true,
     .is_llama4 = true},
};

#define SUPPORTED_ARCHS "llama, qwen2, qwen3, smollm3, gemma2, gemma3, qwen3moe, gpt-oss, llama4"

void model_config_gguf__key(char out[GGUF_MAX_KEY], const gguf_reader *r, const char *suffix)
{
    (void)snprintf(out, GGUF_MAX_KEY, "%s.%s", r->arch->name, suffix);
}

pgd_err model_config_gguf__fail_type(const gguf_reader *r, const char *key, const char *wanted)
{
    return pgd_fail(r->why, PGD_EFORMAT,
                    "expected %s, got a value of another type or out of range, at metadata "
                    "key %s",
                    wanted, key);
}

static pgd_err fail_missing(const gguf_reader *r, const char *key)
{
    return pgd_fail(r->why, PGD_EFORMAT,
                    "expected metadata key %s, got none; the file is incomplete, convert "
                    "the model again",
                    key);
}

/* An array with one value per layer counts as one value if all are the same. */
static pgd_err array_to_i64(int64_t *out, const gguf_reader *r, const char *key,
                            const gguf_value *v)
{
    if (v->n_elems == 0)
        return model_config_gguf__fail_type(r, key, "an integer or a filled array of integers");
    for (uint64_t i = 0; i < v->n_elems; i++) {
        int64_t elem = 0;
        if (!gguf_array_i64(v, i, &elem))
            return model_config_gguf__fail_type(r, key, "an integer or an array of integers");
        if (i > 0 && elem != *out)
            return pgd_fail(r->why, PGD_EUNSUPPORTED,
                            "expected the same value for all layers, got %" PRId64 " and %" PRId64
                            ", at metadata key %s; layers of different sizes are not supported",
                            *out, elem, key);
        *out = elem;
    }
    return PGD_OK;
}

pgd_err model_config_gguf__i32(int32_t *out, const gguf_reader *r, const char *suffix,
                               bool is_required)
{
    char key[GGUF_MAX_KEY];
    int64_t wide = 0;
    model_config_gguf__key(key, r, suffix);
    const gguf_value *v = gguf_get_value(r->file, key);
    if (v == NULL)
        return is_required ? fail_missing(r, key) : PGD_OK;
    if (v->type == GGUF_ARRAY)
        PGD_TRY(array_to_i64(&wide, r, key, v));
    else if (!gguf_get_i64(r->file, key, &wide))
        return model_config_gguf__fail_type(r, key, "an integer");
    if (wide < 0 || wide > INT32_MAX)
        return pgd_fail(r->why, PGD_ERANGE, "expected 0 to %d, got %" PRId64 ", at metadata key %s",
                        INT32_MAX, wide, key);
    *out = (int32_t)wide;
    return PGD_OK;
}

pgd_err model_config_gguf__f64(double *out, const gguf_reader *r, const char *suffix,
                               bool is_required)
{
    char key[GGUF_MAX_KEY];
    model_config_gguf__key(key, r, suffix);
    if (gguf_get_value(r->file, key) == NULL)
        return is_required ? fail_missing(r, key) : PGD_OK;
    return gguf_get_f64(r->file, key, out) ? PGD_OK
                                           : model_config_gguf__fail_type(r, key, "a number");
}

static pgd_err find_arch(gguf_reader *r)
{
    gguf_string name;
    if (!gguf_get_string(r->file, "general.architecture", &name))
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected metadata key general.architecture as a string, got none");
    for (size_t i = 0; i < PGD_ARRAY_LEN(archs); i++) {
        if (strlen(archs[i].name) == name.n_bytes &&
            memcmp(archs[i].name, name.data, name.n_bytes) == 0) {
            r->arch = &archs[i];
            (void)snprintf(r->cfg->arch, sizeof(r->cfg->arch), "%s", archs[i].name);
            return PGD_OK;
        }
    }
    char shown[64];
    size_t n = PGD_MIN(name.n_bytes, sizeof(shown) - 1);
    for (size_t i = 0; i < n; i++)
        shown[i] = name.data[i] >= 0x20 && name.data[i] < 0x7f ? name.data[i] : '?';
    shown[n] = '\0';
    return pgd_fail(
        r->why, PGD_EUNSUPPORTED,
        "architecture \"%s\" is not supported by this build, which runs " SUPPORTED_ARCHS, shown);
}

static pgd_err read_sizes(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    PGD_TRY(model_config_gguf__i32(&cfg->n_layers, r, "block_count", true));
    PGD_TRY(model_config_gguf__i32(&cfg->dim, r, "embedding_length", true));
    PGD_TRY(model_config_gguf__i32(&cfg->ffn_dim, r, "feed_forward_length", true));
    PGD_TRY(model_config_gguf__i32(&cfg->max_context, r, "context_length", true));
    PGD_TRY(model_config_gguf__i32(&cfg->n_heads, r, "attention.head_count", true));
    cfg->n_kv_heads = cfg->n_heads;
    PGD_TRY(model_config_gguf__i32(&cfg->n_kv_heads, r, "attention.head_count_kv", false));
    PGD_TRY(model_config_gguf__i32(&cfg->head_dim, r, "attention.key_length", false));
    if (cfg->head_dim == 0) {
        if (cfg->n_heads <= 0 || cfg->dim % cfg->n_heads != 0)
            return pgd_fail(
                r->why, PGD_EFORMAT,
                "expected a hidden size that is a multiple of the number of heads, got %" PRId32
                " and %" PRId32 ", at metadata key %s.attention.head_count",
                cfg->dim, cfg->n_heads, r->arch->name);
        cfg->head_dim = cfg->dim / cfg->n_heads;
    }
    int32_t value_length = cfg->head_dim;
    PGD_TRY(model_config_gguf__i32(&value_length, r, "attention.value_length", false));
    if (value_length != cfg->head_dim)
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected equal sizes of keys and values, got %" PRId32 " and %" PRId32
                        ", at metadata key %s.attention.value_length",
                        cfg->head_dim, value_length, r->arch->name);
    double eps = 0;
    PGD_TRY(model_config_gguf__f64(&eps, r, "attention.layer_norm_rms_epsilon", true));
    cfg->norm_eps = (float)eps;
    return PGD_OK;
}

static pgd_err refuse_options(const gguf_reader *r)
{
    char key[GGUF_MAX_KEY];
    bool is_causal = true;
    int64_t n_parts = 1;
    if (gguf_get_i64(r->file, "split.count", &n_parts) && n_parts > 1)
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected a whole model, got one of %" PRId64
                        " parts (split.count); merge them into one GGUF file",
                        n_parts);
    model_config_gguf__key(key, r, "attention.causal");
    if (gguf_get_bool(r->file, key, &is_causal) && !is_causal)
        return pgd_fail(
            r->why, PGD_EUNSUPPORTED,
            "models without causal attention are not supported by this build (%s is false)", key);
    return PGD_OK;
}

static bool layer_has(const gguf_reader *r, int32_t layer, const char *what)
{
    char name[64];
    (void)snprintf(name, sizeof(name), "blk.%" PRId32 ".%s", layer, what);
    return gguf_get_tensor(r->file, name) != NULL;
}

/* Kinds of experts that the architectures here do not have. */
static pgd_err refuse_expert_options(const gguf_reader *r)
{
    enum { GATE_SOFTMAX = 1, GATE_SOFTMAX_CHOSEN = 3 };
    int32_t n_shared = 0, n_groups = 0, gate = GATE_SOFTMAX;
    double scale = 1.0;
    PGD_TRY(model_config_gguf__i32(&n_shared, r, "expert_shared_count", false));
    PGD_TRY(model_config_gguf__i32(&n_groups, r, "expert_group_count", false));
    PGD_TRY(model_config_gguf__i32(&gate, r, "expert_gating_func", false));
    PGD_TRY(model_config_gguf__f64(&scale, r, "expert_weights_scale", false));
    if (n_shared > 0 || n_groups > 1 || (gate != GATE_SOFTMAX && gate != GATE_SOFTMAX_CHOSEN) ||
        (scale != 0.0 && scale != 1.0))
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected experts without shared ones, groups, scale and another gate than "
                        "softmax, got %" PRId32 " shared, %" PRId32 " groups, scale %g and gate "
                        "%" PRId32 ", at metadata keys %s.expert_*",
                        n_shared, n_groups, scale, gate, r->arch->name);
    return PGD_OK;
}

/* A layer has experts when it has a router. */
static pgd_err read_experts(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    char key[GGUF_MAX_KEY];
    bool norms = true;
    int32_t first = -1;
    PGD_TRY(model_config_gguf__i32(&cfg->n_experts, r, "expert_count", r->arch->needs_experts));
    if (cfg->n_experts == 0)
        return PGD_OK;
    if (!r->arch->is_llama4)
        PGD_TRY(refuse_expert_options(r));
    PGD_TRY(model_config_gguf__i32(&cfg->n_experts_chosen, r, "expert_used_count", true));
    cfg->expert_ffn_dim = cfg->ffn_dim;
    PGD_TRY(model_config_gguf__i32(&cfg->expert_ffn_dim, r, "expert_feed_forward_length", false));
    model_config_gguf__key(key, r, "expert_weights_norm");
    if (gguf_get_value(r->file, key) != NULL && !gguf_get_bool(r->file, key, &norms))
        return model_config_gguf__fail_type(r, key, "a flag");
    cfg->expert_gate = norms ? EXPERT_GATE_SOFTMAX_CHOSEN : EXPERT_GATE_SOFTMAX_ALL;
    if (r->arch->is_llama4) {
        cfg->expert_gate = EXPERT_GATE_SIGMOID;
        cfg->expert_scales_input = true;
        cfg->shared_ffn_dim = cfg->expert_ffn_dim;
    }
    for (int32_t i = 0; i < PGD_MIN(cfg->n_layers, MODEL_MAX_LAYERS); i++) {
        cfg->layer_has_experts[i] = layer_has(r, i, "ffn_gate_inp.weight");
        if (cfg->layer_has_experts[i] && first < 0)
            first = i;
    }
    if (first < 0)
        return pgd_fail(
            r->why, PGD_EFORMAT,
            "expected a tensor \"ffn_gate_inp.weight\" of some layer, since %s.expert_count "
            "is %" PRId32 ", got none",
            r->arch->name, cfg->n_experts);
    cfg->router_bias = layer_has(r, first, "ffn_gate_inp.bias");
    cfg->expert_bias = layer_has(r, first, "ffn_down_exps.bias");
    return PGD_OK;
}

static void set_gpt_oss(model_config *cfg)
{
    cfg->act = FFN_ACT_CLAMPED;
    cfg->act_alpha = 1.702f;
    cfg->act_limit = 7.0f;
    cfg->attn_sinks = true;
}

static pgd_err read_tensor_flags(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    const gguf_tensor *embedding = gguf_get_tensor(r->file, "token_embd.weight");
    if (embedding == NULL || embedding->n_dims != 2)
        return pgd_fail(
            r->why, PGD_EFORMAT,
            "expected a matrix \"token_embd.weight\", got %s; the file holds no whole model",
            embedding == NULL ? "none" : "another shape");
    if (embedding->dims[0] > INT32_MAX)
        return pgd_fail(r->why, PGD_ERANGE,
                        "expected at most %d rows, got %" PRId64
                        ", at tensor \"token_embd.weight\"",
                        INT32_MAX, embedding->dims[0]);
    cfg->vocab_size = (int32_t)embedding->dims[0];
    cfg->tied_head = gguf_get_tensor(r->file, "output.weight") == NULL;
    cfg->qkv_bias =
        r->arch->always_qkv_bias || gguf_get_tensor(r->file, "blk.0.attn_q.bias") != NULL;
    cfg->o_bias = gguf_get_tensor(r->file, "blk.0.attn_output.bias") != NULL;
    cfg->mlp_bias = gguf_get_tensor(r->file, "blk.0.ffn_gate.bias") != NULL;
    cfg->qk_norm = r->arch->always_qk_norm;
    return PGD_OK;
}

/* Every tokenizer.ggml.*_token_id, known or not, must lie in the vocabulary. */
static pgd_err check_special_ids(const gguf_reader *r)
{
    static const char prefix[] = "tokenizer.ggml.";
    static const char ending[] = "_token_id";
    size_t prefix_bytes = sizeof(prefix) - 1;
    size_t ending_bytes = sizeof(ending) - 1;
    for (int32_t i = 0; i < gguf_n_values(r->file); i++) {
        gguf_string key;
        const gguf_value *v = gguf_get_value_at(r->file, i, &key);
        if (key.n_bytes < prefix_bytes + ending_bytes ||
            memcmp(key.data, prefix, prefix_bytes) != 0 ||
            memcmp(key.data + key.n_bytes - ending_bytes, ending, ending_bytes) != 0 ||
            key.n_bytes >= GGUF_MAX_KEY)
            continue;
        char name[GGUF_MAX_KEY];
        int64_t id = 0;
        memcpy(name, key.data, key.n_bytes);
        name[key.n_bytes] = '\0';
        if (v->type == GGUF_ARRAY || !gguf_get_i64(r->file, name, &id))
            return model_config_gguf__fail_type(r, name, "a token id");
        if (id < 0 || id >= r->cfg->vocab_size)
            return pgd_fail(r->why, PGD_ERANGE,
                            "expected a token id of 0 to %" PRId32 ", got %" PRId64
                            ", at metadata key %s",
                            r->cfg->vocab_size - 1, id, name);
    }
    return PGD_OK;
}

static pgd_err add_eos(const gguf_reader *r, int64_t id)
{
    model_config *cfg = r->cfg;
    for (int32_t i = 0; i < cfg->n_eos_ids; i++) {
        if (cfg->eos_ids[i] == id)
            return PGD_OK;
    }
    if (cfg->n_eos_ids == MODEL_MAX_EOS_IDS)
        return pgd_fail(r->why, PGD_ERANGE, "expected at most %d end-of-sequence ids, got more",
                        MODEL_MAX_EOS_IDS);
    cfg->eos_ids[cfg->n_eos_ids++] = (token_id)id;
    return PGD_OK;
}

/* Many files name one end token only, though a chat model ends its turn with another. The usual end
 * markers count too, where the vocabulary has them as control tokens. */
static pgd_err add_end_markers(const gguf_reader *r)
{
    static const char *const markers[] = {"<|im_end|>", "<|eot_id|>", "<|end_of_text|>",
                                          "<|endoftext|>", "<end_of_turn>"};
    enum { TOKEN_TYPE_CONTROL = 3 };
    const gguf_value *tokens = gguf_get_value(r->file, "tokenizer.ggml.tokens");
    const gguf_value *types = gguf_get_value(r->file, "tokenizer.ggml.token_type");
    if (tokens != NULL && tokens->n_elems > (uint64_t)r->cfg->vocab_size)
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected at most %" PRId32
                        " tokens (rows of token_embd.weight), got %" PRIu64
                        ", at metadata key tokenizer.ggml.tokens",
                        r->cfg->vocab_size, tokens->n_elems);
    if (tokens == NULL || types == NULL || tokens->n_elems != types->n_elems)
        return PGD_OK; /* for the tokenizer to judge */
    gguf_array_iter iter;
    gguf_string token;
    gguf_array_begin(&iter, tokens);
    for (int64_t id = 0; gguf_array_next_string(&iter, &token); id++) {
        int64_t type = 0;
        if (!gguf_array_i64(types, (uint64_t)id, &type) || type != TOKEN_TYPE_CONTROL)
            continue;
        for (size_t i = 0; i < PGD_ARRAY_LEN(markers); i++) {
            if (model_config_gguf__is(&token, markers[i]))
                PGD_TRY(add_eos(r, id));
        }
    }
    return PGD_OK;
}

static pgd_err read_ids(const gguf_reader *r)
{
    static const char *const end_keys[] = {"tokenizer.ggml.eos_token_id",
                                           "tokenizer.ggml.eot_token_id",
                                           "tokenizer.ggml.eom_token_id"};
    int64_t id = -1;
    PGD_TRY(check_special_ids(r));
    r->cfg->bos_id = gguf_get_i64(r->file, "tokenizer.ggml.bos_token_id", &id) ? (token_id)id : -1;
    r->cfg->pad_id =
        gguf_get_i64(r->file, "tokenizer.ggml.padding_token_id", &id) ? (token_id)id : -1;
    for (size_t i = 0; i < PGD_ARRAY_LEN(end_keys); i++) {
        if (gguf_get_i64(r->file, end_keys[i], &id))
            PGD_TRY(add_eos(r, id));
    }
    return add_end_markers(r);
}

static bool read_sampling(float *out, const gguf_file *file, const char *key)
{
    double value = 0;
    if (!gguf_get_f64(file, key, &value))
        return false;
    *out = (float)value;
    return true;
}

/* The author's sampling defaults, which converters copy from generation_config.json. */
static void read_generation(const gguf_reader *r)
{
    model_config *cfg = r->cfg;
    int64_t top_k = 0;
    cfg->has_temperature = read_sampling(&cfg->gen_temperature, r->file, "general.sampling.temp");
    cfg->has_top_p = read_sampling(&cfg->gen_top_p, r->file, "general.sampling.top_p");
    cfg->has_min_p = read_sampling(&cfg->gen_min_p, r->file, "general.sampling.min_p");
    cfg->has_repetition_penalty =
        read_sampling(&cfg->gen_repetition_penalty, r->file, "general.sampling.penalty_repeat");
    if (gguf_get_i64(r->file, "general.sampling.top_k", &top_k) && top_k >= -1 &&
        top_k <= INT32_MAX) {
        cfg->has_top_k = true;
        cfg->gen_top_k = (int32_t)top_k;
    }
}

/* Printable ASCII and UTF-8 as they are, control characters as '?'. */
static void read_name(const gguf_reader *r)
{
    gguf_string name;
    char *out = r->cfg->name;
    if (!gguf_get_string(r->file, "general.name", &name))
        return;
    size_t n = PGD_MIN(name.n_bytes, sizeof(r->cfg->name) - 1);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)name.data[i];
        out[i] = c < 0x20 || c == 0x7f ? '?' : (char)c;
    }
    out[n] = '\0';
}

pgd_err model_config_gguf_read(model_config *out, const gguf_file *file, pgd_why *why)
{
    *out = (model_config){.main_dtype = DTYPE_NONE, .bos_id = -1, .pad_id = -1};
    gguf_reader r = {.cfg = out, .file = file, .why = why};
    PGD_TRY(find_arch(&r));
    read_name(&r);
    PGD_TRY(refuse_options(&r));
    PGD_TRY(read_sizes(&r));
    PGD_TRY(model_config_gguf__layers(&r));
    PGD_TRY(read_tensor_flags(&r));
    PGD_TRY(read_experts(&r));
    if (r.arch->is_gpt_oss)
        set_gpt_oss(out);
    PGD_TRY(read_ids(&r));
    read_generation(&r);
    return model_config_check(out, why);
}
