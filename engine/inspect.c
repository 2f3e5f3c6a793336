/* Prints a model file as a table.
 *
 * Tensors are listed by pattern: layer numbers become '*', and tensors of the same pattern, shape
 * and type share a row, so that 30 layers take as many rows as one. The verdict asks the same
 * functions that serving asks (model_file_check_runnable, tokenizer_create), so it cannot promise
 * what loading then refuses.
 */
#include "engine/inspect.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "common/file.h"
#include "common/hash.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/model/model_file.h"
#include "common/model/safetensors.h"
#include "engine/kv/kv_groups.h"
#include "engine/text/tokenizer.h"

enum { MAX_ROWS = 1024, PATTERN_BYTES = 272, MAX_NAME_COLUMN = 60, MAX_TOKENIZER_BYTES = 64 << 20 };

/* One row of the tensor table: what first showed the pattern, and how many followed. */
typedef struct tensor_row {
    char pattern[PATTERN_BYTES];
    uint64_t pattern_hash;
    model_tensor first;
    int32_t n_tensors;
    size_t n_bytes;
} tensor_row;

typedef struct tensor_table {
    tensor_row *rows; /* [MAX_ROWS] */
    int32_t n_rows;
    int32_t n_tensors;
    int32_t n_left_out; /* tensors beyond MAX_ROWS patterns */
    size_t n_bytes;
    double n_params;
} tensor_table;

static void put_text(FILE *out, const char *text, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        (void)fputc(c < 0x20 || c == 0x7f ? '?' : c, out);
    }
}

static void put_label(FILE *out, const char *label)
{
    (void)fprintf(out, "%-16s", label);
}

static void put_line(FILE *out, const char *label, const char *text)
{
    put_label(out, label);
    put_text(out, text, strlen(text));
    (void)fputc('\n', out);
}

/* "96.6 MB"; powers of 1000. */
static const char *bytes_text(char buf[32], double n_bytes)
{
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB"};
    size_t unit = 0;
    while (n_bytes >= 999.95 && unit + 1 < PGD_ARRAY_LEN(units)) {
        n_bytes /= 1000;
        unit++;
    }
    (void)snprintf(buf, 32, unit == 0 ? "%.0f %s" : "%.1f %s", n_bytes, units[unit]);
    return buf;
}

static const char *shape_text(char buf[112], const model_tensor *t)
{
    size_t used = (size_t)snprintf(buf, 112, "[");
    for (int32_t i = 0; i < PGD_MIN(t->n_dims, 4); i++)
        used +=
            (size_t)snprintf(buf + used, 112 - used, "%s%" PRId64, i > 0 ? ", " : "", t->dims[i]);
    (void)snprintf(buf + used, 112 - used, "%s]", t->n_dims > 4 ? ", ..." : "");
    return buf;
}

/* Copies name with each number between dots as '*'. */
static void make_pattern(char out[PATTERN_BYTES], const char *name)
{
    size_t used = 0;
    for (const char *p = name; *p != '\0' && used + 2 < PATTERN_BYTES;) {
        size_t n_digits = strspn(p, "0123456789");
        if (p > name && p[-1] == '.' && n_digits > 0 && p[n_digits] == '.') {
            out[used++] = '*';
            p += n_digits;
        } else {
            out[used++] = *p++;
        }
    }
    out[used] = '\0';
}

static bool is_like(const tensor_row *row, const char *pattern, uint64_t pattern_hash,
                    const model_tensor *t)
{
    return row->pattern_hash == pattern_hash && row->first.n_dims == t->n_dims &&
           memcmp(row->first.dims, t->dims, sizeof(t->dims)) == 0 &&
           strcmp(row->first.type_name, t->type_name) == 0 && strcmp(row->pattern, pattern) == 0;
}

