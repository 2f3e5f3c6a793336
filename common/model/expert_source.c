/* Steps through the tensors that hold experts.
 *
 * Every form is a start and two steps: from row to row and from value to value. In
 *
 *   [experts, 2 ffn, dim]  gate and up are the halves of the rows, or every other row;
 *   [experts, dim, 2 ffn]  the same of the columns, so that a row's values are a whole line apart;
 *   blocks and scales      a block of 32 values has its 16 bytes and its scale in two tensors, two
 *                          neighbours in a byte. As MXFP4 in GGUF has it, the scale comes first and
 *                          a byte holds values j and j + 16.
 *
 * Sizes of tensors were checked against their shapes when the file was opened, shapes are checked
 * against the config here.
 */
#include "common/model/expert_source.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { BLOCK = 32, BLOCK_BYTES = 16, MAX_NAME = 64 };

static bool joins_gate_up(const model_config *cfg)
{
    return cfg->expert_form != EXPERT_FORM_STACKED && cfg->expert_form != EXPERT_FORM_APART;
}

/* "ffn_up_exps" */
static const char *module_of(const model_config *cfg, expert_part part)
{
    if (part == EXPERT_PART_DOWN)
        return "ffn_down_exps";
    if (joins_gate_up(cfg))
        return "ffn_gate_up_exps";
    return part == EXPERT_PART_GATE ? "ffn_gate_exps" : "ffn_up_exps";
}

static pgd_err find_tensor(const model_tensor **out, const model_file *file, const char *name,
                           int32_t n_dims, const int64_t dims[4], pgd_why *why)
{
    const model_tensor *t = model_file_get_tensor(file, name);
    bool has_shape = t != NULL && t->n_dims == n_dims;
    for (int32_t i = 0; has_shape && i < n_dims; i++)
        has_shape = t->dims[i] == dims[i];
    if (!has_shape)
        return pgd_fail(why, PGD_EFORMAT,
                        "expected a tensor \"%s\" of the shape that the config says, got %s", name,
                        t == NULL ? "none" : "another shape");
    *out = t;
    return PGD_OK;
}

static pgd_err find_module(const model_tensor **out, const model_file *file, int32_t layer,
                           const char *module, const char *ending, int32_t n_dims,
                           const int64_t dims[4], pgd_why *why)
{
    char name[MAX_NAME];
    (void)snprintf(name, sizeof(name), "blk.%" PRId32 ".%s.%s", layer, module, ending);
    return find_tensor(out, file, name, n_dims, dims, why);
}

static pgd_err find_apart(expert_source *s, const model_file *file, int32_t layer, int32_t expert,
                          expert_part part, pgd_why *why)
{
    static const char *const modules[] = {"ffn_gate", "ffn_up", "ffn_down"};
    const int64_t dims[4] = {s->n_rows, s->n_cols};
    const model_tensor *t = NULL;
    char name[MAX_NAME];
    (void)snprintf(name, sizeof(name), "blk.%" PRId32 ".%s.%" PRId32 ".weight", layer,
                   modules[part], expert);
    PGD_TRY(find_tensor(&t, file, name, 2, dims, why));
    s->type = t->type;
    s->data = t->data;
    s->row_step = dtype_row_bytes(t->type, s->n_cols);
    return PGD_OK;
}

/* How many rows (columns when turned) gate and up have together, where this part's begin among
 * them, and how far they are apart. */
typedef struct joint {
    int64_t n_rows;
    int64_t first;
    int64_t step;
} joint;

static joint join_of(const model_config *cfg, expert_part part, int32_t n_rows)
{
    if (part == EXPERT_PART_DOWN || !joins_gate_up(cfg))
        return (joint){n_rows, 0, 1};
    int64_t half = part == EXPERT_PART_UP ? 1 : 0;
    if (cfg->expert_interleaved)
        return (joint){2 * (int64_t)n_rows, half, 2};
    return (joint){2 * (int64_t)n_rows, half * n_rows, 1};
}

