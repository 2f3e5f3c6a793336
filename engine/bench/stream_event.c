/* A recursive walk over JSON that keeps nothing: every value is either looked into or skipped, so
 * names inside strings or nested objects cannot be mistaken for those that matter (which a search
 * for "usage" would). Strings are not decoded: whether one is empty does not need it. */
#include "engine/bench/stream_event.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 64

typedef struct cursor {
    const char *at;
    const char *end;
} cursor;

static char peek(cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\n' || *c->at == '\r'))
        c->at++;
    return c->at < c->end ? *c->at : '\0';
}

static bool take(cursor *c, char wanted)
{
    if (peek(c) != wanted)
        return false;
    c->at++;
    return true;
}

/* The raw bytes between the quotes. */
static bool take_string(cursor *c, const char **text, size_t *n)
{
    if (!take(c, '"'))
        return false;
    *text = c->at;
    while (c->at < c->end && *c->at != '"')
        c->at += *c->at == '\\' ? 2 : 1;
    if (c->at >= c->end)
        return false;
    *n = (size_t)(c->at - *text);
    c->at++;
    return true;
}

/* Steps to the next member of an object whose { is taken; false at its } or at a fault, which
 * uses up the rest, so that no } is found behind it. */
static bool next_member(cursor *c, bool *is_first, const char **name, size_t *n_name)
{
    if (peek(c) == '}')
        return false;
    bool ok = *is_first || take(c, ',');
    *is_first = false;
    ok = ok && take_string(c, name, n_name) && take(c, ':');
    if (!ok)
        c->at = c->end;
    return ok;
}

static bool is_name(const char *name, size_t n, const char *wanted)
{
    return strlen(wanted) == n && memcmp(name, wanted, n) == 0;
}

static bool skip_value(cursor *c, int depth)
{
    const char *text;
    size_t n;
    char first = peek(c);
    if (first == '"')
        return take_string(c, &text, &n);
    if (first == '{' || first == '[') {
        bool is_first = true;
        if (depth == 0)
            return false;
        c->at++;
        if (first == '{') {
            while (next_member(c, &is_first, &text, &n)) {
                if (!skip_value(c, depth - 1))
                    return false;
            }
            return take(c, '}');
        }
        while (peek(c) != ']') {
            if ((!is_first && !take(c, ',')) || !skip_value(c, depth - 1))
                return false;
            is_first = false;
        }
        return take(c, ']');
    }
    text = c->at;
    while (c->at < c->end && strchr("+-.0123456789eEtruefalsn", *c->at) != NULL && *c->at != '\0')
        c->at++;
    return c->at > text;
}

static bool read_count(cursor *c, int64_t *out)
{
    char first = peek(c);
    if (first < '0' || first > '9')
        return skip_value(c, MAX_DEPTH);
    int64_t v = 0;
    for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++)
        v = v < INT64_MAX / 20 ? v * 10 + (*c->at - '0') : v;
    *out = v;
    return true;
}

/* True in *is_full for a string that is not empty. */
static bool read_text(cursor *c, bool *is_full)
{
    const char *text;
    size_t n = 0;
    if (peek(c) != '"')
        return skip_value(c, MAX_DEPTH);
    if (!take_string(c, &text, &n))
        return false;
    *is_full |= n > 0;
    return true;
}

/* True in *is_full for an array that is not empty. */
static bool read_ids(cursor *c, bool *is_full)
{
    cursor inside = *c;
    *is_full |= take(&inside, '[') && peek(&inside) != ']';
    return skip_value(c, MAX_DEPTH);
}

typedef bool (*member_fn)(cursor *c, stream_event *out, const char *name, size_t n_name);

/* Looks into an object, or skips what is none. */
static bool read_object(cursor *c, stream_event *out, member_fn fn)
{
    const char *name;
    size_t n_name;
    bool is_first = true;
    if (peek(c) != '{')
        return skip_value(c, MAX_DEPTH);
    c->at++;
    while (next_member(c, &is_first, &name, &n_name)) {
        if (!fn(c, out, name, n_name))
            return false;
    }
    return take(c, '}');
}

static bool in_delta(cursor *c, stream_event *out, const char *name, size_t n_name)
{
    if (is_name(name, n_name, "content") || is_name(name, n_name, "reasoning_content") ||
        is_name(name, n_name, "reasoning"))
        return read_text(c, &out->has_text);
    return skip_value(c, MAX_DEPTH);
}

static bool in_choice(cursor *c, stream_event *out, const char *name, size_t n_name)
{
    if (is_name(name, n_name, "text"))
        return read_text(c, &out->has_text);
    if (is_name(name, n_name, "token_ids"))
        return read_ids(c, &out->has_text);
    if (is_name(name, n_name, "finish_reason"))
        return read_text(c, &out->is_finished);
    if (is_name(name, n_name, "delta"))
        return read_object(c, out, in_delta);
    return skip_value(c, MAX_DEPTH);
}

static bool in_prompt_details(cursor *c, stream_event *out, const char *name, size_t n_name)
{
    if (is_name(name, n_name, "cached_tokens"))
        return read_count(c, &out->n_cached_tokens);
    return skip_value(c, MAX_DEPTH);
}

static bool in_usage(cursor *c, stream_event *out, const char *name, size_t n_name)
{
    if (is_name(name, n_name, "prompt_tokens"))
        return read_count(c, &out->n_prompt_tokens);
    if (is_name(name, n_name, "completion_tokens")) {
        out->has_usage = true;
        return read_count(c, &out->n_completion_tokens);
    }
    if (is_name(name, n_name, "prompt_tokens_details"))
        return read_object(c, out, in_prompt_details);
    return skip_value(c, MAX_DEPTH);
}

static bool in_error(cursor *c, stream_event *out, const char *name, size_t n_name)
{
    if (is_name(name, n_name, "message") && peek(c) == '"')
        return take_string(c, &out->error, &out->n_error_bytes);
    return skip_value(c, MAX_DEPTH);
}

static bool read_choices(cursor *c, stream_event *out)
{
    bool is_first = true;
    if (peek(c) != '[')
        return skip_value(c, MAX_DEPTH);
    c->at++;
    while (peek(c) != ']') {
        if ((!is_first && !take(c, ',')) || !read_object(c, out, in_choice))
            return false;
        is_first = false;
    }
    return take(c, ']');
}

static bool in_event(cursor *c, stream_event *out, const char *name, size_t n_name)
{
    if (is_name(name, n_name, "choices"))
        return read_choices(c, out);
    if (is_name(name, n_name, "usage"))
        return read_object(c, out, in_usage);
    if (is_name(name, n_name, "error") && peek(c) != 'n') {
        out->error = "";
        return read_object(c, out, in_error);
    }
    return skip_value(c, MAX_DEPTH);
}

bool stream_event_read(stream_event *out, const char *data, size_t n_bytes)
{
    cursor c = {data, data + n_bytes};
    *out = (stream_event){0};
    if (n_bytes == 6 && memcmp(data, "[DONE]", 6) == 0) {
        out->is_done = true;
        return true;
    }
    return peek(&c) == '{' && read_object(&c, out, in_event) && peek(&c) == '\0' && c.at == c.end;
}