static void add_tensor(tensor_table *table, const model_tensor *t)
{
    char pattern[PATTERN_BYTES];
    make_pattern(pattern, t->name);
    uint64_t pattern_hash = hash_bytes(pattern, strlen(pattern), 0);
    double n_params = 1.0;
    for (int i = 0; i < 4; i++)
        n_params *= (double)t->dims[i];
    table->n_tensors++;
    table->n_bytes += t->n_bytes;
    table->n_params += n_params;
    tensor_row *row = table->rows;
    while (row < table->rows + table->n_rows && !is_like(row, pattern, pattern_hash, t))
        row++;
    if (row == table->rows + table->n_rows) {
        if (table->n_rows == MAX_ROWS) {
            table->n_left_out++;
            return;
        }
        table->n_rows++;
        memcpy(row->pattern, pattern, sizeof(pattern));
        row->pattern_hash = pattern_hash;
        row->first = *t;
    }
    row->n_tensors++;
    row->n_bytes += t->n_bytes;
}

/* Sums per type name, largest first. */
static void put_types(FILE *out, const tensor_table *table)
{
    char buf[32];
    bool *is_done = mem_calloc((size_t)table->n_rows, sizeof(*is_done));
    if (is_done == NULL)
        return;
    (void)fprintf(out, "\ntype            tensors     bytes\n");
    for (;;) {
        const char *best_name = NULL;
        int32_t best_tensors = 0;
        size_t best_bytes = 0;
        for (int32_t i = 0; i < table->n_rows; i++) {
            int32_t n_tensors = 0;
            size_t n_bytes = 0;
            for (int32_t j = i; j < table->n_rows && !is_done[i]; j++) {
                if (strcmp(table->rows[i].first.type_name, table->rows[j].first.type_name) == 0) {
                    n_tensors += table->rows[j].n_tensors;
                    n_bytes += table->rows[j].n_bytes;
                }
            }
            if (!is_done[i] && (best_name == NULL || n_bytes > best_bytes)) {
                best_name = table->rows[i].first.type_name;
                best_tensors = n_tensors;
                best_bytes = n_bytes;
            }
        }
        if (best_name == NULL)
            break;
        for (int32_t i = 0; i < table->n_rows; i++)
            is_done[i] = is_done[i] || strcmp(table->rows[i].first.type_name, best_name) == 0;
        (void)fprintf(out, "  %-14s%7" PRId32 "  %10s\n", best_name, best_tensors,
                      best_bytes == 0 ? "?" : bytes_text(buf, (double)best_bytes));
    }
    mem_free(is_done);
}

static void put_tensors(FILE *out, const tensor_table *table)
{
    char size_buf[32];
    char shape_buf[112];
    size_t width = 24;
    for (int32_t i = 0; i < table->n_rows; i++)
        width = PGD_MAX(width, PGD_MIN(strlen(table->rows[i].pattern), (size_t)MAX_NAME_COLUMN));
    put_types(out, table);
    (void)fprintf(out, "\n%-*s  count  %-16s  %-8s  %10s\n", (int)width + 2, "tensor", "shape",
                  "type", "bytes");
    for (int32_t i = 0; i < table->n_rows; i++) {
        const tensor_row *row = &table->rows[i];
        (void)fputs("  ", out);
        put_text(out, row->pattern, strlen(row->pattern));
        (void)fprintf(out, "%*s  %5" PRId32 "  %-16s  %-8s  %10s\n",
                      (int)(width - PGD_MIN(strlen(row->pattern), width)), "", row->n_tensors,
                      shape_text(shape_buf, &row->first), row->first.type_name,
                      row->n_bytes == 0 ? "?" : bytes_text(size_buf, (double)row->n_bytes));
    }
    if (table->n_left_out > 0)
        (void)fprintf(out, "  ... and %" PRId32 " more tensors\n", table->n_left_out);
    (void)fputc('\n', out);
}