static pgd_err find_rows(expert_source *s, const model_file *file, int32_t layer, int32_t expert,
                         expert_part part, pgd_why *why)
{
    const model_config *cfg = model_file_get_config(file);
    joint j = join_of(cfg, part, s->n_rows);
    const int64_t dims[4] = {cfg->n_experts, j.n_rows, s->n_cols};
    const model_tensor *t = NULL;
    PGD_TRY(find_module(&t, file, layer, module_of(cfg, part), "weight", 3, dims, why));
    size_t row_bytes = dtype_row_bytes(t->type, s->n_cols);
    s->type = t->type;
    s->row_step = row_bytes * (size_t)j.step;
    s->data = (const uint8_t *)t->data +
              ((size_t)expert * (size_t)j.n_rows + (size_t)j.first) * row_bytes;
    return PGD_OK;
}

static pgd_err find_turned(expert_source *s, const model_file *file, int32_t layer, int32_t expert,
                           expert_part part, pgd_why *why)
{
    const model_config *cfg = model_file_get_config(file);
    joint j = join_of(cfg, part, s->n_rows);
    const int64_t dims[4] = {cfg->n_experts, s->n_cols, j.n_rows};
    const model_tensor *t = NULL;
    PGD_TRY(find_module(&t, file, layer, module_of(cfg, part), "weight", 3, dims, why));
    size_t value_bytes = dtype_row_bytes(t->type, 1);
    s->type = t->type;
    s->row_step = value_bytes * (size_t)j.step;
    s->col_step = value_bytes * (size_t)j.n_rows;
    s->data = (const uint8_t *)t->data + (size_t)expert * (size_t)s->n_cols * s->col_step +
              (size_t)j.first * value_bytes;
    if (value_bytes == 0)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected values of F32, F16 or BF16, got %s, at tensor \"%s\"",
                        t->type_name, t->name);
    return PGD_OK;
}

static pgd_err find_blocks(expert_source *s, const model_file *file, int32_t layer, int32_t expert,
                           expert_part part, pgd_why *why)
{
    const model_config *cfg = model_file_get_config(file);
    joint j = join_of(cfg, part, s->n_rows);
    int64_t n_blocks = s->n_cols / BLOCK;
    const int64_t dims[4] = {cfg->n_experts, j.n_rows, n_blocks, BLOCK_BYTES};
    const model_tensor *blocks = NULL, *scales = NULL;
    const char *module = module_of(cfg, part);
    PGD_TRY(find_module(&blocks, file, layer, module, "blocks", 4, dims, why));
    PGD_TRY(find_module(&scales, file, layer, module, "scales", 3, dims, why));
    size_t first_row = (size_t)expert * (size_t)j.n_rows + (size_t)j.first;
    size_t row_blocks = (size_t)n_blocks;
    s->type = DTYPE_MXFP4;
    s->data = (const uint8_t *)blocks->data + first_row * row_blocks * BLOCK_BYTES;
    s->scales = (const uint8_t *)scales->data + first_row * row_blocks;
    s->row_step = row_blocks * BLOCK_BYTES * (size_t)j.step;
    s->scale_step = row_blocks * (size_t)j.step;
    return PGD_OK;
}

pgd_err expert_source_find(expert_source *out, const model_file *file, int32_t layer,
                           int32_t expert, expert_part part, pgd_why *why)
{
    const model_config *cfg = model_file_get_config(file);
    bool is_down = part == EXPERT_PART_DOWN;
    PGD_ASSERT(layer >= 0 && layer < cfg->n_layers && expert >= 0 && expert < cfg->n_experts);
    *out = (expert_source){.n_rows = is_down ? cfg->dim : cfg->expert_ffn_dim,
                           .n_cols = is_down ? cfg->expert_ffn_dim : cfg->dim};
    switch (cfg->expert_form) {
    case EXPERT_FORM_APART:
        PGD_TRY(find_apart(out, file, layer, expert, part, why));
        break;
    case EXPERT_FORM_TURNED:
        PGD_TRY(find_turned(out, file, layer, expert, part, why));
        break;
    case EXPERT_FORM_MXFP4:
        PGD_TRY(find_blocks(out, file, layer, expert, part, why));
        break;
    default:
        PGD_TRY(find_rows(out, file, layer, expert, part, why));
        break;
    }
    out->file_bytes = dtype_row_bytes(out->type, out->n_cols) * (size_t)out->n_rows;
    return PGD_OK;
}

