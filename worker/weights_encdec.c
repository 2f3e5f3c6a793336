/* The walk over an encoder-decoder model. Encoder and decoder layers are loaded by one function:
 * an encoder layer is a decoder layer without cross attention, of other sizes. */
#include <inttypes.h>
#include <stdio.h>

#include "common/mem.h"
#include "common/model/model_layout.h"
#include "worker/weights_internal.h"

pgd_err weights__create_encdec(encdec_weights **out, const model_config *cfg)
{
    encdec_weights *w = mem_calloc(1, sizeof(*w));
    *out = w;
    if (w == NULL)
        return PGD_ENOMEM;
    w->encoder.n_layers = cfg->encdec.n_layers;
    w->decoder.n_layers = cfg->n_layers;
    w->encoder.layers = mem_calloc((size_t)cfg->encdec.n_layers, sizeof(encdec_layer));
    w->decoder.layers = mem_calloc((size_t)cfg->n_layers, sizeof(encdec_layer));
    return w->encoder.layers != NULL && w->decoder.layers != NULL ? PGD_OK : PGD_ENOMEM;
}

void weights__destroy_encdec(encdec_weights *w)
{
    if (w == NULL)
        return;
    mem_free(w->encoder.layers);
    mem_free(w->decoder.layers);
    mem_free(w);
}

static pgd_err load_norm(encdec_norm *out, weights_loader *ld, const char *prefix, const char *what,
                         int32_t dim)
{
    char name[MODEL_LAYOUT_MAX_NAME];
    (void)snprintf(name, sizeof(name), "%s%s.weight", prefix, what);
    PGD_TRY(weights__table(&out->weight, ld, name, 1, dim));
    (void)snprintf(name, sizeof(name), "%s%s.bias", prefix, what);
    return weights__table(&out->bias, ld, name, 1, dim);
}

static pgd_err load_cross(encdec_layer *out, weights_loader *ld, const char *prefix, int32_t dim)
{
    static const char *const q[] = {"cross_attn_q"};
    static const char *const kv[] = {"cross_attn_k", "cross_attn_v"};
    static const char *const attn_out[] = {"cross_attn_output"};
    const int32_t dims[] = {dim, dim};
    PGD_TRY(weights__linear(&out->cross_q, ld, prefix, dim, 1, q, dims));
    PGD_TRY(weights__linear(&out->cross_kv, ld, prefix, dim, 2, kv, dims));
    PGD_TRY(weights__linear(&out->cross_out, ld, prefix, dim, 1, attn_out, dims));
    return load_norm(&out->cross_norm, ld, prefix, "cross_attn_output_norm", dim);
}

static pgd_err load_layer(encdec_layer *out, weights_loader *ld, const char *prefix, int32_t dim,
                          int32_t ffn_dim, bool has_cross)
{
    static const char *const qkv[] = {"attn_q", "attn_k", "attn_v"};
    static const char *const attn_out[] = {"attn_output"};
    static const char *const up[] = {"ffn_up"};
    static const char *const down[] = {"ffn_down"};
    const int32_t dims[] = {dim, dim, dim};
    PGD_TRY(weights__linear(&out->qkv, ld, prefix, dim, 3, qkv, dims));
    PGD_TRY(weights__linear(&out->attn_out, ld, prefix, dim, 1, attn_out, dims));
    PGD_TRY(load_norm(&out->attn_norm, ld, prefix, "attn_output_norm", dim));
    if (has_cross)
        PGD_TRY(load_cross(out, ld, prefix, dim));
    PGD_TRY(weights__linear(&out->up, ld, prefix, dim, 1, up, &ffn_dim));
    PGD_TRY(weights__linear(&out->down, ld, prefix, ffn_dim, 1, down, dims));
    return load_norm(&out->layer_norm, ld, prefix, "layer_output_norm", dim);
}

static pgd_err load_side(encdec_side *out, weights_loader *ld, const char *side,
                         int32_t n_positions, int32_t ffn_dim, bool has_cross)
{
    int32_t dim = weights__config(ld)->dim;
    char prefix[32];
    (void)snprintf(prefix, sizeof(prefix), "%s.position_embd.weight", side);
    PGD_TRY(weights__table(&out->positions, ld, prefix, n_positions, dim));
    (void)snprintf(prefix, sizeof(prefix), "%s.", side);
    PGD_TRY(load_norm(&out->embed_norm, ld, prefix, "token_embd_norm", dim));
    for (int32_t i = 0; i < out->n_layers; i++) {
        (void)snprintf(prefix, sizeof(prefix), "%s.blk.%" PRId32 ".", side, i);
        PGD_TRY(load_layer(&out->layers[i], ld, prefix, dim, ffn_dim, has_cross));
    }
    return PGD_OK;
}

pgd_err weights__walk_encdec(weights *w, weights_loader *ld)
{
    const model_config *cfg = weights__config(ld);
    const encdec_config *e = &cfg->encdec;
    PGD_TRY(load_side(&w->encdec->encoder, ld, "enc", e->max_source + e->position_offset,
                      e->ffn_dim, false));
    PGD_TRY(load_side(&w->encdec->decoder, ld, "dec", cfg->max_context + e->position_offset,
                      cfg->ffn_dim, true));
    if (!e->has_logits_bias)
        return PGD_OK;
    return weights__table(&w->head.bias, ld, "output.bias", 1, cfg->vocab_size);
}