static void put_rope(FILE *out, const model_config *cfg)
{
    int32_t n_without = 0;
    for (int32_t i = 0; i < cfg->n_layers; i++)
        n_without += !cfg->layer_has_rope[i];
    put_label(out, "rope");
    (void)fprintf(out, "%s, base %.10g, %" PRId32 " of %" PRId32 " values of a head",
                  cfg->rope == ROPE_ADJACENT ? "adjacent pairs" : "halves", cfg->rope_theta,
                  cfg->rope_dim, cfg->head_dim);
    switch (cfg->rope_scaling) {
    case ROPE_SCALING_NONE:
        (void)fputs(cfg->has_rope_freqs ? ", frequency factors in the file" : ", no scaling", out);
        break;
    case ROPE_SCALING_LINEAR:
        (void)fprintf(out, ", linear scaling by %g", cfg->rope_factor);
        break;
    case ROPE_SCALING_LLAMA3:
        (void)fprintf(out, ", llama3 scaling by %g from a context of %" PRId32, cfg->rope_factor,
                      cfg->rope_original_context);
        break;
    case ROPE_SCALING_YARN:
        (void)fprintf(out, ", yarn scaling by %g from a context of %" PRId32, cfg->rope_factor,
                      cfg->rope_original_context);
        break;
    }
    if (cfg->rope_local_theta != 0.0)
        (void)fprintf(out, "; base %.10g in sliding layers", cfg->rope_local_theta);
    if (n_without > 0)
        (void)fprintf(out, "; %" PRId32 " layers without", n_without);
    (void)fputc('\n', out);
}

/* "sliding window of 512 in 22 of 26 layers, full in 4 of 26 layers; scale 0.0625, soft cap 50" */
static void put_attention(FILE *out, const model_config *cfg)
{
    static const attention_kind kinds[] = {ATTENTION_SLIDING, ATTENTION_CHUNKED, ATTENTION_FULL};
    const char *comma = "";
    put_label(out, "attention");
    for (size_t k = 0; k < PGD_ARRAY_LEN(kinds); k++) {
        int32_t n = 0;
        for (int32_t i = 0; i < cfg->n_layers; i++)
            n += cfg->layer_attention[i] == kinds[k];
        if (n == 0)
            continue;
        (void)fprintf(out, "%s%s", comma, attention_kind_name(kinds[k]));
        if (kinds[k] != ATTENTION_FULL)
            (void)fprintf(out, " of %" PRId32,
                          kinds[k] == ATTENTION_SLIDING ? cfg->sliding_window
                                                        : cfg->attention_chunk);
        (void)fprintf(out, " in %" PRId32 " of %" PRId32 " layers", n, cfg->n_layers);
        comma = ", ";
    }
    (void)fprintf(out, "; scale %.6g", cfg->attn_scale);
    if (cfg->attn_soft_cap > 0)
        (void)fprintf(out, ", soft cap %g", (double)cfg->attn_soft_cap);
    if (cfg->attn_sinks)
        (void)fputs(", a sink for each head", out);
    if (cfg->temperature_floor > 0)
        (void)fprintf(out, ", temperature %g each %" PRId32 " tokens without rope",
                      cfg->temperature_scale, cfg->temperature_floor);
    (void)fputc('\n', out);
}

/* "96, SiLU gate", "2 of 8 experts of 768 for each token in 3 layers, 96 in the others, SiLU gate" */
static void put_ffn(FILE *out, const model_config *cfg)
{
    static const char *const gates[] = {"SiLU gate", "GELU gate", "clamped gate", "GELU", "ReLU"};
    int32_t n_mixed = 0;
    for (int32_t i = 0; i < cfg->n_layers; i++)
        n_mixed += cfg->layer_has_experts[i];
    put_label(out, "feed-forward");
    if (n_mixed > 0) {
        (void)fprintf(out,
                      "%" PRId32 " of %" PRId32 " experts of %" PRId32 " for each token in %" PRId32
                      " layers, ",
                      cfg->n_experts_chosen, cfg->n_experts, cfg->expert_ffn_dim, n_mixed);
        if (cfg->shared_ffn_dim > 0)
            (void)fprintf(out, "one of %" PRId32 " for all besides, ", cfg->shared_ffn_dim);
    }
    if (n_mixed < cfg->n_layers)
        (void)fprintf(out, "%" PRId32 "%s, ", cfg->ffn_dim, n_mixed > 0 ? " in the others" : "");
    /* An encoder-decoder model has none of the gates: the name alone, of four letters. */
    (void)fprintf(out, "%.*s%s\n", cfg->is_encoder_decoder ? 4 : INT_MAX, gates[cfg->act],
                  cfg->post_norms ? "; norms after attention and feed-forward too" : "");
}

