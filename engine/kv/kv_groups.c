/* Layers are sorted into types (kind, window, bytes of a token), in the order in which they first
 * appear; each type is dealt out over as many groups as its layers need at g layers to a group.
 *
 * Layers that differ in nothing but the size of their pages need no dealing: one group, with a slot
 * of its own size for each. Otherwise every page must have the same size, since a slot serves layers
 * of several groups: layers with smaller pages get longer blocks.
 * One rule of our own: where g would make more groups than there may be (40 full layers and one
 * with a window), it is raised until they fit, which pads the smaller types.
 */
#include "engine/kv/kv_groups.h"

#include <stdio.h>
#include <string.h>

#include "common/log.h"

typedef struct layer_type {
    kv_layer_spec spec;
    int32_t n_layers;
    int32_t first_group;
    int32_t n_groups;
} layer_type;

typedef struct plan {
    const kv_layer_spec *layers;
    int32_t n_layers;
    const kv_groups_opts *opts;
    layer_type types[PGD_MAX_KV_GROUPS];
    int32_t n_types;
    int32_t n_layers_per_group; /* g of GR3 */
} plan;

/* What the layer's KV is kept for; windows of a model without hybrid groups save compute alone. */
static kv_layer_spec kept_spec(const plan *p, int32_t layer)
{
    kv_layer_spec s = p->layers[layer];
    if (!p->opts->is_hybrid && s.kind != ATTENTION_CROSS) {
        s.kind = ATTENTION_FULL;
        s.window = 0;
    }
    return s;
}

static bool is_kept_alike(const kv_layer_spec *a, const kv_layer_spec *b)
{
    return a->kind == b->kind && a->window == b->window;
}

static bool are_all_kept_alike(const plan *p)
{
    for (int32_t i = 1; i < p->n_layers; i++) {
        kv_layer_spec first = kept_spec(p, 0);
        kv_layer_spec s = kept_spec(p, i);
        if (!is_kept_alike(&s, &first))
            return false;
    }
    return true;
}

static void place(kv_groups *k, const plan *p, int32_t layer, int32_t group, int32_t slot)
{
    kv_group_layout *g = &k->layout.groups[group];
    k->layout.layers[layer] = (kv_layer_place){group, slot};
    k->n_layers_of[group]++;
    /* Where the group keeps more than the layer attends to, the window is there to be told. */
    if (g->kind == ATTENTION_FULL)
        g->window = PGD_MAX(g->window, p->layers[layer].window);
}

/* GR1: a slot for each layer. */
static void make_one_group(kv_groups *k, const plan *p)
{
    kv_layer_spec first = kept_spec(p, 0);
    k->layout.n_groups = 1;
    k->layout.n_slots = p->n_layers;
    k->layout.groups[0] = (kv_group_layout){first.kind, first.window, p->opts->block_size};
    for (int32_t i = 0; i < p->n_layers; i++) {
        place(k, p, i, 0, i);
        k->layout.page_bytes[i] =
            (uint64_t)p->layers[i].token_bytes * (uint64_t)p->opts->block_size;
    }
}

/* -1 when there is none. */
static int32_t find_type(const plan *p, int32_t layer)
{
    kv_layer_spec s = kept_spec(p, layer);
    for (int32_t t = 0; t < p->n_types; t++)
        if (is_kept_alike(&p->types[t].spec, &s) && p->types[t].spec.token_bytes == s.token_bytes)
            return t;
    return -1;
}

static pgd_err sort_types(plan *p, pgd_why *why)
{
    for (int32_t i = 0; i < p->n_layers; i++) {
        int32_t t = find_type(p, i);
        if (t < 0 && p->n_types == PGD_MAX_KV_GROUPS)
            return pgd_fail(why, PGD_EUNSUPPORTED,
                            "expected a model with at most %d kinds of KV layers (by attention, "
                            "window and size), got more",
                            PGD_MAX_KV_GROUPS);
        if (t < 0) {
            t = p->n_types++;
            p->types[t] = (layer_type){.spec = kept_spec(p, i)};
        }
        p->types[t].n_layers++;
    }
    return PGD_OK;
}

/* GR3. */
static void choose_group_size(plan *p)
{
    int32_t min = p->types[0].n_layers;
    int32_t max = min;
    for (int32_t t = 1; t < p->n_types; t++) {
        min = PGD_MIN(min, p->types[t].n_layers);
        max = PGD_MAX(max, p->types[t].n_layers);
    }
    p->n_layers_per_group = 2 * max < 3 * min ? max : min;
    for (;; p->n_layers_per_group++) {
        int32_t n_groups = 0;
        for (int32_t t = 0; t < p->n_types; t++) {
            p->types[t].first_group = n_groups;
            p->types[t].n_groups = PGD_CEIL_DIV(p->types[t].n_layers, p->n_layers_per_group);
            n_groups += p->types[t].n_groups;
        }
        if (n_groups <= PGD_MAX_KV_GROUPS)
            return;
    }
}

