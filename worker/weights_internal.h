/* What the loading of one kind of model takes from weights.c. Each function is called twice: to
 * count, then to fill; what it gives is a place in the weights' one block, NULL while counting.
 *
 * Thread:  the worker's main thread
 */
#ifndef WORKER_WEIGHTS_INTERNAL_H
#define WORKER_WEIGHTS_INTERNAL_H

#include "common/model/expert_source.h"
#include "worker/weights.h"

typedef struct weights_loader {
    const model_file *file;
    const model_config *cfg;
    const matmul_impl *matmul;
    cpu_pool *pool;
    weights_progress_fn progress;
    void *progress_arg;
    pgd_why *why;
    uint8_t *data;        /* NULL: only count */
    size_t n_bytes;       /* handed out so far */
    uint8_t *scratch;     /* [n_threads, scratch_bytes] */
    size_t scratch_bytes; /* what reading a chunk of rows takes at most */
    uint64_t done_bytes;
    uint64_t total_bytes;
} weights_loader;

const model_config *weights__config(const weights_loader *ld);
/* [n_rows, n_cols] as f32; n_rows 1 for vectors. */
PGD_MUST_USE pgd_err weights__table(const float **out, weights_loader *ld, const char *name,
                                    int64_t n_rows, int64_t n_cols);
/* Tensors `<prefix><what[i]>.weight` [n_outs[i], n_in] and their biases as one map. */
PGD_MUST_USE pgd_err weights__linear(weights_linear *out, weights_loader *ld, const char *prefix,
                                     int32_t n_in, int32_t n_names, const char *const *what,
                                     const int32_t *n_outs);

/* weights_encdec.c: all of an encoder-decoder model but the embedding and the head's matrix. */
PGD_MUST_USE pgd_err weights__create_encdec(encdec_weights **out, const model_config *cfg);
void weights__destroy_encdec(encdec_weights *w);
PGD_MUST_USE pgd_err weights__walk_encdec(weights *w, weights_loader *ld);

/* The rows of a matrix: in the file one after the other, or to be read from source. */
typedef struct weights_rows {
    const uint8_t *data; /* NULL: source */
    const expert_source *source;
    dtype type;
    int32_t n_rows;
    size_t file_bytes;
} weights_rows;

/* n_bytes, 64-byte aligned; NULL while counting. */
void *weights__take(weights_loader *ld, size_t n_bytes);
void weights__advance(weights_loader *ld, size_t n_bytes);
/* A place for a packed matrix; what: for the message. */
PGD_MUST_USE pgd_err weights__add(packed_weight *out, weights_loader *ld, dtype type, int32_t n_out,
                                  int32_t n_in, const char *what);
/* Packs rows from first_row of w on, on all threads; while counting, notes the scratch it needs. */
void weights__pack(weights_loader *ld, packed_weight *w, const weights_rows *rows,
                   int32_t first_row);
/* weights_experts.c: the expert maps of a layer. */
PGD_MUST_USE pgd_err weights__load_experts(weights_layer *out, weights_loader *ld, int32_t layer);

#endif
