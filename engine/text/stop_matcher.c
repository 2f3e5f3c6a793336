/* Aho-Corasick over the bytes of all stop strings.
 *
 * After each byte the automaton's state is the longest end of the text that begins some stop
 * string; that end is exactly what must be held back, at most the longest string less one byte, and
 * everything before it may go. Stop strings are UTF-8, so what is held begins at a character and
 * the text let go never ends inside one.
 *
 * Of strings that end at the same byte the longest is taken. Nodes keep their children as a list
 * (stop strings branch little); a table of 256 per node would make a request with long stop strings
 * cost megabytes.
 */
#include "engine/text/stop_matcher.h"

#include <string.h>

#include "common/mem.h"

typedef struct stop_node {
    int32_t child; /* first one, 0 = none */
    int32_t sibling;
    int32_t fail;  /* longest proper end of this prefix that is a prefix too */
    int32_t depth; /* bytes of the prefix */
    int32_t match; /* longest stop string that ends here, -1 = none */
    uint8_t byte;
} stop_node;

struct stop_matcher {
    stop_node *nodes; /* [n_nodes]; nodes[0] is the root */
    int32_t n_nodes;
    int32_t state;
    size_t *n_bytes; /* [n_strings] */
    char *held;      /* [n_held], the prefix that state stands for */
    size_t n_held;
    bool include_stop;
    bool is_done;
};

static int32_t child_of(const stop_matcher *m, int32_t node, uint8_t byte)
{
    int32_t child = m->nodes[node].child;
    while (child != 0 && m->nodes[child].byte != byte)
        child = m->nodes[child].sibling;
    return child;
}

static void add_string(stop_matcher *m, const char *text, size_t n_bytes, int32_t idx)
{
    int32_t node = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        int32_t child = child_of(m, node, (uint8_t)text[i]);
        if (child == 0) {
            child = m->n_nodes++;
            m->nodes[child] = (stop_node){.sibling = m->nodes[node].child,
                                          .depth = m->nodes[node].depth + 1,
                                          .match = -1,
                                          .byte = (uint8_t)text[i]};
            m->nodes[node].child = child;
        }
        node = child;
    }
    if (m->nodes[node].match < 0)
        m->nodes[node].match = idx;
}

static int32_t step(const stop_matcher *m, int32_t state, uint8_t byte)
{
    for (;;) {
        int32_t child = child_of(m, state, byte);
        if (child != 0 || state == 0)
            return child;
        state = m->nodes[state].fail;
    }
}

/* Failure links, by depth: a node's link is set before those of its children are asked for. */
static pgd_err link_nodes(stop_matcher *m)
{
    int32_t *queue = mem_calloc((size_t)m->n_nodes, sizeof(*queue));
    if (queue == NULL)
        return PGD_ENOMEM;
    int32_t n = 1; /* queue[0] is the root */
    for (int32_t i = 0; i < n; i++) {
        int32_t node = queue[i];
        for (int32_t c = m->nodes[node].child; c != 0; c = m->nodes[c].sibling) {
            stop_node *child = &m->nodes[c];
            child->fail = node == 0 ? 0 : step(m, m->nodes[node].fail, child->byte);
            if (child->match < 0)
                child->match = m->nodes[child->fail].match;
            queue[n++] = c;
        }
    }
    mem_free(queue);
    return PGD_OK;
}

pgd_err stop_matcher_create(stop_matcher **out, const char *const *strings, const size_t *n_bytes,
                            int32_t n_strings, bool include_stop)
{
    size_t n_total = 0;
    size_t longest = 0;
    for (int32_t i = 0; i < n_strings; i++) {
        if (n_bytes[i] == 0 || !mem_add(&n_total, n_total, n_bytes[i]) || n_total >= INT32_MAX)
            return PGD_EINVAL;
        longest = PGD_MAX(longest, n_bytes[i]);
    }
    stop_matcher *m = mem_calloc(1, sizeof(*m));
    if (m == NULL)
        return PGD_ENOMEM;
    m->include_stop = include_stop;
    m->nodes = mem_calloc(n_total + 1, sizeof(*m->nodes));
    m->n_bytes = mem_calloc((size_t)PGD_MAX(n_strings, 1), sizeof(*m->n_bytes));
    m->held = mem_alloc(longest);
    if (m->nodes == NULL || m->n_bytes == NULL || m->held == NULL)
        goto fail;
    m->nodes[0].match = -1;
    m->n_nodes = 1;
    for (int32_t i = 0; i < n_strings; i++) {
        m->n_bytes[i] = n_bytes[i];
        add_string(m, strings[i], n_bytes[i], i);
    }
    if (link_nodes(m) != PGD_OK)
        goto fail;
    *out = m;
    return PGD_OK;
fail:
    stop_matcher_destroy(m);
    return PGD_ENOMEM;
}

void stop_matcher_destroy(stop_matcher *m)
{
    if (m == NULL)
        return;
    mem_free(m->nodes);
    mem_free(m->n_bytes);
    mem_free(m->held);
    mem_free(m);
}

/* Appends the first n bytes of held + text. */
static void put_front(stop_matcher *m, const char *text, size_t n, strbuf *out)
{
    size_t n_old = PGD_MIN(n, m->n_held);
    strbuf_append(out, m->held, n_old);
    strbuf_append(out, text, n - n_old);
}

int32_t stop_matcher_push(stop_matcher *m, const char *text, size_t n_bytes, strbuf *out)
{
    PGD_ASSERTF(!m->is_done, "text fed to a stop matcher after its match");
    for (size_t i = 0; i < n_bytes; i++) {
        m->state = step(m, m->state, (uint8_t)text[i]);
        int32_t match = m->nodes[m->state].match;
        if (match >= 0) {
            size_t end = m->n_held + i + 1;
            put_front(m, text, m->include_stop ? end : end - m->n_bytes[match], out);
            m->n_held = 0;
            m->is_done = true;
            return match;
        }
    }
    size_t n_all = m->n_held + n_bytes;
    size_t n_keep = (size_t)m->nodes[m->state].depth;
    put_front(m, text, n_all - n_keep, out);
    if (n_keep <= n_bytes) {
        memcpy(m->held, text + (n_bytes - n_keep), n_keep);
    } else {
        memmove(m->held, m->held + (n_all - n_keep), n_keep - n_bytes);
        memcpy(m->held + (n_keep - n_bytes), text, n_bytes);
    }
    m->n_held = n_keep;
    return -1;
}

void stop_matcher_flush(stop_matcher *m, strbuf *out)
{
    strbuf_append(out, m->held, m->n_held);
    m->n_held = 0;
    m->state = 0;
}
