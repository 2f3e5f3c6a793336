/* Strings in one block, found through an open-addressing index of half load.
 *
 * A slot holds 32 bits of the hash beside the id, so that a probe reads the string only when it is
 * very likely the right one. The index never grows: the number of tokens is known before the first
 * is added.
 */
#include "engine/text/vocab.h"

#include <string.h>

#include "common/mem.h"

/* Word-at-a-time multiply and mix: tokens are short and load time is made of these look-ups. */
static uint64_t hash_text(const char *text, size_t n_bytes)
{
    uint64_t h = 0x9E3779B97F4A7C15u ^ n_bytes;
    while (n_bytes > 0) {
        uint64_t word = 0;
        size_t n = PGD_MIN(n_bytes, sizeof(word));
        memcpy(&word, text, n);
        h = (h ^ word) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
        text += n;
        n_bytes -= n;
    }
    h *= 0xD6E8FEB86659FD93u;
    return h ^ h >> 29;
}

void vocab_deinit(vocab *v)
{
    mem_free(v->bytes);
    mem_free(v->offsets);
    mem_free(v->slots);
    *v = (vocab){0};
}

pgd_err vocab_reserve(vocab *v, int32_t n_tokens, size_t n_bytes)
{
    PGD_ASSERT(v->offsets == NULL);
    if (n_tokens < 0 || n_tokens > VOCAB_MAX_TOKENS || n_bytes > UINT32_MAX / 2)
        return PGD_ERANGE;
    v->n_slots = 16;
    while (v->n_slots < 2 * (uint32_t)n_tokens)
        v->n_slots *= 2;
    v->slots = mem_calloc(v->n_slots, sizeof(*v->slots));
    v->offsets = mem_calloc((size_t)n_tokens + 1, sizeof(*v->offsets));
    v->bytes = mem_alloc(n_bytes);
    if (v->slots == NULL || v->offsets == NULL || v->bytes == NULL) {
        vocab_deinit(v);
        return PGD_ENOMEM;
    }
    v->cap_bytes = (uint32_t)n_bytes;
    v->cap_tokens = n_tokens;
    return PGD_OK;
}

static bool has_text(const vocab *v, token_id id, const char *text, size_t n_bytes)
{
    uint32_t at = v->offsets[id];
    return v->offsets[id + 1] - at == n_bytes && memcmp(v->bytes + at, text, n_bytes) == 0;
}

/* The slot that holds the string, or the free one where it belongs. */
static uint32_t find_slot(const vocab *v, const char *text, size_t n_bytes, uint64_t hash)
{
    uint32_t mask = v->n_slots - 1;
    uint32_t i = (uint32_t)hash & mask;
    while (v->slots[i] != 0) {
        if (v->slots[i] >> 32 == hash >> 32 &&
            has_text(v, (token_id)(uint32_t)v->slots[i] - 1, text, n_bytes))
            return i;
        i = (i + 1) & mask;
    }
    return i;
}

pgd_err vocab_add(vocab *v, const char *text, size_t n_bytes, bool indexed)
{
    PGD_ASSERT(v->n_tokens < v->cap_tokens);
    if (n_bytes > VOCAB_MAX_TOKEN_BYTES)
        return PGD_ERANGE;
    uint32_t at = v->offsets[v->n_tokens];
    if (n_bytes > v->cap_bytes - at) {
        size_t cap = 2 * (size_t)v->cap_bytes + n_bytes;
        char *bytes = cap > UINT32_MAX / 2 ? NULL : mem_realloc_array(v->bytes, cap, 1);
        if (bytes == NULL)
            return PGD_ENOMEM;
        v->bytes = bytes;
        v->cap_bytes = (uint32_t)cap;
    }
    if (n_bytes > 0)
        memcpy(v->bytes + at, text, n_bytes);
    token_id id = v->n_tokens++;
    v->offsets[id + 1] = at + (uint32_t)n_bytes;
    if (indexed) {
        uint64_t hash = hash_text(text, n_bytes);
        uint32_t slot = find_slot(v, text, n_bytes, hash);
        if (v->slots[slot] == 0)
            v->slots[slot] = (hash >> 32) << 32 | ((uint32_t)id + 1);
        v->longest_bytes = PGD_MAX(v->longest_bytes, (int32_t)n_bytes);
    }
    return PGD_OK;
}

token_id vocab_find(const vocab *v, const char *text, size_t n_bytes)
{
    if (v->slots == NULL || n_bytes > (size_t)v->longest_bytes)
        return -1;
    uint32_t slot = find_slot(v, text, n_bytes, hash_text(text, n_bytes));
    return (token_id)(uint32_t)v->slots[slot] - 1;
}

const char *vocab_text(const vocab *v, token_id id, size_t *n_bytes)
{
    PGD_ASSERT(id >= 0 && id < v->n_tokens);
    *n_bytes = v->offsets[id + 1] - v->offsets[id];
    return v->bytes + v->offsets[id];
}
