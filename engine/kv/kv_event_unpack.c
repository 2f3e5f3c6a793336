/* One reader of heads: a value is its type and a number, which is itself the value, or how many bytes or
 * values follow. Arrays of numbers are walked once when an event is read, so that taking the numbers
 * later cannot fail. */
#include "engine/kv/kv_event_unpack.h"

#include <string.h>

#define MAX_DEPTH 8 /* of what is skipped */

typedef enum value_type {
    VALUE_NIL,
    VALUE_UINT,
    VALUE_OTHER, /* negative, boolean, float: the bytes behind the head are skipped */
    VALUE_TEXT,
    VALUE_BINARY,
    VALUE_ARRAY,
    VALUE_MAP
} value_type;

typedef struct value {
    value_type type;
    uint64_t n;
} value;

static pgd_err fail(pgd_why *why, const char *what)
{
    return pgd_fail(why, PGD_EPROTO, "batch of events: %s", what);
}

static bool take_big(uint64_t *out, const uint8_t **at, const uint8_t *end, size_t n_bytes)
{
    if ((size_t)(end - *at) < n_bytes)
        return false;
    *out = 0;
    for (size_t i = 0; i < n_bytes; i++)
        *out = *out << 8 | *(*at)++;
    return true;
}

/* What head bytes from 0xc0 on mean: their type, bytes of the number, bytes beside it. */
static bool take_long(value *out, uint8_t head, const uint8_t **at, const uint8_t *end)
{
    static const struct {
        uint8_t type, n_size_bytes, n_more;
    } heads[32] = {
        {VALUE_NIL, 0, 0},    {VALUE_OTHER, 0, 0},  {VALUE_OTHER, 0, 0},  {VALUE_OTHER, 0, 0},
        {VALUE_BINARY, 1, 0}, {VALUE_BINARY, 2, 0}, {VALUE_BINARY, 4, 0}, {VALUE_BINARY, 1, 1},
        {VALUE_BINARY, 2, 1}, {VALUE_BINARY, 4, 1}, {VALUE_OTHER, 0, 4},  {VALUE_OTHER, 0, 8},
        {VALUE_UINT, 1, 0},   {VALUE_UINT, 2, 0},   {VALUE_UINT, 4, 0},   {VALUE_UINT, 8, 0},
        {VALUE_OTHER, 0, 1},  {VALUE_OTHER, 0, 2},  {VALUE_OTHER, 0, 4},  {VALUE_OTHER, 0, 8},
        {VALUE_OTHER, 0, 2},  {VALUE_OTHER, 0, 3},  {VALUE_OTHER, 0, 5},  {VALUE_OTHER, 0, 9},
        {VALUE_OTHER, 0, 17}, {VALUE_TEXT, 1, 0},   {VALUE_TEXT, 2, 0},   {VALUE_TEXT, 4, 0},
        {VALUE_ARRAY, 2, 0},  {VALUE_ARRAY, 4, 0},  {VALUE_MAP, 2, 0},    {VALUE_MAP, 4, 0},
    };
    out->type = (value_type)heads[head - 0xc0].type;
    size_t n_more = heads[head - 0xc0].n_more;
    if (!take_big(&out->n, at, end, heads[head - 0xc0].n_size_bytes))
        return false;
    if (out->type == VALUE_BINARY)
        out->n += n_more;
    else if ((size_t)(end - *at) < n_more)
        return false;
    else
        *at += n_more;
    return true;
}

/* A head and the bytes of its number; a text's or binary's own bytes must be there too. */
static bool take_head(value *out, const uint8_t **at, const uint8_t *end)
{
    if (*at == end)
        return false;
    uint8_t head = *(*at)++;
    *out = (value){.type = VALUE_OTHER};
    if (head < 0x80)
        *out = (value){VALUE_UINT, head};
    else if (head < 0x90)
        *out = (value){VALUE_MAP, head & 15};
    else if (head < 0xa0)
        *out = (value){VALUE_ARRAY, head & 15};
    else if (head < 0xc0)
        *out = (value){VALUE_TEXT, head & 31};
    else if (head < 0xe0 && !take_long(out, head, at, end))
        return false;
    bool is_bytes = out->type == VALUE_TEXT || out->type == VALUE_BINARY;
    return !is_bytes || out->n <= (uint64_t)(end - *at);
}

/* Skips what belongs to a head that was taken. */
static bool skip_rest(const value *v, const uint8_t **at, const uint8_t *end, int depth)
{
    if (v->type == VALUE_TEXT || v->type == VALUE_BINARY)
        *at += v->n;
    uint64_t n = v->type == VALUE_ARRAY ? v->n : v->type == VALUE_MAP ? 2 * v->n : 0;
    if (n > 0 && depth == 0)
        return false;
    for (uint64_t i = 0; i < n; i++) {
        value inner;
        if (!take_head(&inner, at, end) || !skip_rest(&inner, at, end, depth - 1))
            return false;
    }
    return true;
}

/* --- batch ------------------------------------------------------------------------------------ */

