/* Merging with a heap of candidates over a linked list of symbols.
 *
 * Each merge creates at most two new candidates, so the heap never holds more than twice the
 * symbols and its memory is set aside once per word. Candidates are not removed when one of their
 * symbols changes; they are recognised as stale when popped. The test for that is the one Hugging
 * Face tokenizers uses (the pair now at that place would give the same id), since in rare
 * vocabularies it decides the result.
 *
 * Rejected: rescanning the word for the best pair after each merge: quadratic, seconds for a 100 KB
 * word.
 */
#include "engine/text/bpe.h"

#include "common/mem.h"

#define MAX_RULES   (1 << 24)
#define MAX_SYMBOLS (1 << 29)
#define FREE_SLOT   UINT32_MAX
#define HEAP_ARITY  8 /* a shallow heap: fewer cache misses in megabyte words */

void bpe_rules_deinit(bpe_rules *r)
{
    mem_free(r->slots);
    *r = (bpe_rules){0};
}

pgd_err bpe_rules_reserve(bpe_rules *r, int32_t n_rules)
{
    PGD_ASSERT(r->slots == NULL);
    if (n_rules < 0 || n_rules > MAX_RULES)
        return PGD_ERANGE;
    r->n_slots = 16;
    while (r->n_slots / 2 < (uint32_t)n_rules)
        r->n_slots *= 2;
    r->slots = mem_alloc((size_t)r->n_slots * sizeof(*r->slots));
    if (r->slots == NULL)
        return PGD_ENOMEM;
    for (uint32_t i = 0; i < r->n_slots; i++)
        r->slots[i].left = FREE_SLOT;
    r->cap_rules = n_rules;
    return PGD_OK;
}

static uint32_t find_slot(const bpe_rules *r, uint32_t left, uint32_t right)
{
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u;
    uint32_t mask = r->n_slots - 1;
    uint32_t i = (uint32_t)(h >> 32) & mask;
    while (r->slots[i].left != FREE_SLOT &&
           (r->slots[i].left != left || r->slots[i].right != right))
        i = (i + 1) & mask;
    return i;
}

void bpe_rules_add(bpe_rules *r, token_id left, token_id right, uint32_t rank, token_id merged)
{
    PGD_ASSERT(left >= 0 && right >= 0 && merged >= 0);
    uint32_t slot = find_slot(r, (uint32_t)left, (uint32_t)right);
    if (r->slots[slot].left == FREE_SLOT) {
        PGD_ASSERT(r->n_rules < r->cap_rules);
        r->n_rules++;
    }
    r->slots[slot] = (bpe_rule){(uint32_t)left, (uint32_t)right, rank, (uint32_t)merged};
}

const bpe_rule *bpe_rules_find(const bpe_rules *r, token_id left, token_id right)
{
    if (left < 0 || right < 0 || r->slots == NULL)
        return NULL;
    const bpe_rule *rule = &r->slots[find_slot(r, (uint32_t)left, (uint32_t)right)];
    return rule->left == FREE_SLOT ? NULL : rule;
}

void bpe_work_deinit(bpe_work *w)
{
    mem_free(w->symbols);
    mem_free(w->heap);
    *w = (bpe_work){0};
}

pgd_err bpe_work_begin(bpe_work *w, size_t n_symbols)
{
    w->n_symbols = 0;
    w->n_heap = 0;
    if (n_symbols > MAX_SYMBOLS)
        return PGD_ERANGE;
    if (n_symbols <= (size_t)w->cap_symbols)
        return PGD_OK;
    size_t cap = PGD_MAX(n_symbols, 256);
    bpe_symbol *symbols = mem_realloc_array(w->symbols, cap, sizeof(*symbols));
    if (symbols == NULL)
        return PGD_ENOMEM;
    w->symbols = symbols;
    bpe_candidate *heap = mem_realloc_array(w->heap, 2 * cap, sizeof(*heap));
    if (heap == NULL)
        return PGD_ENOMEM;
    w->heap = heap;
    w->cap_symbols = (int32_t)cap;
    w->cap_heap = (int32_t)(2 * cap);
    return PGD_OK;
}

