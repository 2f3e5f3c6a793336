/* Added tokens in a trie of bytes.
 *
 * The details follow Hugging Face tokenizers: a special token that is not to be parsed is stepped
 * over as a whole (nothing is looked for inside it), so is one that fails single_word; the search
 * goes on at the end of the match proper, not of the white space that rstrip took.
 *
 * Rejected: Aho-Corasick. Linear for any set, but it needs failure links for every node, and the
 * sets have short tokens that share few first bytes; the depth is bounded instead.
 */
#include "engine/text/added_tokens.h"

#include <string.h>

#include "common/mem.h"
#include "engine/text/unicode_class.h"

void added_tokens_deinit(added_tokens *a)
{
    mem_free(a->nodes);
    mem_free(a->entries);
    *a = (added_tokens){0};
}

static pgd_err grow(void **array, int32_t *cap, int32_t n, size_t elem_bytes)
{
    if (n < *cap)
        return PGD_OK;
    int32_t wanted = PGD_MAX(64, 2 * *cap);
    void *grown = n >= INT32_MAX / 2 ? NULL : mem_realloc_array(*array, (size_t)wanted, elem_bytes);
    if (grown == NULL)
        return PGD_ENOMEM;
    *array = grown;
    *cap = wanted;
    return PGD_OK;
}

/* Child of node by byte, or 0. */
static int32_t child_of(const added_tokens *a, int32_t node, uint8_t byte)
{
    if (node == 0)
        return a->first[byte];
    int32_t child = a->nodes[node].child;
    while (child != 0 && a->nodes[child].byte != byte)
        child = a->nodes[child].sibling;
    return child;
}

static pgd_err add_child(added_tokens *a, int32_t node, uint8_t byte, int32_t *out)
{
    PGD_TRY(grow((void **)&a->nodes, &a->cap_nodes, a->n_nodes, sizeof(*a->nodes)));
    int32_t child = a->n_nodes++;
    a->nodes[child] = (added_node){.entry = -1, .byte = byte};
    if (node == 0) {
        a->first[byte] = child;
    } else {
        a->nodes[child].sibling = a->nodes[node].child;
        a->nodes[node].child = child;
    }
    *out = child;
    return PGD_OK;
}

pgd_err added_tokens_add(added_tokens *a, const char *text, size_t n_bytes, token_id id,
                         added_flags flags)
{
    if (n_bytes == 0 || n_bytes > ADDED_MAX_BYTES)
        return PGD_ERANGE;
    if (a->n_nodes == 0) {
        PGD_TRY(grow((void **)&a->nodes, &a->cap_nodes, 0, sizeof(*a->nodes)));
        a->nodes[0] = (added_node){.entry = -1};
        a->n_nodes = 1;
    }
    PGD_TRY(grow((void **)&a->entries, &a->cap_entries, a->n_entries, sizeof(*a->entries)));
    int32_t node = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        int32_t child = child_of(a, node, (uint8_t)text[i]);
        if (child == 0)
            PGD_TRY(add_child(a, node, (uint8_t)text[i], &child));
        node = child;
    }
    if (a->nodes[node].entry < 0) {
        a->nodes[node].entry = a->n_entries;
        a->entries[a->n_entries++] = (added_entry){id, flags};
        a->strips = a->strips || flags.lstrip || flags.rstrip;
    }
    return PGD_OK;
}

token_id added_tokens_find(const added_tokens *a, const char *text, size_t n_bytes)
{
    int32_t node = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        node = child_of(a, node, (uint8_t)text[i]);
        if (node == 0)
            return -1;
    }
    return node == 0 || a->nodes[node].entry < 0 ? -1 : a->entries[a->nodes[node].entry].id;
}

void added_iter_begin(added_iter *it, const added_tokens *a, const char *text, size_t n_bytes,
                      bool parse_special)
{
    *it =
        (added_iter){.tokens = a, .text = text, .n_bytes = n_bytes, .parse_special = parse_special};
}

/* The longest token that begins at `at`, and its end; -1 if none. */
static int32_t longest_at(const added_iter *it, size_t at, size_t *end)
{
    const added_tokens *a = it->tokens;
    int32_t best = -1;
    int32_t node = 0;
    for (size_t i = at; i < it->n_bytes; i++) {
        node = child_of(a, node, (uint8_t)it->text[i]);
        if (node == 0)
            break;
        if (a->nodes[node].entry >= 0) {
            best = a->nodes[node].entry;
            *end = i + 1;
        }
    }
    return best;
}

/* Class of the character that ends at `end` (0 at the start of the text), and where it begins. */
static unsigned class_before(const added_iter *it, size_t end, size_t *start)
{
    if (end == 0) {
        *start = 0;
        return 0;
    }
    size_t at = end - 1;
    while (at > 0 && end - at < 4 && ((uint8_t)it->text[at] & 0xC0) == 0x80)
        at--;
    size_t used;
    int32_t cp = unicode_decode(it->text + at, end - at, &used);
    if (at + used != end) {
        at = end - 1;
        cp = -1;
    }
    *start = at;
    return unicode_class(cp);
}

static unsigned class_after(const added_iter *it, size_t at, size_t *end)
{
    if (at >= it->n_bytes) {
        *end = at;
        return 0;
    }
    size_t used;
    int32_t cp = unicode_decode(it->text + at, it->n_bytes - at, &used);
    *end = at + used;
    return unicode_class(cp);
}

static bool is_taken(const added_iter *it, const added_entry *e, size_t start, size_t end)
{
    size_t ignored;
    if (e->flags.special && !it->parse_special)
        return false;
    return !e->flags.single_word || (!(class_before(it, start, &ignored) & UNICODE_WORD) &&
                                     !(class_after(it, end, &ignored) & UNICODE_WORD));
}

/* Widens a match by the white space that its flags take; what was returned before stays. */
static void widen(const added_iter *it, const added_entry *e, added_part *part)
{
    size_t next;
    while (e->flags.lstrip && part->start > it->done &&
           (class_before(it, part->start, &next) & UNICODE_SPACE))
        part->start = PGD_MAX(next, it->done);
    while (e->flags.rstrip && (class_after(it, part->end, &next) & UNICODE_SPACE))
        part->end = next;
}

static bool find_match(added_iter *it, added_part *out)
{
    while (it->search < it->n_bytes) {
        size_t at = it->search;
        if (it->tokens->first[(uint8_t)it->text[at]] == 0) {
            it->search++;
            continue;
        }
        size_t end = at;
        int32_t entry = longest_at(it, at, &end);
        if (entry < 0) {
            it->search++;
            continue;
        }
        it->search = end;
        const added_entry *e = &it->tokens->entries[entry];
        if (is_taken(it, e, at, end)) {
            *out = (added_part){e->id, at, end};
            widen(it, e, out);
            return true;
        }
    }
    return false;
}

bool added_iter_next(added_iter *it, added_part *out)
{
    if (it->has_pending) {
        it->has_pending = false;
        it->done = it->pending.end;
        *out = it->pending;
        return true;
    }
    if (it->tokens->n_entries > 0 && find_match(it, &it->pending)) {
        if (it->pending.start > it->done) {
            it->has_pending = true;
            *out = (added_part){-1, it->done, it->pending.start};
        } else {
            it->done = it->pending.end;
            *out = it->pending;
        }
        return true;
    }
    if (it->done >= it->n_bytes)
        return false;
    *out = (added_part){-1, it->done, it->n_bytes};
    it->done = it->n_bytes;
    return true;
}
