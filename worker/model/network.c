/* Two kinds are few enough to name them: one of the two pointers is set. */
#include "worker/model/network.h"

#include "common/mem.h"
#include "worker/model/encdec.h"

struct network {
    decoder *decoder;
    encdec *encdec;
};

pgd_err network_create(network **out, const network_opts *opts, pgd_why *why)
{
    *out = NULL;
    network *n = mem_calloc(1, sizeof(*n));
    if (!n)
        return PGD_ENOMEM;
    const decoder_opts *d = &opts->decoder;
    encdec_opts e = {.cfg = d->cfg,
                     .w = d->w,
                     .ops = d->ops,
                     .max_rows = d->max_rows,
                     .max_seqs = d->max_seqs,
                     .max_encoder_rows = opts->max_encoder_rows};
    pgd_err err = d->cfg->is_encoder_decoder ? encdec_create(&n->encdec, &e, why)
                                             : decoder_create(&n->decoder, d, why);
    if (err != PGD_OK) {
        network_destroy(n);
        return err;
    }
    *out = n;
    return PGD_OK;
}

void network_destroy(network *n)
{
    if (!n)
        return;
    decoder_destroy(n->decoder);
    encdec_destroy(n->encdec);
    mem_free(n);
}

pgd_err network_forward(network *n, float **logits, const input_batch *batch,
                        const kv_tables *tables, const kv_cache *kv, kernel_ctx *ctx,
                        uint64_t *progress)
{
    return n->encdec ? encdec_forward(n->encdec, logits, batch, tables, kv, ctx, progress)
                     : decoder_forward(n->decoder, logits, batch, tables, kv, ctx, progress);
}

pgd_err network_prompt_logits(network *n, float **logits, const input_batch *batch, int32_t first,
                              int32_t n_rows, kernel_ctx *ctx)
{
    return n->encdec ? PGD_EUNSUPPORTED
                     : decoder_prompt_logits(n->decoder, logits, batch, first, n_rows, ctx);
}

size_t network_bytes(const network *n)
{
    return n->encdec ? encdec_bytes(n->encdec) : decoder_bytes(n->decoder);
}

size_t network_workspace_bytes(const network *n, const attention_limits *limits)
{
    return n->encdec ? encdec_workspace_bytes(n->encdec, limits) : 0;
}
