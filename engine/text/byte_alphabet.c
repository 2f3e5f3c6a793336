/* The byte alphabet by rule instead of by table: the bytes that are not their own character are
 * three runs. */
#include "engine/text/byte_alphabet.h"

#include "common/utf8.h"

#define FIRST_SHIFTED 0x100u
#define N_SHIFTED     68u

static bool is_own_character(uint32_t b)
{
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
}

/* Runs of shifted bytes: 00..20, 7F..A0, AD. */
size_t byte_alphabet_spell(char out[4], uint8_t byte)
{
    uint32_t cp = byte;
    if (!is_own_character(byte)) {
        cp = FIRST_SHIFTED + (byte <= 0x20   ? byte
                              : byte <= 0xA0 ? byte - 0x7Fu + 0x21u
                                             : N_SHIFTED - 1);
    }
    return utf8_encode(out, cp);
}

static int32_t byte_of(uint32_t cp)
{
    if (is_own_character(cp))
        return (int32_t)cp;
    if (cp < FIRST_SHIFTED || cp >= FIRST_SHIFTED + N_SHIFTED)
        return -1;
    uint32_t i = cp - FIRST_SHIFTED;
    return (int32_t)(i <= 0x20 ? i : i < N_SHIFTED - 1 ? i - 0x21u + 0x7Fu : 0xADu);
}

ptrdiff_t byte_alphabet_read(char *out, const char *text, size_t n_bytes)
{
    ptrdiff_t n = 0;
    for (size_t i = 0; i < n_bytes;) {
        uint32_t cp;
        size_t used;
        if (utf8_decode(&cp, &used, text + i, n_bytes - i) != UTF8_OK)
            return -1;
        int32_t byte = byte_of(cp);
        if (byte < 0)
            return -1;
        out[n++] = (char)byte;
        i += used;
    }
    return n;
}
