/* Numbers take the shortest form, as MessagePack readers of every language expect. */
#include "engine/kv/kv_event_pack.h"

#include <string.h>

#include "common/bytes.h"

#define MAX_EXTRA_KEYS 64 /* of one block; further ones are left out */

void kv_event_pack_init(kv_event_pack *p)
{
    memset(p, 0, sizeof *p);
    strbuf_init(&p->events);
    strbuf_init(&p->names);
}

void kv_event_pack_deinit(kv_event_pack *p)
{
    strbuf_deinit(&p->events);
    strbuf_deinit(&p->names);
}

void kv_event_pack_reset(kv_event_pack *p)
{
    strbuf_reset(&p->events);
    strbuf_reset(&p->names);
    p->n_events = 0;
    p->n_names = 0;
}

/* --- MessagePack ------------------------------------------------------------------------------ */

static size_t put_big(uint8_t *out, uint8_t tag, uint64_t value, size_t n_bytes)
{
    out[0] = tag;
    for (size_t i = 0; i < n_bytes; i++)
        out[1 + i] = (uint8_t)(value >> (8 * (n_bytes - 1 - i)));
    return 1 + n_bytes;
}

static void append_big(strbuf *b, uint8_t tag, uint64_t value, size_t n_bytes)
{
    uint8_t bytes[9];
    strbuf_append(b, bytes, put_big(bytes, tag, value, n_bytes));
}

static void append_uint(strbuf *b, uint64_t value)
{
    if (value < 0x80)
        strbuf_append_char(b, (char)value);
    else if (value <= UINT8_MAX)
        append_big(b, 0xcc, value, 1);
    else if (value <= UINT16_MAX)
        append_big(b, 0xcd, value, 2);
    else if (value <= UINT32_MAX)
        append_big(b, 0xce, value, 4);
    else
        append_big(b, 0xcf, value, 8);
}

static void append_nil(strbuf *b)
{
    strbuf_append_char(b, (char)0xc0);
}

static void append_array(strbuf *b, uint32_t n)
{
    if (n < 16)
        strbuf_append_char(b, (char)(0x90 | n));
    else if (n <= UINT16_MAX)
        append_big(b, 0xdc, n, 2);
    else
        append_big(b, 0xdd, n, 4);
}

static void append_text(strbuf *b, const char *text, size_t n_bytes)
{
    if (n_bytes < 32)
        strbuf_append_char(b, (char)(0xa0 | n_bytes));
    else if (n_bytes <= UINT8_MAX)
        append_big(b, 0xd9, n_bytes, 1);
    else if (n_bytes <= UINT16_MAX)
        append_big(b, 0xda, n_bytes, 2);
    else
        append_big(b, 0xdb, n_bytes, 4);
    strbuf_append(b, text, n_bytes);
}

static void append_word(strbuf *b, const char *word)
{
    append_text(b, word, strlen(word));
}

/* --- events ----------------------------------------------------------------------------------- */

static const char *kind_name(const char *attention)
{
    static const char *const names[][2] = {{"full", "full_attention"},
                                           {"sliding window", "sliding_window"},
                                           {"chunked local", "chunked_local_attention"}};
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        if (strcmp(attention, names[i][0]) == 0)
            return names[i][1];
    }
    return attention;
}

/* One part of block_hash_write_extra's form; false at the end, or where it is not of that form. */
static bool next_key(const uint8_t **at, const uint8_t *end, uint8_t *tag, const char **text,
                     uint32_t *n_bytes)
{
    size_t n_left = (size_t)(end - *at);
    if (n_left < 5)
        return false;
    *tag = (*at)[0];
    *n_bytes = bytes_load_u32(*at + 1);
    size_t n_behind = *tag == 2 ? 4 : 0;
    if (*tag < 1 || *tag > 3 || *n_bytes > n_left - 5 || n_behind > n_left - 5 - *n_bytes)
        return false;
    *text = (const char *)*at + 5;
    *at += 5 + *n_bytes + n_behind;
    return true;
}

/* The block's own extra keys: names and salts as texts, items as [id, offset]. */
static void append_block_keys(strbuf *b, const void *extra, size_t extra_bytes)
{
    const uint8_t *end = (const uint8_t *)extra + extra_bytes;
    const char *text;
    uint32_t n_bytes;
    uint32_t n_keys = 0;
    uint8_t tag;
    for (const uint8_t *at = extra; next_key(&at, end, &tag, &text, &n_bytes);)
        n_keys++;
    n_keys = PGD_MIN(n_keys, (uint32_t)MAX_EXTRA_KEYS);
    append_array(b, n_keys);
    const uint8_t *at = extra;
    for (uint32_t i = 0; i < n_keys && next_key(&at, end, &tag, &text, &n_bytes); i++) {
        if (tag == 2)
            append_array(b, 2);
        append_text(b, text, n_bytes);
        if (tag == 2) {
            int32_t offset = (int32_t)bytes_load_u32(at - 4);
            if (offset >= 0)
                append_uint(b, (uint64_t)offset);
            else
                append_big(b, 0xd2, (uint32_t)offset, 4);
        }
    }
}

