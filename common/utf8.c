/* One decoder for everybody: JSON, tokenizers and detokenizer must agree on what a malformed
 * sequence is. */
#include "common/utf8.h"

#include <string.h>

utf8_status utf8_decode(uint32_t *code, size_t *n_bytes, const char *text, size_t n_avail)
{
    const uint8_t *s = (const uint8_t *)text;
    uint8_t first = s[0];
    *n_bytes = 1;
    if (first < 0x80) {
        if (code != NULL)
            *code = first;
        return UTF8_OK;
    }
    /* Allowed range of the second byte depends on the first (table 3-7). */
    uint8_t low = 0x80, high = 0xBF;
    size_t need;
    uint32_t value;
    if (first >= 0xC2 && first <= 0xDF) {
        need = 2;
        value = first & 0x1Fu;
    } else if (first >= 0xE0 && first <= 0xEF) {
        need = 3;
        value = first & 0x0Fu;
        if (first == 0xE0)
            low = 0xA0;
        if (first == 0xED)
            high = 0x9F;
    } else if (first >= 0xF0 && first <= 0xF4) {
        need = 4;
        value = first & 0x07u;
        if (first == 0xF0)
            low = 0x90;
        if (first == 0xF4)
            high = 0x8F;
    } else {
        return UTF8_INVALID;
    }
    for (size_t i = 1; i < need; i++) {
        if (i >= n_avail) {
            *n_bytes = i;
            return UTF8_INCOMPLETE;
        }
        if (s[i] < low || s[i] > high) {
            *n_bytes = i;
            return UTF8_INVALID;
        }
        value = (value << 6) | (s[i] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    *n_bytes = need;
    if (code != NULL)
        *code = value;
    return UTF8_OK;
}

size_t utf8_encode(char out[4], uint32_t code)
{
    uint8_t *o = (uint8_t *)out;
    if (code < 0x80) {
        o[0] = (uint8_t)code;
        return 1;
    }
    if (code < 0x800) {
        o[0] = (uint8_t)(0xC0 | (code >> 6));
        o[1] = (uint8_t)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        o[0] = (uint8_t)(0xE0 | (code >> 12));
        o[1] = (uint8_t)(0x80 | ((code >> 6) & 0x3F));
        o[2] = (uint8_t)(0x80 | (code & 0x3F));
        return 3;
    }
    o[0] = (uint8_t)(0xF0 | (code >> 18));
    o[1] = (uint8_t)(0x80 | ((code >> 12) & 0x3F));
    o[2] = (uint8_t)(0x80 | ((code >> 6) & 0x3F));
    o[3] = (uint8_t)(0x80 | (code & 0x3F));
    return 4;
}

bool utf8_is_valid(const char *text, size_t n_bytes, size_t *bad_at)
{
    for (size_t i = 0; i < n_bytes;) {
        /* Eight ASCII bytes at a time: most of what comes is JSON. */
        uint64_t word;
        while (n_bytes - i >= sizeof(word)) {
            memcpy(&word, text + i, sizeof(word));
            if ((word & 0x8080808080808080u) != 0)
                break;
            i += sizeof(word);
        }
        if (i == n_bytes)
            break;
        size_t len;
        if (utf8_decode(NULL, &len, text + i, n_bytes - i) != UTF8_OK) {
            if (bad_at != NULL)
                *bad_at = i;
            return false;
        }
        i += len;
    }
    return true;
}