static void put_generation(FILE *out, const model_config *cfg)
{
    const char *comma = "";
    put_label(out, "end tokens");
    for (int32_t i = 0; i < cfg->n_eos_ids; i++)
        (void)fprintf(out, "%s%" PRId32, i > 0 ? ", " : "", cfg->eos_ids[i]);
    (void)fputs(cfg->n_eos_ids == 0 ? "none\n" : "\n", out);
    put_label(out, "sampling");
    struct {
        bool has;
        const char *name;
        double value;
    } const defaults[] = {
        {cfg->has_temperature, "temperature", (double)cfg->gen_temperature},
        {cfg->has_top_p, "top_p", (double)cfg->gen_top_p},
        {cfg->has_top_k, "top_k", (double)cfg->gen_top_k},
        {cfg->has_min_p, "min_p", (double)cfg->gen_min_p},
        {cfg->has_repetition_penalty, "repetition_penalty", (double)cfg->gen_repetition_penalty},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(defaults); i++) {
        if (!defaults[i].has)
            continue;
        (void)fprintf(out, "%s%s %g", comma, defaults[i].name, defaults[i].value);
        comma = ", ";
    }
    (void)fputs(*comma == '\0' ? "no defaults in the file\n" : "\n", out);
}

/* With blocks of 16 tokens, the default; nothing when the layers cannot be grouped, which serving
 * tells. */
static void put_kv_groups(FILE *out, const model_config *cfg)
{
    kv_layer_spec layers[PGD_MAX_KV_LAYERS];
    kv_groups groups;
    const kv_groups_opts opts = {
        .block_size = 16, .max_encoder_tokens = cfg->encdec.max_source, .is_hybrid = true};
    char buf[32];
    int32_t token_bytes = 2 * 2 * cfg->n_kv_heads * cfg->head_dim;
    int32_t n_layers = cfg->n_layers;
    for (int32_t i = 0; i < cfg->n_layers; i++)
        layers[i] =
            (kv_layer_spec){cfg->layer_attention[i], model_config_window(cfg, i), token_bytes};
    for (int32_t i = 0; cfg->is_encoder_decoder && i < cfg->n_layers; i++)
        layers[n_layers++] = (kv_layer_spec){ATTENTION_CROSS, 0, token_bytes};
    (void)fprintf(out, "%-16s%s per token in F16%s\n", "KV cache",
                  bytes_text(buf, (double)cfg->n_layers * token_bytes),
                  cfg->is_encoder_decoder ? ", and as much per token of the encoder's input" : "");
    if (kv_groups_init(&groups, layers, n_layers, &opts, NULL) != PGD_OK)
        return;
    for (int32_t g = 0; g < groups.layout.n_groups; g++) {
        const kv_group_layout *group = &groups.layout.groups[g];
        (void)snprintf(buf, sizeof(buf), "KV group %" PRId32, g);
        (void)fprintf(out, "%-16s%s attention", buf,
                      attention_kind_name((attention_kind)group->kind));
        if (group->window > 0)
            (void)fprintf(out, " of %" PRId32 " tokens", group->window);
        (void)fprintf(out, ", %" PRId32 " layers\n", groups.n_layers_of[g]);
    }
}

static void put_encoder(FILE *out, const encdec_config *e)
{
    put_label(out, "encoder");
    (void)fprintf(out,
                  "%" PRId32 " layers, %" PRId32 " heads of %" PRId32
                  " values, feed-forward %" PRId32 ", input of at most %" PRId32 " tokens\n",
                  e->n_layers, e->n_heads, e->head_dim, e->ffn_dim, e->max_source);
    put_line(out, "positions", "learned");
}

