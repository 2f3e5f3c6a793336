/* Everything a kernel indexes with is checked here against the row and its table, once per request
 * and step; behind this the arrays are trusted. */
#include "worker/input_batch.h"

#include <inttypes.h>
#include <string.h>

#include "common/mem.h"

pgd_err input_batch_create(input_batch **out, int32_t max_rows, int32_t max_seqs)
{
    *out = NULL;
    if (max_rows < 1 || max_seqs < 1)
        return PGD_EINVAL;
    input_batch *b = mem_calloc(1, sizeof(*b));
    if (!b)
        return PGD_ENOMEM;
    b->max_rows = max_rows;
    b->max_seqs = max_seqs;
    b->ids = mem_calloc((size_t)max_rows, sizeof(*b->ids));
    b->positions = mem_calloc((size_t)max_rows, sizeof(*b->positions));
    bool has_slots = true;
    for (int32_t g = 0; g < PGD_MAX_KV_GROUPS; g++) {
        b->slots[g] = mem_calloc((size_t)max_rows, sizeof(*b->slots[g]));
        has_slots &= b->slots[g] != NULL;
    }
    b->query_start = mem_calloc((size_t)max_seqs + 1, sizeof(*b->query_start));
    b->n_context = mem_calloc((size_t)max_seqs, sizeof(*b->n_context));
    b->seq_row = mem_calloc((size_t)max_seqs, sizeof(*b->seq_row));
    b->n_encoder_tokens = mem_calloc((size_t)max_seqs, sizeof(*b->n_encoder_tokens));
    b->logit_rows = mem_calloc((size_t)max_seqs, sizeof(*b->logit_rows));
    b->logit_seqs = mem_calloc((size_t)max_seqs, sizeof(*b->logit_seqs));
    b->prompt_rows = mem_calloc((size_t)max_rows, sizeof(*b->prompt_rows));
    b->prompt_seqs = mem_calloc((size_t)max_rows, sizeof(*b->prompt_seqs));
    if (!b->ids || !b->positions || !has_slots || !b->query_start || !b->n_context || !b->seq_row ||
        !b->n_encoder_tokens || !b->logit_rows || !b->logit_seqs || !b->prompt_rows ||
        !b->prompt_seqs) {
        input_batch_destroy(b);
        return PGD_ENOMEM;
    }
    *out = b;
    return PGD_OK;
}

pgd_err input_batch_create_encoder(input_batch *b, int32_t max_rows)
{
    encoder_batch *e = &b->encoder;
    size_t n_rows = (size_t)max_rows;
    bool is_done = true;
    if (max_rows < 1)
        return PGD_EINVAL;
    e->max_rows = max_rows;
    e->ids = mem_calloc(n_rows, sizeof(*e->ids));
    e->positions = mem_calloc(n_rows, sizeof(*e->positions));
    e->start = mem_calloc((size_t)b->max_seqs + 1, sizeof(*e->start));
    e->n_keys = mem_calloc((size_t)b->max_seqs, sizeof(*e->n_keys));
    for (int32_t g = 0; g < PGD_MAX_KV_GROUPS; g++) {
        e->slots[g] = mem_calloc(n_rows, sizeof(*e->slots[g]));
        is_done &= e->slots[g] != NULL;
    }
    return is_done && e->ids && e->positions && e->start && e->n_keys ? PGD_OK : PGD_ENOMEM;
}

static void destroy_encoder(encoder_batch *e)
{
    mem_free(e->ids);
    mem_free(e->positions);
    mem_free(e->start);
    mem_free(e->n_keys);
    for (int32_t g = 0; g < PGD_MAX_KV_GROUPS; g++)
        mem_free(e->slots[g]);
}

void input_batch_destroy(input_batch *b)
{
    if (!b)
        return;
    destroy_encoder(&b->encoder);
    mem_free(b->n_encoder_tokens);
    mem_free(b->ids);
    mem_free(b->positions);
    for (int32_t g = 0; g < PGD_MAX_KV_GROUPS; g++)
        mem_free(b->slots[g]);
    mem_free(b->query_start);
    mem_free(b->n_context);
    mem_free(b->seq_row);
    mem_free(b->logit_rows);
    mem_free(b->logit_seqs);
    mem_free(b->prompt_rows);
    mem_free(b->prompt_seqs);
    mem_free(b);
}

void input_batch_reset(input_batch *b)
{
    b->n_rows = 0;
    b->n_seqs = 0;
    b->n_logit_rows = 0;
    b->n_prompt_rows = 0;
    b->query_start[0] = 0;
    b->encoder.n_rows = 0;
    b->encoder.n_seqs = 0;
}