void bpe_work_add(bpe_work *w, token_id id, size_t at, size_t n_bytes)
{
    PGD_ASSERT(w->n_symbols < w->cap_symbols && n_bytes > 0);
    int32_t i = w->n_symbols++;
    w->symbols[i] = (bpe_symbol){id, i - 1, -1, (uint32_t)at, (uint32_t)n_bytes};
    if (i > 0)
        w->symbols[i - 1].next = i;
}

static void sift_down(bpe_candidate *heap, int32_t n, int32_t i)
{
    bpe_candidate moving = heap[i];
    for (;;) {
        int32_t first = HEAP_ARITY * i + 1;
        if (first >= n)
            break;
        int32_t best = first;
        int32_t end = PGD_MIN(first + HEAP_ARITY, n);
        for (int32_t child = first + 1; child < end; child++)
            best = heap[child].key < heap[best].key ? child : best;
        if (heap[best].key >= moving.key)
            break;
        heap[i] = heap[best];
        i = best;
    }
    heap[i] = moving;
}

void bpe_heap_append(bpe_work *w, uint64_t key, uint32_t tag)
{
    PGD_ASSERT(w->n_heap < w->cap_heap);
    w->heap[w->n_heap++] = (bpe_candidate){key, tag};
}

void bpe_heap_order(bpe_work *w)
{
    if (w->n_heap < 2)
        return;
    for (int32_t i = (w->n_heap - 2) / HEAP_ARITY; i >= 0; i--)
        sift_down(w->heap, w->n_heap, i);
}

void bpe_heap_push(bpe_work *w, uint64_t key, uint32_t tag)
{
    bpe_heap_append(w, key, tag);
    int32_t i = w->n_heap - 1;
    bpe_candidate moving = w->heap[i];
    while (i > 0 && w->heap[(i - 1) / HEAP_ARITY].key > moving.key) {
        w->heap[i] = w->heap[(i - 1) / HEAP_ARITY];
        i = (i - 1) / HEAP_ARITY;
    }
    w->heap[i] = moving;
}

bool bpe_heap_pop(bpe_work *w, bpe_candidate *out)
{
    if (w->n_heap == 0)
        return false;
    *out = w->heap[0];
    w->heap[0] = w->heap[--w->n_heap];
    if (w->n_heap > 1)
        sift_down(w->heap, w->n_heap, 0);
    return true;
}

void bpe_work_join(bpe_work *w, int32_t i, token_id id)
{
    bpe_symbol *left = &w->symbols[i];
    bpe_symbol *right = &w->symbols[left->next];
    left->id = id;
    left->n_bytes += right->n_bytes;
    right->n_bytes = 0;
    left->next = right->next;
    if (left->next >= 0)
        w->symbols[left->next].prev = i;
}

/* The candidate of symbol i and its right neighbour: key = rank, then place; tag = the id it gives.
 */
static const bpe_rule *rule_at(const bpe_work *w, const bpe_rules *r, int32_t i, uint64_t *key)
{
    int32_t next = w->symbols[i].next;
    if (next < 0)
        return NULL;
    const bpe_rule *rule = bpe_rules_find(r, w->symbols[i].id, w->symbols[next].id);
    if (rule != NULL)
        *key = (uint64_t)rule->rank << 32 | (uint32_t)i;
    return rule;
}

void bpe_merge(bpe_work *w, const bpe_rules *r)
{
    uint64_t key;
    const bpe_rule *rule;
    for (int32_t i = 0; i < w->n_symbols; i++) {
        rule = rule_at(w, r, i, &key);
        if (rule != NULL)
            bpe_heap_append(w, key, rule->merged);
    }
    bpe_heap_order(w);
    bpe_candidate best;
    while (bpe_heap_pop(w, &best)) {
        int32_t i = (int32_t)(uint32_t)best.key;
        if (w->symbols[i].n_bytes == 0)
            continue;
        rule = rule_at(w, r, i, &key);
        if (rule == NULL || rule->merged != best.tag)
            continue;
        bpe_work_join(w, i, (token_id)best.tag);
        int32_t prev = w->symbols[i].prev;
        if (prev >= 0 && (rule = rule_at(w, r, prev, &key)) != NULL)
            bpe_heap_push(w, key, rule->merged);
        if ((rule = rule_at(w, r, i, &key)) != NULL)
            bpe_heap_push(w, key, rule->merged);
    }
}
