/* The parts of a tokenizer.json, each read by its own function.
 *
 * item: the part, or NULL when absent or null.
 *
 * Thread:  one while loading
 * Errors:  PGD_EFORMAT, PGD_EUNSUPPORTED (a kind this build lacks, told by name)
 * Source:  the JSON form that Hugging Face tokenizers writes
 */
#ifndef ENGINE_TEXT_TOKENIZER_JSON_H
#define ENGINE_TEXT_TOKENIZER_JSON_H

#include "common/json.h"
#include "engine/text/tokenizer_internal.h"

PGD_MUST_USE pgd_err tokenizer_json_load_normalizer(tokenizer *t, const cJSON *item, pgd_why *why);
/* Also decides between BYTE_BPE and CHAR_BPE. */
PGD_MUST_USE pgd_err tokenizer_json_load_pretokenizer(tokenizer *t, const cJSON *item,
                                                      pgd_why *why);
PGD_MUST_USE pgd_err tokenizer_json_load_decoder(tokenizer *t, const cJSON *item, pgd_why *why);
/* Needs the vocabulary. *has_affixes: it says itself what is put before and after a text. */
PGD_MUST_USE pgd_err tokenizer_json_load_post_processor(tokenizer *t, const cJSON *item,
                                                        bool *has_affixes, pgd_why *why);
/* tokenizer_config.json: bos and eos; with takes_affixes also whether they are added. Needs the
 * vocabulary. */
PGD_MUST_USE pgd_err tokenizer_json_load_config(tokenizer *t, const cJSON *config,
                                                bool takes_affixes, pgd_why *why);

#endif
