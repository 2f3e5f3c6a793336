/* libFuzzer: a tokenizer.json. If it loads, the input itself is encoded and decoded again: ids must
 * lie in the vocabulary and the text must come out as UTF-8, whatever the vocabulary holds. */
#include <stdlib.h>

#include "common/mem.h"
#include "common/utf8.h"
#include "engine/text/detokenizer.h"
#include "engine/text/tokenizer_internal.h"

#define MAX_TEXT 512

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    tokenizer *t;
    pgd_why why = {0};
    if (tokenizer_from_json(&t, (const char *)data, n_bytes, NULL, 0, &why) != PGD_OK)
        return 0;
    token_id *ids;
    int32_t n_ids;
    pgd_err err = tokenizer_encode(&ids, &n_ids, t, (const char *)data, PGD_MIN(n_bytes, MAX_TEXT),
                                   TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, 4 * MAX_TEXT);
    if (err == PGD_OK) {
        detokenizer d;
        strbuf out;
        strbuf_init(&out);
        detokenizer_init(&d, t, false, false);
        for (int32_t i = 0; i < n_ids; i++) {
            PGD_ASSERTF(ids[i] >= 0 && ids[i] < tokenizer_vocab_size(t), "id %d of %d", ids[i],
                        tokenizer_vocab_size(t));
            detokenizer_push(&d, ids[i], &out);
        }
        detokenizer_flush(&d, &out);
        PGD_ASSERT(out.n_bytes == 0 || utf8_is_valid(out.data, out.n_bytes, NULL));
        strbuf_deinit(&out);
        mem_free(ids);
    }
    tokenizer_destroy(t);
    return 0;
}
