/* Text to token ids and back, from a GGUF's metadata or a tokenizer.json.
 *
 * Byte-level BPE (GPT-2, Llama 3, Qwen2, SmolLM pre-tokenizers) and SentencePiece-BPE with byte
 * fallback. Ids equal those of Hugging Face tokenizers. Encoding is near-linear in the text's
 * length and takes no lock.
 *
 * A byte-level vocabulary without a normalizer and with a token for each of the 256 bytes gives any
 * text back exactly. (SmolLM2's lacks some bytes, control characters among them; they are left out
 * of the ids, as the reference does.)
 *
 * Owns:    its tables; nothing of the model file is kept after create
 * Thread:  create from one thread; encode and the getters from any
 * Errors:  PGD_EFORMAT (damaged vocabulary), PGD_EUNSUPPORTED (a kind this build lacks, by name)
 */
#ifndef ENGINE_TEXT_TOKENIZER_H
#define ENGINE_TEXT_TOKENIZER_H

#include "common/model/model_file.h"

typedef struct tokenizer tokenizer;

enum {
    TOKENIZER_ADD_SPECIAL = 1,  /* BOS and EOS as the model asks for */
    TOKENIZER_PARSE_SPECIAL = 2 /* special tokens written in the text become their ids */
};

/* From whichever of the two below the model has. A directory without bos or eos of its own takes
 * the model_config's. */
PGD_MUST_USE pgd_err tokenizer_create(tokenizer **out, const model_file *file, pgd_why *why);
/* From dir's tokenizer.json and, if there, tokenizer_config.json. */
PGD_MUST_USE pgd_err tokenizer_create_from_dir(tokenizer **out, const char *dir, pgd_why *why);
/* From the tokenizer.ggml.* metadata. */
PGD_MUST_USE pgd_err tokenizer_create_from_gguf(tokenizer **out, const gguf_file *file,
                                                pgd_why *why);
void tokenizer_destroy(tokenizer *t);

/* text: any bytes, NULs included; invalid UTF-8 is encoded byte by byte. *ids: mem_alloc'd
 * [*n_ids], the caller frees it with mem_free; NULL with *n_ids 0 is possible. max_ids bounds the
 * work: beyond it PGD_ERANGE (a refusal for the caller to word). */
PGD_MUST_USE pgd_err tokenizer_encode(token_id **ids, int32_t *n_ids, const tokenizer *t,
                                      const char *text, size_t n_bytes, unsigned flags,
                                      int32_t max_ids);

int32_t tokenizer_vocab_size(const tokenizer *t);
bool tokenizer_is_special(const tokenizer *t, token_id id);
/* -1 = the model has none. */
token_id tokenizer_bos_id(const tokenizer *t);
token_id tokenizer_eos_id(const tokenizer *t);
/* Id of the exact vocabulary entry (special or not), or -1. */
token_id tokenizer_find(const tokenizer *t, const char *text, size_t n_bytes);
/* The bytes that id stands for in decoded text (a SentencePiece word mark is a space; a special
 * token is its name); may be an incomplete UTF-8 sequence. Borrow until destroy; an id outside the
 * vocabulary gives "" (0 bytes). */
const char *tokenizer_piece(const tokenizer *t, token_id id, size_t *n_bytes);
/* SentencePiece with a dummy prefix: the first piece of a text loses its leading space. */
bool tokenizer_strips_first_space(const tokenizer *t);

#endif