pgd_err kv_event_unpack_begin(kv_event_unpack *u, const void *batch, size_t n_bytes, pgd_why *why)
{
    value v;
    uint64_t bits;
    u->at = batch;
    u->end = u->at + n_bytes;
    if (!take_head(&v, &u->at, u->end) || v.type != VALUE_ARRAY || v.n < 2)
        return fail(why, "expected an array of time, events and rank");
    if (u->at == u->end || *u->at++ != 0xcb || !take_big(&bits, &u->at, u->end, 8))
        return fail(why, "expected a time");
    memcpy(&u->ts, &bits, sizeof bits);
    if (!take_head(&v, &u->at, u->end) || v.type != VALUE_ARRAY || v.n > UINT32_MAX)
        return fail(why, "expected an array of events");
    u->n_left = (uint32_t)v.n;
    return PGD_OK;
}

static bool take_numbers(kv_event_numbers *out, kv_event_unpack *u)
{
    value v, number;
    if (!take_head(&v, &u->at, u->end) || v.type != VALUE_ARRAY || v.n > UINT32_MAX)
        return false;
    *out = (kv_event_numbers){.at = u->at, .n = (uint32_t)v.n};
    for (uint64_t i = 0; i < v.n; i++) {
        if (!take_head(&number, &u->at, u->end) || number.type != VALUE_UINT)
            return false;
    }
    out->end = u->at;
    return true;
}

static bool take_number(bool *is_there, uint64_t *out, kv_event_unpack *u)
{
    value v;
    if (!take_head(&v, &u->at, u->end) || (v.type != VALUE_UINT && v.type != VALUE_NIL))
        return false;
    *is_there = v.type == VALUE_UINT;
    *out = *is_there ? v.n : 0;
    return true;
}

static bool take_text(kv_event_text *out, kv_event_unpack *u)
{
    value v;
    if (!take_head(&v, &u->at, u->end) || (v.type != VALUE_TEXT && v.type != VALUE_NIL) ||
        v.n > UINT32_MAX)
        return false;
    *out = (kv_event_text){0};
    if (v.type == VALUE_TEXT)
        *out = (kv_event_text){(const char *)u->at, (uint32_t)v.n};
    u->at += v.type == VALUE_TEXT ? v.n : 0;
    return true;
}

/* Field i of an event, its tag not counted. */
static bool take_field(kv_unpacked_event *ev, kv_event_unpack *u, uint64_t i)
{
    bool is_there;
    value v;
    bool is_stored = ev->tag == KV_EVENT_TAG_STORED, is_removed = ev->tag == KV_EVENT_TAG_REMOVED;
    if ((is_stored || is_removed) && i == 0)
        return take_numbers(&ev->names, u);
    if (is_stored && i == 1)
        return take_number(&ev->has_parent, &ev->parent, u);
    if (is_stored && i == 2)
        return take_numbers(&ev->tokens, u);
    if (is_stored && i == 3)
        return take_number(&is_there, &ev->block_size, u);
    if ((is_stored && i == 5) || (is_removed && i == 1))
        return take_text(&ev->medium, u);
    if ((is_stored && i == 8) || (is_removed && i == 2))
        return take_number(&ev->has_group, &ev->group, u);
    if (is_stored && i == 9)
        return take_text(&ev->attention, u);
    if (is_stored && i == 10)
        return take_number(&is_there, &ev->window, u);
    return take_head(&v, &u->at, u->end) && skip_rest(&v, &u->at, u->end, MAX_DEPTH);
}

static kv_event_tag tag_of(const kv_event_text *t)
{
    static const char *const names[] = {"BlockStored", "BlockRemoved", "AllBlocksCleared"};
    for (int i = 0; i < (int)PGD_ARRAY_LEN(names); i++) {
        if (t->n_bytes == strlen(names[i]) && memcmp(t->text, names[i], t->n_bytes) == 0)
            return (kv_event_tag)i;
    }
    return KV_EVENT_TAG_OTHER;
}

pgd_err kv_event_unpack_next(kv_unpacked_event *out, kv_event_unpack *u, pgd_why *why)
{
    value v;
    kv_event_text tag;
    memset(out, 0, sizeof *out);
    PGD_ASSERT(u->n_left > 0);
    u->n_left--;
    if (!take_head(&v, &u->at, u->end) || v.type != VALUE_ARRAY || v.n < 1 || !take_text(&tag, u) ||
        tag.text == NULL)
        return fail(why, "expected an event: an array with a tag in front");
    out->tag = tag_of(&tag);
    for (uint64_t i = 0; i + 1 < v.n; i++) {
        if (!take_field(out, u, i))
            return fail(why, "a field of an event is cut off or of another type");
    }
    return PGD_OK;
}

bool kv_event_unpack_next_number(uint64_t *out, kv_event_numbers *n)
{
    value v;
    if (n->n == 0 || !take_head(&v, &n->at, n->end))
        return false;
    n->n--;
    *out = v.n;
    return true;
}
