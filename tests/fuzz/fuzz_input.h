/* Reads choices from a fuzz input; beyond its end every choice is 0.
 *
 * Owns:    nothing
 */
#ifndef TESTS_FUZZ_FUZZ_INPUT_H
#define TESTS_FUZZ_FUZZ_INPUT_H

#include <string.h>

#include "common/base.h"
#include "common/log.h"

typedef struct fuzz_input {
    const uint8_t *data;
    size_t n_bytes;
    size_t at;
} fuzz_input;

static inline bool fuzz_more(const fuzz_input *in)
{
    return in->at < in->n_bytes;
}

static inline uint8_t fuzz_u8(fuzz_input *in)
{
    return fuzz_more(in) ? in->data[in->at++] : 0;
}

/* In [0, n), from one byte. */
static inline int32_t fuzz_below(fuzz_input *in, int32_t n)
{
    return fuzz_u8(in) % n;
}

static inline uint32_t fuzz_u32(fuzz_input *in)
{
    uint32_t v = 0;
    for (int i = 0; i < 4; i++)
        v |= (uint32_t)fuzz_u8(in) << (8 * i);
    return v;
}

/* Up to n_bytes that lie in the input; *n_got says how many. */
static inline const uint8_t *fuzz_take(fuzz_input *in, size_t n_bytes, size_t *n_got)
{
    const uint8_t *at = in->data + in->at;
    *n_got = PGD_MIN(n_bytes, in->n_bytes - in->at);
    in->at += *n_got;
    return at;
}

/* For numbers that are right most of the time: v itself unless odd is one of its last 16 values,
 * which choose something near it, an extreme, or a number from the input. */
static inline int32_t fuzz_bend(fuzz_input *in, uint8_t odd, int32_t v)
{
    switch (odd) {
    case 255:
        return (int32_t)fuzz_u32(in);
    case 254:
        return INT32_MAX;
    case 253:
        return INT32_MIN;
    case 252:
        return -1;
    case 251:
        return 0;
    case 250:
        return v < INT32_MAX ? v + 1 : v;
    case 249:
        return v > INT32_MIN ? v - 1 : v;
    case 248:
        return fuzz_u8(in);
    default:
        return odd < 240 ? v : v / 2;
    }
}

/* A level below the most severe one: nothing is logged. */
static inline void fuzz_quiet(void)
{
    log_set_level((log_level)-1);
}

#endif
