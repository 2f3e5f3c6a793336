/* The rows of one expert's matrix, whatever form the file keeps experts in (expert_form).
 *
 * A matrix is [n_rows, n_cols] as the decoder wants it: gate and up [ffn, dim], down [dim, ffn].
 * Where the file has it joined with another, turned or in pieces, reading puts its rows together.
 * Owns:    nothing; borrows the file
 * Thread:  any
 * Source:  checkpoints of Mixtral, Qwen3-MoE, gpt-oss and Llama 4 in Hugging Face transformers; the
 *          GGUF specification; Open Compute MX formats 1.0 for MXFP4
 */
#ifndef COMMON_MODEL_EXPERT_SOURCE_H
#define COMMON_MODEL_EXPERT_SOURCE_H

#include "common/model/model_file.h"

typedef enum expert_part { EXPERT_PART_GATE, EXPERT_PART_UP, EXPERT_PART_DOWN } expert_part;

typedef struct expert_source {
    dtype type; /* of the rows that are read */
    int32_t n_rows;
    int32_t n_cols;
    const uint8_t *data;   /* the first value */
    const uint8_t *scales; /* MXFP4 form: the first scale */
    size_t row_step;       /* bytes from row to row, of data */
    size_t scale_step;     /* ... of scales */
    size_t col_step;       /* bytes from value to value; 0 = a row's values lie side by side */
    size_t file_bytes;     /* of the file that this matrix takes */
} expert_source;

/* PGD_EFORMAT when the tensor is absent or not of the shape that the config says. */
PGD_MUST_USE pgd_err expert_source_find(expert_source *out, const model_file *file, int32_t layer,
                                        int32_t expert, expert_part part, pgd_why *why);
/* All rows as they lie in the file, maybe unaligned; NULL when they must be read. */
const void *expert_source_get_rows(const expert_source *source);
/* out: n_rows rows of dtype_row_bytes(type, n_cols), from first_row on. */
void expert_source_read(void *out, const expert_source *source, int32_t first_row, int32_t n_rows);
/* The matrix's bias [n_rows] as f32. Only with model_config.expert_bias. */
PGD_MUST_USE pgd_err expert_source_read_bias(float *out, const model_file *file, int32_t layer,
                                             int32_t expert, expert_part part, pgd_why *why);

#endif
