/* Field tables of the layout and the rules between its fields. Every sum is bounded by the tables: a
 * page has less than 2^47 bytes, a block less than 2^56. */
#include "proto/kv_layout.h"

static const wire_field SPEC_FIELDS[] = {
    W_I32(kv_layer_spec, kind, ATTENTION_FULL, ATTENTION_KIND_LAST),
    W_I32(kv_layer_spec, window, 0, INT32_MAX),
    W_I32(kv_layer_spec, token_bytes, 1, INT32_MAX),
};
const wire_record kv_layer_spec_record = {"kv_layer", SPEC_FIELDS, PGD_ARRAY_LEN(SPEC_FIELDS),
                                          sizeof(kv_layer_spec)};

static const wire_field GROUP_FIELDS[] = {
    W_I32(kv_group_layout, kind, ATTENTION_FULL, ATTENTION_KIND_LAST),
    W_I32(kv_group_layout, window, 0, INT32_MAX),
    W_I32(kv_group_layout, block_size, 1, KV_LAYOUT_MAX_BLOCK_SIZE),
};
static const wire_record GROUP_RECORD = {"kv_group", GROUP_FIELDS, PGD_ARRAY_LEN(GROUP_FIELDS),
                                         sizeof(kv_group_layout)};

static const wire_field PLACE_FIELDS[] = {
    W_I32(kv_layer_place, group, 0, PGD_MAX_KV_GROUPS - 1),
    W_I32(kv_layer_place, slot, 0, PGD_MAX_KV_LAYERS - 1),
};
static const wire_record PLACE_RECORD = {"kv_place", PLACE_FIELDS, PGD_ARRAY_LEN(PLACE_FIELDS),
                                         sizeof(kv_layer_place)};

static const wire_field LAYOUT_FIELDS[] = {
    W_INLINE_RECORDS(kv_layout, groups, n_groups, &GROUP_RECORD, 1),
    W_INLINE_RECORDS(kv_layout, layers, n_layers, &PLACE_RECORD, 1),
    W_INLINE_U64(kv_layout, page_bytes, n_slots, 1),
};
const wire_record kv_layout_record = {"kv_layout", LAYOUT_FIELDS, PGD_ARRAY_LEN(LAYOUT_FIELDS),
                                      sizeof(kv_layout)};

static bool has_window(int32_t kind)
{
    return kind == ATTENTION_SLIDING || kind == ATTENTION_CHUNKED;
}

pgd_err kv_layout_check_specs(const kv_layer_spec *specs, int32_t n_layers,
                              int32_t max_encoder_tokens, pgd_why *why)
{
    bool has_cross = false;
    for (int32_t i = 0; i < n_layers; i++) {
        has_cross |= specs[i].kind == ATTENTION_CROSS;
        if (has_window(specs[i].kind) != (specs[i].window > 0))
            return pgd_fail(why, PGD_EPROTO,
                            "KV layer %d: expected a window with sliding window and chunked local "
                            "attention alone, got %d with %s attention",
                            i, specs[i].window, attention_kind_name(specs[i].kind));
    }
    if (has_cross != (max_encoder_tokens > 0))
        return pgd_fail(why, PGD_EPROTO,
                        "KV layers: expected encoder tokens with cross attention alone, got at "
                        "most %d %s it",
                        max_encoder_tokens, has_cross ? "with" : "without");
    return PGD_OK;
}

/* A full group may hold the KV of layers that need less than it keeps. */
static bool keeps_enough(const kv_group_layout *g, const kv_layer_spec *s)
{
    if (g->kind == ATTENTION_FULL)
        return s->kind != ATTENTION_CROSS;
    return g->kind == s->kind && g->window == s->window;
}

static pgd_err check_place(const kv_layout *l, const kv_layer_spec *s, int32_t i, pgd_why *why)
{
    const kv_layer_place *p = &l->layers[i];
    if (p->group >= l->n_groups || p->slot >= l->n_slots)
        return pgd_fail(why, PGD_EPROTO,
                        "KV layer %d: expected one of %d groups and %d slots, got group %d and "
                        "slot %d",
                        i, l->n_groups, l->n_slots, p->group, p->slot);
    const kv_group_layout *g = &l->groups[p->group];
    if (!keeps_enough(g, s))
        return pgd_fail(why, PGD_EPROTO,
                        "KV layer %d: expected a group for %s attention, window %d, got group %d: "
                        "%s, window %d",
                        i, attention_kind_name(s->kind), s->window, p->group,
                        attention_kind_name(g->kind), g->window);
    uint64_t page_bytes = (uint64_t)s->token_bytes * (uint64_t)g->block_size;
    if (page_bytes != l->page_bytes[p->slot])
        return pgd_fail(why, PGD_EPROTO,
                        "KV layer %d: expected pages of %llu bytes (%d tokens of %d), got %llu at "
                        "slot %d",
                        i, (unsigned long long)page_bytes, g->block_size, s->token_bytes,
                        (unsigned long long)l->page_bytes[p->slot], p->slot);
    return PGD_OK;
}

pgd_err kv_layout_check(const kv_layout *l, const kv_layer_spec *specs, int32_t n_layers,
                        int32_t n_blocks, pgd_why *why)
{
    uint8_t users[PGD_MAX_KV_LAYERS] = {0}; /* of a slot, a bit for each group */
    static_assert(PGD_MAX_KV_GROUPS <= 8, "a bit for each group");
    if (l->n_layers != n_layers)
        return pgd_fail(why, PGD_EPROTO, "KV layout: expected places for %d layers, got %d",
                        n_layers, l->n_layers);
    for (int32_t g = 0; g < l->n_groups; g++)
        if ((int64_t)n_blocks * l->groups[g].block_size > INT32_MAX)
            return pgd_fail(why, PGD_EPROTO,
                            "KV layout: expected fewer than 2^31 tokens, got %d blocks of %d, at "
                            "group %d",
                            n_blocks, l->groups[g].block_size, g);
    for (int32_t i = 0; i < n_layers; i++) {
        PGD_TRY(check_place(l, &specs[i], i, why));
        const kv_layer_place *p = &l->layers[i];
        if (users[p->slot] & 1u << p->group)
            return pgd_fail(why, PGD_EPROTO,
                            "KV layer %d: expected a place of its own, got group %d and slot %d, "
                            "which another layer has",
                            i, p->group, p->slot);
        users[p->slot] |= (uint8_t)(1u << p->group);
    }
    return PGD_OK;
}

uint64_t kv_layout_block_bytes(const kv_layout *l)
{
    uint64_t n_bytes = 0;
    for (int32_t s = 0; s < l->n_slots; s++)
        n_bytes += l->page_bytes[s];
    return n_bytes;
}

void kv_layout_fill_limits(wire_limits *limits, const kv_layout *l)
{
    limits->n_groups = l->n_groups;
    limits->cross_groups = 0;
    for (int32_t g = 0; g < l->n_groups; g++) {
        limits->block_sizes[g] = l->groups[g].block_size;
        if (l->groups[g].kind == ATTENTION_CROSS)
            limits->cross_groups |= 1u << g;
    }
}

int32_t kv_layout_first_position(int32_t kind, int32_t window, int32_t position)
{
    if (kind == ATTENTION_SLIDING)
        return PGD_MAX(position - window + 1, 0);
    return kind == ATTENTION_CHUNKED ? position / window * window : 0;
}