static void put_config(FILE *out, const model_config *cfg)
{
    put_line(out, "name", cfg->name);
    put_line(out, "architecture", cfg->arch);
    if (cfg->is_text_part)
        put_line(out, "images", "not supported; of this model only the text part is served");
    (void)fprintf(out, "%-16s%" PRId32 "\n", "layers", cfg->n_layers);
    (void)fprintf(out, "%-16s%" PRId32 "\n", "hidden size", cfg->dim);
    (void)fprintf(
        out, "%-16s%" PRId32 " of %" PRId32 " values, %" PRId32 " for keys and values%s%s\n",
        "heads", cfg->n_heads, cfg->head_dim, cfg->n_kv_heads, cfg->qkv_bias ? ", with bias" : "",
        cfg->qk_norm      ? ", with query and key norm"
        : cfg->qk_l2_norm ? ", with query and key norm after rope"
                          : "");
    put_attention(out, cfg);
    put_ffn(out, cfg);
    (void)fprintf(out, "%-16s%" PRId32 "%s%s", "vocabulary", cfg->vocab_size,
                  cfg->scales_embed ? ", scaled embedding" : "",
                  cfg->tied_head ? ", output tied to the embedding" : "");
    if (cfg->final_soft_cap > 0)
        (void)fprintf(out, ", logits' soft cap %g", (double)cfg->final_soft_cap);
    (void)fprintf(out, "\n%-16s%" PRId32 " tokens\n", "context", cfg->max_context);
    if (cfg->is_encoder_decoder)
        put_encoder(out, &cfg->encdec);
    else
        put_rope(out, cfg);
    put_kv_groups(out, cfg);
    put_generation(out, cfg);
}

/* model.type of tokenizer.json, "?" if it cannot be read (the verdict then says why). */
static void put_tokenizer_json(FILE *out, const char *dir)
{
    char path[4096];
    cJSON *json = NULL;
    const char *type = NULL;
    if (!file_join(path, sizeof(path), dir, "tokenizer.json") || !file_exists(path)) {
        (void)fputs("none", out);
        return;
    }
    if (json_parse_file(&json, path, MAX_TOKENIZER_BYTES, NULL) == PGD_OK)
        type = json_string(json_get(json_get(json, "model"), "type"));
    (void)fputs("tokenizer.json, ", out);
    put_text(out, type != NULL ? type : "?", strlen(type != NULL ? type : "?"));
    cJSON_Delete(json);
}

static void put_tokenizer(FILE *out, const model_file *file, const tokenizer *t)
{
    const gguf_file *gguf = model_file_get_gguf(file);
    gguf_string s;
    put_label(out, "tokenizer");
    if (gguf == NULL) {
        put_tokenizer_json(out, model_file_get_dir(file));
    } else if (gguf_get_string(gguf, "tokenizer.ggml.model", &s)) {
        put_text(out, s.data, PGD_MIN(s.n_bytes, 100u));
        if (gguf_get_string(gguf, "tokenizer.ggml.pre", &s)) {
            (void)fputs(", pre-tokenizer ", out);
            put_text(out, s.data, PGD_MIN(s.n_bytes, 100u));
        }
    } else {
        (void)fputs("none", out);
    }
    if (t != NULL)
        (void)fprintf(out, ", %" PRId32 " tokens", tokenizer_vocab_size(t));
    (void)fputc('\n', out);
}

static int put_verdict(FILE *out, int status, const char *reason)
{
    (void)fputs("this build can run it: ", out);
    if (status == INSPECT_RUNNABLE) {
        (void)fputs("yes\n", out);
    } else {
        (void)fputs("no: ", out);
        put_text(out, reason, strlen(reason));
        (void)fputc('\n', out);
    }
    return status;
}

static int status_of(pgd_err err)
{
    if (err == PGD_OK)
        return INSPECT_RUNNABLE;
    return err == PGD_EUNSUPPORTED ? INSPECT_NOT_RUNNABLE : INSPECT_UNREADABLE;
}

static void put_total(FILE *out, const tensor_table *table)
{
    char buf[32];
    (void)fprintf(out, "%-16s%" PRId32 ", %.1f million parameters, %s\n", "tensors",
                  table->n_tensors, table->n_params / 1e6, bytes_text(buf, (double)table->n_bytes));
}