static pgd_err check(const input_batch *b, const request_row *r, int32_t row, int32_t n_computed,
                     int32_t n_scheduled, const kv_tables *tables, pgd_why *why)
{
    uint64_t id = r->request_id;
    if (b->n_seqs == b->max_seqs || n_scheduled > b->max_rows - b->n_rows)
        return pgd_fail(why, PGD_EPROTO,
                        "expected at most %" PRId32 " requests and %" PRId32
                        " tokens in a step, got more, at request %" PRIu64,
                        b->max_seqs, b->max_rows, id);
    if (n_computed < 0 || n_scheduled < 1 || n_computed > r->n_tokens ||
        n_scheduled > r->n_tokens - n_computed)
        return pgd_fail(why, PGD_EPROTO,
                        "expected 1 scheduled token or more and at most %" PRId32
                        " computed and scheduled, got %" PRId32 " + %" PRId32
                        ", at request %" PRIu64,
                        r->n_tokens, n_computed, n_scheduled, id);
    if (n_computed > r->n_computed_tokens)
        return pgd_fail(why, PGD_EPROTO,
                        "expected at most %" PRId32 " computed tokens, got %" PRId32
                        ", at request %" PRIu64,
                        r->n_computed_tokens, n_computed, id);
    pgd_why fault;
    pgd_err err = kv_tables_check(tables, row, n_computed, n_computed + n_scheduled, &fault);
    return err == PGD_OK ? PGD_OK : pgd_fail(why, err, "%s, at request %" PRIu64, fault.text, id);
}

pgd_err input_batch_add(input_batch *b, const request_row *r, int32_t row, int32_t n_computed,
                        int32_t n_scheduled, const kv_tables *tables, pgd_why *why)
{
    PGD_TRY(check(b, r, row, n_computed, n_scheduled, tables, why));
    int32_t at = b->n_rows;
    memcpy(b->ids + at, r->tokens + n_computed, (size_t)n_scheduled * sizeof(token_id));
    for (int32_t i = 0; i < n_scheduled; i++)
        b->positions[at + i] = n_computed + i;
    for (int32_t g = 0; g < tables->n_groups; g++)
        if (tables->kinds[g] != ATTENTION_CROSS)
            block_table_fill_slots(b->slots[g] + at, tables->groups[g], row, n_computed,
                                   n_scheduled);
    b->n_rows = at + n_scheduled;
    b->n_context[b->n_seqs] = n_computed + n_scheduled;
    b->seq_row[b->n_seqs] = row;
    b->n_encoder_tokens[b->n_seqs] = r->n_encoder_tokens;
    b->query_start[++b->n_seqs] = b->n_rows;
    if (n_computed + n_scheduled == r->n_tokens) {
        b->logit_rows[b->n_logit_rows] = b->n_rows - 1;
        b->logit_seqs[b->n_logit_rows++] = row;
    }
    if (r->params.n_prompt_logprobs_per_token == 0)
        return PGD_OK;
    int32_t end = PGD_MIN(n_computed + n_scheduled, r->n_prompt_tokens - 1);
    for (int32_t p = n_computed; p < end; p++) {
        b->prompt_rows[b->n_prompt_rows] = at + p - n_computed;
        b->prompt_seqs[b->n_prompt_rows++] = row;
    }
    return PGD_OK;
}

pgd_err input_batch_add_encoder(input_batch *b, const request_row *r, int32_t row,
                                const token_id *tokens, const kv_tables *tables, pgd_why *why)
{
    encoder_batch *e = &b->encoder;
    int32_t n = r->n_encoder_tokens, at = e->n_rows;
    if (n < 1 || n > e->max_rows - at || e->n_seqs == b->max_seqs)
        return pgd_fail(why, PGD_EPROTO,
                        "expected at most %" PRId32 " encoder tokens of %" PRId32
                        " requests in a step, got more, at request %" PRIu64,
                        e->max_rows, b->max_seqs, r->request_id);
    for (int32_t g = 0; g < tables->n_groups; g++) {
        if (tables->kinds[g] != ATTENTION_CROSS)
            continue;
        if (block_table_n_positions(tables->groups[g], row) < n)
            return pgd_fail(why, PGD_EPROTO,
                            "expected blocks for %" PRId32
                            " encoder tokens, got blocks for %" PRId32 ", at request %" PRIu64,
                            n, block_table_n_positions(tables->groups[g], row), r->request_id);
        block_table_fill_slots(e->slots[g] + at, tables->groups[g], row, 0, n);
    }
    memcpy(e->ids + at, tokens, (size_t)n * sizeof(token_id));
    for (int32_t i = 0; i < n; i++)
        e->positions[at + i] = i;
    e->start[e->n_seqs] = at;
    e->n_keys[e->n_seqs++] = n;
    e->n_rows = at + n;
    e->start[e->n_seqs] = e->n_rows;
    return PGD_OK;
}
