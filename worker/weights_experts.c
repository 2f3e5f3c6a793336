/* Loading of experts: the same walk as weights.c, matrix by matrix of each expert.
 *
 * All experts of a layer have one type, as a grouped matmul wants it; only a file that keeps them
 * apart could have several. Gate and up of an expert become one matrix when their types agree and
 * the packing's row groups allow it.
 */
#include <inttypes.h>
#include <stdio.h>

#include "common/model/model_layout.h"
#include "worker/weights_internal.h"

/* Maps that are made of the rows of some parts of each expert, side by side. */
typedef struct expert_map {
    weights_experts *out;
    int32_t layer;
    int32_t n_parts;
    expert_part parts[WEIGHTS_MAX_EXPERT_PARTS];
    dtype types[WEIGHTS_MAX_EXPERT_PARTS]; /* of expert 0, hence of all */
    bool fuse;
} expert_map;

static pgd_err begin_map(expert_map *map, weights_loader *ld)
{
    expert_source first = {0};
    *map->out = (weights_experts){.n_experts = ld->cfg->n_experts};
    map->fuse = true;
    for (int32_t i = 0; i < map->n_parts; i++) {
        PGD_TRY(expert_source_find(&first, ld->file, map->layer, 0, map->parts[i], ld->why));
        map->types[i] = first.type;
        map->fuse = map->fuse && first.type == map->types[0] &&
                    map->out->n_out % ld->matmul->pack_rows == 0;
        map->out->n_in = first.n_cols;
        map->out->n_out += first.n_rows;
    }
    map->out->n_parts = map->fuse ? 1 : map->n_parts;
    for (int32_t i = 0; i < map->out->n_parts; i++)
        map->out->parts[i] = weights__take(ld, (size_t)map->out->n_experts * sizeof(packed_weight));
    return PGD_OK;
}

/* Part i of one expert, from row first_row of its packed matrix on. */
static pgd_err load_part(expert_map *map, weights_loader *ld, int32_t i, int32_t expert,
                         int32_t *first_row)
{
    expert_source source;
    dtype type = map->types[i];
    packed_weight counted, *w = &counted;
    weights_experts *out = map->out;
    char what[MODEL_LAYOUT_MAX_NAME];
    (void)snprintf(what, sizeof(what), "blk.%" PRId32 ", expert %" PRId32, map->layer, expert);
    PGD_TRY(expert_source_find(&source, ld->file, map->layer, expert, map->parts[i], ld->why));
    if (source.type != type)
        return pgd_fail(ld->why, PGD_EUNSUPPORTED,
                        "expected experts of one type, got %s and %s, at blk.%" PRId32
                        ", expert %" PRId32,
                        dtype_name(type), dtype_name(source.type), map->layer, expert);
    if (ld->data)
        w = &out->parts[map->fuse ? 0 : i][expert];
    if (!map->fuse || i == 0)
        PGD_TRY(weights__add(w, ld, type, map->fuse ? out->n_out : source.n_rows, out->n_in, what));
    else
        w->n_in = out->n_in;
    weights_rows rows = {.data = expert_source_get_rows(&source),
                         .source = &source,
                         .type = source.type,
                         .n_rows = source.n_rows,
                         .file_bytes = source.file_bytes};
    weights__pack(ld, w, &rows, map->fuse ? *first_row : 0);
    *first_row += source.n_rows;
    return PGD_OK;
}

static pgd_err load_biases(expert_map *map, weights_loader *ld)
{
    weights_experts *out = map->out;
    size_t n_values = (size_t)out->n_experts * (size_t)out->n_out;
    float *bias = weights__take(ld, n_values * sizeof(float));
    out->bias = bias;
    for (int32_t e = 0; ld->data && e < out->n_experts; e++) {
        for (int32_t i = 0; i < map->n_parts; i++) {
            PGD_TRY(expert_source_read_bias(bias, ld->file, map->layer, e, map->parts[i], ld->why));
            bias += map->parts[i] == EXPERT_PART_DOWN ? ld->cfg->dim : ld->cfg->expert_ffn_dim;
        }
    }
    return PGD_OK;
}

static pgd_err load_map(expert_map *map, weights_loader *ld)
{
    PGD_TRY(begin_map(map, ld));
    for (int32_t e = 0; e < map->out->n_experts; e++) {
        int32_t first_row = 0;
        for (int32_t i = 0; i < map->n_parts; i++)
            PGD_TRY(load_part(map, ld, i, e, &first_row));
    }
    return ld->cfg->expert_bias ? load_biases(map, ld) : PGD_OK;
}

pgd_err weights__load_experts(weights_layer *out, weights_loader *ld, int32_t layer)
{
    expert_map gate_up = {.out = &out->expert_gate_up,
                          .layer = layer,
                          .n_parts = 2,
                          .parts = {EXPERT_PART_GATE, EXPERT_PART_UP}};
    expert_map down = {
        .out = &out->expert_down, .layer = layer, .n_parts = 1, .parts = {EXPERT_PART_DOWN}};
    PGD_TRY(load_map(&gate_up, ld));
    return load_map(&down, ld);
}