static int inspect_model(FILE *out, const model_file *file, pgd_err config_err,
                         const pgd_why *config_why, tensor_table *table)
{
    const model_config *cfg = model_file_get_config(file);
    const gguf_file *gguf = model_file_get_gguf(file);
    pgd_why why = *config_why;
    pgd_err err = config_err;
    tokenizer *t = NULL;
    gguf_string arch;

    if (err == PGD_OK)
        err = model_file_check_runnable(file, &why);
    if (err == PGD_OK)
        err = tokenizer_create(&t, file, &why);
    if (gguf != NULL)
        (void)fprintf(out, "%-16sGGUF version %" PRIu32 ", %" PRId32 " metadata values\n", "kind",
                      gguf_version(gguf), gguf_n_values(gguf));
    else
        put_line(out, "kind", "Hugging Face directory");
    if (cfg != NULL) {
        put_config(out, cfg);
    } else if (gguf != NULL && gguf_get_string(gguf, "general.architecture", &arch)) {
        put_label(out, "architecture");
        put_text(out, arch.data, PGD_MIN(arch.n_bytes, 100u));
        (void)fputc('\n', out);
    }
    put_tokenizer(out, file, t);
    tokenizer_destroy(t);
    for (int32_t i = 0; i < model_file_n_tensors(file); i++)
        add_tensor(table, model_file_get_tensor_at(file, i));
    put_total(out, table);
    put_tensors(out, table);
    return put_verdict(out, status_of(err), pgd_why_text(&why, err));
}

/* A safetensors file alone has no config: its tensors are listed, the verdict is fixed. */
static int inspect_safetensors(FILE *out, const char *path, tensor_table *table)
{
    safetensors_file *file;
    pgd_why why = {{0}};
    pgd_err err = safetensors_open(&file, path, &why);
    if (err != PGD_OK)
        return put_verdict(out, INSPECT_UNREADABLE, pgd_why_text(&why, err));
    put_line(out, "kind", "safetensors file");
    for (int32_t i = 0; i < safetensors_n_tensors(file); i++) {
        const safetensors_tensor *from = safetensors_get_tensor_at(file, i);
        model_tensor t = {.name = from->name,
                          .type = from->type,
                          .type_name = from->type_name,
                          .n_dims = from->n_dims,
                          .n_bytes = from->n_bytes};
        memcpy(t.dims, from->dims, sizeof(t.dims));
        add_tensor(table, &t);
    }
    put_total(out, table);
    put_tensors(out, table);
    safetensors_close(file);
    return put_verdict(
        out, INSPECT_NOT_RUNNABLE,
        "a safetensors file alone has no config; give the directory that holds it with "
        "config.json and tokenizer.json");
}

static bool has_ending(const char *path, const char *ending)
{
    size_t n_path = strlen(path);
    size_t n_ending = strlen(ending);
    return n_path >= n_ending && strcmp(path + n_path - n_ending, ending) == 0;
}

int inspect_run(const char *path, FILE *out)
{
    tensor_table table = {.rows = mem_calloc(MAX_ROWS, sizeof(tensor_row))};
    int status;
    put_line(out, "path", path);
    if (table.rows == NULL) {
        status = put_verdict(out, INSPECT_UNREADABLE, pgd_err_text(PGD_ENOMEM));
    } else if (!file_is_dir(path) && has_ending(path, ".safetensors")) {
        status = inspect_safetensors(out, path, &table);
    } else {
        model_file *file;
        pgd_err config_err;
        pgd_why config_why = {{0}};
        pgd_why why = {{0}};
        pgd_err err = model_file_open_listing(&file, path, &config_err, &config_why, &why);
        if (err == PGD_OK) {
            status = inspect_model(out, file, config_err, &config_why, &table);
            model_file_close(file);
        } else {
            status = put_verdict(out, status_of(err), pgd_why_text(&why, err));
        }
    }
    mem_free(table.rows);
    return status;
}