const void *expert_source_get_rows(const expert_source *source)
{
    bool is_plain = source->scales == NULL && source->col_step == 0 &&
                    source->row_step == dtype_row_bytes(source->type, source->n_cols);
    return is_plain ? source->data : NULL;
}

static void read_blocks(uint8_t *out, const uint8_t *blocks, const uint8_t *scales, int32_t n_cols)
{
    for (int32_t b = 0; b < n_cols / BLOCK; b++, blocks += BLOCK_BYTES) {
        *out++ = scales[b];
        for (int j = 0; j < BLOCK / 2; j++) {
            int low = blocks[j / 2] >> (j % 2 * 4) & 0xf;
            int high = blocks[8 + j / 2] >> (j % 2 * 4) & 0xf;
            *out++ = (uint8_t)(low | high << 4);
        }
    }
}

/* Value by value, along the lines of the file: its neighbours are of one column. */
static void read_turned(uint8_t *out, const expert_source *s, int32_t first_row, int32_t n_rows)
{
    size_t value_bytes = dtype_row_bytes(s->type, 1);
    size_t row_bytes = value_bytes * (size_t)s->n_cols;
    for (size_t k = 0; k < (size_t)s->n_cols; k++) {
        const uint8_t *from = s->data + k * s->col_step + (size_t)first_row * s->row_step;
        uint8_t *to = out + k * value_bytes;
        for (int32_t r = 0; r < n_rows; r++, from += s->row_step, to += row_bytes)
            memcpy(to, from, value_bytes);
    }
}

void expert_source_read(void *out, const expert_source *source, int32_t first_row, int32_t n_rows)
{
    const expert_source *s = source;
    uint8_t *to = out;
    PGD_ASSERT(first_row >= 0 && n_rows >= 0 && n_rows <= s->n_rows - first_row);
    if (s->col_step != 0) {
        read_turned(to, s, first_row, n_rows);
        return;
    }
    size_t row_bytes = dtype_row_bytes(s->type, s->n_cols);
    for (size_t r = (size_t)first_row; r < (size_t)(first_row + n_rows); r++, to += row_bytes) {
        if (s->scales != NULL)
            read_blocks(to, s->data + r * s->row_step, s->scales + r * s->scale_step, s->n_cols);
        else
            memcpy(to, s->data + r * s->row_step, row_bytes);
    }
}

pgd_err expert_source_read_bias(float *out, const model_file *file, int32_t layer, int32_t expert,
                                expert_part part, pgd_why *why)
{
    const model_config *cfg = model_file_get_config(file);
    int32_t n_rows = part == EXPERT_PART_DOWN ? cfg->dim : cfg->expert_ffn_dim;
    joint j = join_of(cfg, part, n_rows);
    const int64_t dims[4] = {cfg->n_experts, j.n_rows};
    const model_tensor *t = NULL;
    PGD_TRY(find_module(&t, file, layer, module_of(cfg, part), "bias", 2, dims, why));
    size_t value_bytes = dtype_row_bytes(t->type, 1);
    if (value_bytes == 0)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected values of F32, F16 or BF16, got %s, at tensor \"%s\"",
                        t->type_name, t->name);
    const uint8_t *from = (const uint8_t *)t->data +
                          ((size_t)expert * (size_t)j.n_rows + (size_t)j.first) * value_bytes;
    for (int32_t r = 0; r < n_rows; r++, from += (size_t)j.step * value_bytes)
        dtype_dequantize_row(out + r, from, 1, t->type);
    return PGD_OK;
}