static void append_extra_keys(strbuf *b, const void *extra, size_t extra_bytes, int32_t n_blocks)
{
    if (extra_bytes == 0) {
        append_nil(b);
        return;
    }
    append_array(b, (uint32_t)n_blocks);
    append_block_keys(b, extra, extra_bytes);
    for (int32_t i = 1; i < n_blocks; i++)
        append_nil(b);
}

/* An event of removed names that is being collected ends with the next event. */
static void end_removed(kv_event_pack *p)
{
    if (p->n_names == 0)
        return;
    strbuf *b = &p->events;
    append_array(b, 4);
    append_word(b, "BlockRemoved");
    append_array(b, (uint32_t)p->n_names);
    strbuf_append(b, p->names.data, p->names.n_bytes);
    append_word(b, kv_medium_name(p->medium));
    append_uint(b, (uint64_t)p->group_id);
    b->failed = b->failed || p->names.failed;
    strbuf_reset(&p->names);
    p->n_names = 0;
    p->n_events++;
}

static void begin_stored(kv_event_pack *p, uint32_t n_names)
{
    end_removed(p);
    p->n_events++;
    append_array(&p->events, 12);
    append_word(&p->events, "BlockStored");
    append_array(&p->events, n_names);
}

/* Tokens, and what stands behind them up to LoRA's name. */
static void append_middle(strbuf *b, const token_id *tokens, int32_t n_tokens, int32_t block_size,
                          kv_medium medium)
{
    append_array(b, (uint32_t)n_tokens);
    for (int32_t i = 0; i < n_tokens; i++)
        append_uint(b, (uint64_t)tokens[i]);
    append_uint(b, (uint64_t)block_size);
    append_nil(b);
    append_word(b, kv_medium_name(medium));
    append_nil(b);
}

static void append_group(strbuf *b, int32_t group_id, const char *attention, int32_t window)
{
    append_uint(b, (uint64_t)group_id);
    append_word(b, kind_name(attention));
    if (window > 0)
        append_uint(b, (uint64_t)window);
    else
        append_nil(b);
}

void kv_event_pack_stored(kv_event_pack *p, const kv_cache_event *ev, int32_t first, int32_t end)
{
    strbuf *b = &p->events;
    int32_t n_tokens = ev->n_tokens > 0 ? (end - first) * ev->block_size : 0;
    const block_hash *parent = first > 0 && ev->n_tokens > 0 ? &ev->hashes[first - 1] : ev->parent;
    begin_stored(p, (uint32_t)(end - first));
    for (int32_t i = first; i < end; i++)
        append_uint(b, kv_event_index_name(&ev->hashes[i]));
    if (parent != NULL)
        append_uint(b, kv_event_index_name(parent));
    else
        append_nil(b);
    append_middle(b, n_tokens > 0 ? ev->tokens + (size_t)first * (size_t)ev->block_size : NULL,
                  n_tokens, ev->block_size, ev->medium);
    append_extra_keys(b, ev->extra, first == 0 ? ev->extra_bytes : 0, end - first);
    append_group(b, ev->group_id, ev->attention, ev->window);
}

void kv_event_pack_entry(kv_event_pack *p, const kv_event_entry *e, kv_medium medium,
                         const char *attention, int32_t window)
{
    strbuf *b = &p->events;
    begin_stored(p, 1);
    append_uint(b, e->name);
    if (e->has_parent)
        append_uint(b, e->parent);
    else
        append_nil(b);
    append_middle(b, e->tokens, e->n_tokens, e->block_size, medium);
    append_extra_keys(b, e->tokens != NULL ? e->tokens + e->n_tokens : NULL, e->extra_bytes, 1);
    append_group(b, e->group_id, attention, window);
}

void kv_event_pack_removed(kv_event_pack *p, kv_medium medium, int32_t group_id, uint64_t name)
{
    if (p->n_names > 0 && (medium != p->medium || group_id != p->group_id))
        end_removed(p);
    p->medium = medium;
    p->group_id = group_id;
    p->n_names++;
    append_uint(&p->names, name);
}

void kv_event_pack_cleared(kv_event_pack *p)
{
    end_removed(p);
    p->n_events++;
    append_array(&p->events, 1);
    append_word(&p->events, "AllBlocksCleared");
}

size_t kv_event_pack_n_bytes(const kv_event_pack *p)
{
    return p->events.n_bytes + p->names.n_bytes + 2 * KV_EVENT_PACK_HEAD_BYTES;
}

size_t kv_event_pack_write(uint8_t *out, kv_event_pack *p, double ts, int32_t data_parallel_rank)
{
    uint64_t bits;
    size_t n = 0;
    end_removed(p);
    memcpy(&bits, &ts, sizeof bits);
    out[n++] = 0x93;
    n += put_big(out + n, 0xcb, bits, 8);
    n += put_big(out + n, 0xdd, (uint64_t)p->n_events, 4);
    if (p->events.n_bytes > 0)
        memcpy(out + n, p->events.data, p->events.n_bytes);
    n += p->events.n_bytes;
    n += put_big(out + n, 0xd2, (uint32_t)data_parallel_rank, 4);
    return n;
}
