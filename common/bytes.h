/* Single values out of bytes and characters.
 *
 * Numbers are taken in the machine's order, little-endian on every machine that this runs on, from
 * any alignment.
 * Thread:  any
 */
#ifndef COMMON_BYTES_H
#define COMMON_BYTES_H

#include <string.h>

#include "common/base.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "model files are little-endian");

static inline uint32_t bytes_load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline uint64_t bytes_load_u64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

/* 0 to 15, or -1. */
static inline int bytes_hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

#endif
