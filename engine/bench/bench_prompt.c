/* Counter-based: each number is a hash of (seed, stream, position). Streams are the request
 * numbers, the shared prefixes behind PREFIX_STREAM, and the two lengths. */
#include "engine/bench/bench_prompt.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/hash.h"

#define PREFIX_STREAM (UINT64_C(1) << 40)
#define INPUT_STREAM  (UINT64_C(2) << 40)
#define OUTPUT_STREAM (UINT64_C(3) << 40)

static uint64_t draw(int64_t seed, uint64_t stream, uint64_t n)
{
    return hash_u64(hash_u64(hash_u64((uint64_t)seed) ^ stream) + n);
}

double bench_prompt_uniform(int64_t seed, uint64_t stream, uint64_t n)
{
    return ((double)(draw(seed, stream, n) >> 11) + 0.5) * 0x1p-53;
}

static int64_t draw_length(const bench_load_opts *o, int64_t len, uint64_t stream, uint64_t which)
{
    double low = floor((double)len * (1 - o->range_ratio));
    double high = ceil((double)len * (1 + o->range_ratio));
    double u = bench_prompt_uniform(o->seed, stream, which);
    return o->range_ratio > 0 ? PGD_MAX((int64_t)(low + u * (high - low + 1)), 1) : len;
}

static void append_word(strbuf *out, uint64_t number)
{
    static const char *const words[] = {
        "time",  "year",  "people", "way",    "day",   "man",    "thing", "woman",
        "life",  "child", "world",  "school", "state", "family", "hand",  "part",
        "place", "case",  "week",   "work",   "water", "room",   "night", "point",
        "home",  "money", "story",  "month",  "right", "study",  "book",  "eye"};
    strbuf_append_str(out, words[number % PGD_ARRAY_LEN(words)]);
}

static void append_prompt(strbuf *out, const bench_load_opts *o, uint64_t which)
{
    int64_t n = PGD_MAX(draw_length(o, o->input_len, INPUT_STREAM, which), o->prefix_len);
    uint64_t prefix = PREFIX_STREAM + which % (uint64_t)PGD_MAX(o->num_prefixes, 1);
    strbuf_append_char(out, o->is_text ? '"' : '[');
    for (int64_t i = 0; i < n; i++) {
        uint64_t number = draw(o->seed, i < o->prefix_len ? prefix : which, (uint64_t)i);
        if (i > 0)
            strbuf_append_char(out, o->is_text ? ' ' : ',');
        if (o->is_text)
            append_word(out, number);
        else
            strbuf_append_int(out, (int64_t)(number % (uint64_t)o->vocab_size));
    }
    strbuf_append_char(out, o->is_text ? '"' : ']');
}

int64_t bench_prompt_write(strbuf *out, const bench_load_opts *o, uint64_t which)
{
    int64_t n_output = draw_length(o, o->output_len, OUTPUT_STREAM, which);
    strbuf_append_str(out, "{\"model\":");
    strbuf_append_json(out, o->model, strlen(o->model));
    strbuf_append_str(out, ",\"prompt\":");
    append_prompt(out, o, which);
    strbuf_appendf(out,
                   ",\"max_tokens\":%" PRId64 ",\"temperature\":%.6g,\"stream\":true,"
                   "\"stream_options\":{\"include_usage\":true}%s%s}",
                   n_output, o->temperature, o->ignore_eos ? ",\"ignore_eos\":true" : "",
                   o->with_token_ids ? ",\"return_token_ids\":true" : "");
    return n_output;
}