/* GR2: the largest page, and blocks that make the others as large. */
static pgd_err make_groups(kv_groups *k, const plan *p, pgd_why *why)
{
    int32_t max_bytes = 0;
    for (int32_t t = 0; t < p->n_types; t++)
        max_bytes = PGD_MAX(max_bytes, p->types[t].spec.token_bytes);
    for (int32_t t = 0; t < p->n_types; t++) {
        const layer_type *type = &p->types[t];
        int64_t block_size = (int64_t)p->opts->block_size * max_bytes / type->spec.token_bytes;
        if (max_bytes % type->spec.token_bytes != 0 || block_size > KV_LAYOUT_MAX_BLOCK_SIZE)
            return pgd_fail(why, PGD_EUNSUPPORTED,
                            "expected KV layers whose bytes per token divide the largest one's, "
                            "with blocks of at most %d tokens, got %d and %d bytes: their pages "
                            "cannot be made equal; try --disable-hybrid-kv-cache-manager",
                            KV_LAYOUT_MAX_BLOCK_SIZE, type->spec.token_bytes, max_bytes);
        for (int32_t g = 0; g < type->n_groups; g++)
            k->layout.groups[k->layout.n_groups++] =
                (kv_group_layout){type->spec.kind, type->spec.window, (int32_t)block_size};
    }
    k->layout.n_slots = p->n_layers_per_group;
    for (int32_t s = 0; s < k->layout.n_slots; s++)
        k->layout.page_bytes[s] = (uint64_t)max_bytes * (uint64_t)p->opts->block_size;
    return PGD_OK;
}

static void deal_layers(kv_groups *k, const plan *p)
{
    int32_t n_dealt[PGD_MAX_KV_GROUPS] = {0};
    for (int32_t i = 0; i < p->n_layers; i++) {
        int32_t t = find_type(p, i);
        const layer_type *type = &p->types[t];
        int32_t j = n_dealt[t]++;
        place(k, p, i, type->first_group + j % type->n_groups, j / type->n_groups);
    }
    k->n_padding = k->layout.n_groups * k->layout.n_slots - p->n_layers;
}

pgd_err kv_groups_init(kv_groups *k, const kv_layer_spec *layers, int32_t n_layers,
                       const kv_groups_opts *opts, pgd_why *why)
{
    plan p = {.layers = layers, .n_layers = n_layers, .opts = opts};
    PGD_ASSERT(n_layers >= 0 && n_layers <= PGD_MAX_KV_LAYERS);
    memset(k, 0, sizeof *k);
    k->max_encoder_tokens = opts->max_encoder_tokens;
    k->layout.n_layers = n_layers;
    PGD_TRY(kv_layout_check_specs(layers, n_layers, opts->max_encoder_tokens, why));
    if (n_layers == 0)
        return PGD_OK;
    if (are_all_kept_alike(&p)) {
        make_one_group(k, &p);
    } else {
        PGD_TRY(sort_types(&p, why));
        choose_group_size(&p);
        PGD_TRY(make_groups(k, &p, why));
        deal_layers(k, &p);
    }
    return kv_layout_check(&k->layout, layers, n_layers, 1, why);
}

/* --- sizes ------------------------------------------------------------------------------------ */

kv_group_spec kv_groups_spec(const kv_groups *k, int32_t group)
{
    const kv_group_layout *g = &k->layout.groups[group];
    kv_group_spec spec = {.ops = kv_group_ops_of((attention_kind)g->kind),
                          .block_size = g->block_size};
    if (g->kind == ATTENTION_CROSS)
        spec.window = k->max_encoder_tokens;
    else if (g->kind != ATTENTION_FULL)
        spec.window = g->window;
    return spec;
}

int32_t kv_groups_n_blocks_of(const kv_groups *k, int32_t group, int32_t n_tokens,
                              const kv_groups_load *load)
{
    kv_group_spec spec = kv_groups_spec(k, group);
    int32_t n_held = spec.ops->is_of_encoder ? k->max_encoder_tokens : n_tokens;
    int32_t n = n_held / spec.block_size + (n_held % spec.block_size != 0);
    if (spec.ops->max_held_blocks == NULL)
        return n;
    return PGD_MIN(
        n, spec.ops->max_held_blocks(&spec, load->max_unfinished_tokens, load->max_model_len));
}

int64_t kv_groups_n_blocks_for(const kv_groups *k, int32_t n_tokens, const kv_groups_load *load)
{
    int64_t n_blocks = 0;
    for (int32_t g = 0; g < k->layout.n_groups; g++)
        n_blocks += kv_groups_n_blocks_of(k, g, n_tokens, load);
    return n_blocks;
}

int32_t kv_groups_max_len(const kv_groups *k, int32_t n_blocks, const kv_groups_load *load)
{
    int32_t fits = 0; /* fits <= answer < too_long */
    int64_t too_long = (int64_t)load->max_model_len + 1;
    while (too_long - fits > 1) {
        int32_t middle = (int32_t)((fits + too_long) / 2);
        if (kv_groups_n_blocks_for(k, middle, load) <= n_blocks - 1)
            fits = middle;
        else
            too_long = middle;
    }
    return fits;
}

double kv_groups_concurrency(const kv_groups *k, int32_t n_blocks, const kv_groups_load *load)
{
    int64_t n_each = kv_groups_n_blocks_for(k, load->max_model_len, load);
    return n_each > 0 ? (double)(n_blocks - 1) / (double)n_each : 0;
}
