/* Packing of weights into panels (matmul_internal.h draws the layout).
 *
 * Types of 5 and 6 bits become bytes; 4-bit types keep the file's bytes: byte j of a source block
 * holds values j and j + 16, so a line is just 4 source bytes of each row, and packing is a
 * transposition of 32-bit words. The K types keep their 6-bit scales beside the f16 super-block
 * scale: the product is exact in f32, so a kernel has the very scale that dequantisation has.
 * Compiled for the baseline: it runs at memory speed as it is.
 */
#include <string.h>

#include "common/mem.h"
#include "kernels/cpu/matmul_internal.h"

enum { PANEL = MATMUL_PANEL, UNIT = MATMUL_UNIT };

size_t matmul__panel_bytes(dtype type, int32_t n_in)
{
    size_t n_units = (size_t)n_in / UNIT;
    const dtype_info *info = dtype_get_info((int32_t)type);
    if (info == NULL || !info->is_weight || n_in < 0 || n_in % info->block_elems != 0)
        return 0;
    if (matmul__is_float(type))
        return (size_t)n_in * PANEL * (size_t)info->block_bytes;
    size_t supers = matmul__is_k(type) ? n_units / 8 * matmul__super_meta(type) : 0;
    if (type == DTYPE_MXFP4) /* whole lines of scales */
        return PGD_ROUND_UP(n_units * matmul__unit_bytes(type), MATMUL_META);
    return supers + n_units * matmul__unit_bytes(type);
}

size_t matmul__packed_bytes(dtype type, int32_t n_out, int32_t n_in)
{
    size_t n_bytes;
    if (n_out < 0)
        return 0;
    size_t n_panels = PGD_CEIL_DIV((size_t)n_out, PANEL);
    if (!mem_mul(&n_bytes, matmul__panel_bytes(type, n_in), n_panels))
        return 0;
    return n_bytes;
}

/* 4 bytes of values into row r's lane of line pair g. */
static void put_lane(uint8_t *lines, int g, int r, const uint8_t *values)
{
    memcpy(lines + g * 128 + r * 4, values, 4);
}

static void put_bytes(uint8_t *lines, int r, const uint8_t values[UNIT])
{
    for (int g = 0; g < 8; g++)
        put_lane(lines, g, r, values + 4 * g);
}

static void put_nibbles(uint8_t *lines, int r, const uint8_t bytes[UNIT / 2])
{
    for (int g = 0; g < 4; g++)
        put_lane(lines, g, r, bytes + 4 * g);
}

/* Row r of the idx-th line of scales. */
static void put_f16(uint8_t *meta, int idx, int r, const uint8_t *f16)
{
    memcpy(meta + idx * MATMUL_META + r * 2, f16, 2);
}

/* Values 0..31 of a Q5_0 or Q5_1 block from its high bits and nibbles. */
static void join_5bit(uint8_t values[UNIT], const uint8_t *high_bits, const uint8_t *nibbles)
{
    uint32_t high;
    memcpy(&high, high_bits, sizeof(high));
    for (int i = 0; i < 16; i++) {
        values[i] = (uint8_t)((nibbles[i] & 0xf) | ((high >> i) & 1) << 4);
        values[i + 16] = (uint8_t)(nibbles[i] >> 4 | ((high >> (i + 16)) & 1) << 4);
    }
}

static void pack_row_32(uint8_t *panel, dtype type, int r, const uint8_t *row, int32_t n_units)
{
    uint8_t values[UNIT];
    for (int32_t b = 0; b < n_units; b++) {
        matmul_place at = matmul__locate(type, b);
        uint8_t *lines = panel + at.lines;
        if (type != DTYPE_MXFP4)
            put_f16(panel + at.meta, 0, r, row);
        if (matmul__has_min(type))
            put_f16(panel + at.meta, 1, r, row + 2);
        switch (type) {
        case DTYPE_Q8_0:
            for (int i = 0; i < UNIT; i++)
                values[i] = row[2 + i] ^ 0x80;
            put_bytes(lines, r, values);
            row += 34;
            break;
        case DTYPE_Q5_0:
            join_5bit(values, row + 2, row + 6);
            put_bytes(lines, r, values);
            row += 22;
            break;
        case DTYPE_MXFP4:
            panel[at.meta + (size_t)r] = row[0];
            put_nibbles(lines, r, row + 1);
            row += 17;
            break;
        case DTYPE_Q4_0:
            put_nibbles(lines, r, row + 2);
            row += 18;
            break;
        case DTYPE_Q4_1:
            put_nibbles(lines, r, row + 4);
            row += 20;
            break;
        default: /* Q5_1 */
            join_5bit(values, row + 4, row + 8);
            put_bytes(lines, r, values);
            row += 24;
            break;
        }
    }
}

/* Scale and minimum of group g of a Q4_K or Q5_K block (6 bits each, packed in 12 bytes). */
static void unpack_scale_min(uint8_t *scale, uint8_t *min, const uint8_t *s, int g)
{
    if (g < 4) {
        *scale = s[g] & 63;
        *min = s[g + 4] & 63;
    } else {
        *scale = (uint8_t)((s[g + 4] & 0xf) | (s[g - 4] >> 6) << 4);
        *min = (uint8_t)(s[g + 4] >> 4 | (s[g] >> 6) << 4);
    }
}

static void pack_k45(uint8_t *panel, dtype type, int r, const uint8_t *block, int32_t first_unit)
{
    const bool is_5bit = type == DTYPE_Q5_K;
    const uint8_t *high = block + 16;
    const uint8_t *low = block + (is_5bit ? 48 : 16);
    for (int g = 0; g < 8; g++) {
        matmul_place at = matmul__locate(type, first_unit + g);
        if (g == 0) {
            put_f16(panel + at.super, 0, r, block);
            put_f16(panel + at.super, 1, r, block + 2);
        }
        unpack_scale_min(panel + at.meta + r, panel + at.meta + PANEL + r, block + 4, g);
        uint8_t values[UNIT];
        const uint8_t *nibbles = low + g / 2 * 32;
        for (int i = 0; i < UNIT; i++)
            values[i] = g % 2 == 0 ? nibbles[i] & 0xf : nibbles[i] >> 4;
        if (is_5bit) {
            for (int i = 0; i < UNIT; i++)
                values[i] |= (uint8_t)((high[i] >> g & 1) << 4);
            put_bytes(panel + at.lines, r, values);
        } else {
            for (int i = 0; i < UNIT / 2; i++)
                values[i] |= (uint8_t)(values[i + 16] << 4);
            put_nibbles(panel + at.lines, r, values);
        }
    }
}

static void pack_q6(uint8_t *panel, int r, const uint8_t *block, int32_t first_unit)
{
    const uint8_t *scales = block + 192;
    for (int g = 0; g < 8; g++) {
        matmul_place at = matmul__locate(DTYPE_Q6_K, first_unit + g);
        if (g == 0)
            put_f16(panel + at.super, 0, r, block + 208);
        panel[at.meta + (size_t)r] = scales[2 * g];
        panel[at.meta + PANEL + (size_t)r] = scales[2 * g + 1];
        /* Half h of 128 values: quarter k has nibble k/2 of bytes (k%2)*32+i and bit pair k of byte
         * i. */
        int h = g / 4;
        int k = g % 4;
        const uint8_t *low = block + h * 64 + k % 2 * 32;
        const uint8_t *high = block + 128 + h * 32;
        uint8_t values[UNIT];
        for (int i = 0; i < UNIT; i++)
            values[i] = (uint8_t)((low[i] >> (k / 2 * 4) & 0xf) | (high[i] >> (2 * k) & 3) << 4);
        put_bytes(panel + at.lines, r, values);
    }
}

static void pack_row_k(uint8_t *panel, dtype type, int r, const uint8_t *row, int32_t n_units)
{
    size_t block_bytes = dtype_row_bytes(type, 256);
    for (int32_t b = 0; b < n_units; b += 8, row += block_bytes) {
        if (type == DTYPE_Q6_K)
            pack_q6(panel, r, row, b);
        else
            pack_k45(panel, type, r, row, b);
    }
}

/* The rows of a panel of 2- or 4-byte values, in pieces of 32 values that stay in the first-level
 * cache.
 */
static void pack_panel_float(uint8_t *panel, const uint8_t *rows, int n_rows, int32_t n_in,
                             size_t value_bytes)
{
    enum { PIECE = 32 };
    for (int32_t k0 = 0; k0 < n_in; k0 += PIECE) {
        int32_t k1 = PGD_MIN(k0 + PIECE, n_in);
        for (int r = 0; r < n_rows; r++) {
            const uint8_t *src = rows + (size_t)r * (size_t)n_in * value_bytes;
            for (int32_t k = k0; k < k1; k++) {
                size_t at = (size_t)k * PANEL + (size_t)r;
                if (value_bytes == 2)
                    memcpy(panel + at * 2, src + (size_t)k * 2, 2);
                else
                    memcpy(panel + at * 4, src + (size_t)k * 4, 4);
            }
        }
    }
}

void matmul__pack(packed_weight *w, const void *rows, int32_t first_row, int32_t n_rows)
{
    PGD_ASSERTF(first_row % PANEL == 0 || n_rows == 0, "matmul pack: first row %d", (int)first_row);
    size_t panel_bytes = matmul__panel_bytes(w->type, w->n_in);
    size_t row_bytes = dtype_row_bytes(w->type, w->n_in);
    const uint8_t *src = rows;
    __atomic_store_n(&w->layout, MATMUL_LAYOUT_PANELS, __ATOMIC_RELAXED); /* several threads pack */
    for (int32_t done = 0; done < n_rows; done += PANEL, src += PANEL * row_bytes) {
        int n = (int)PGD_MIN(n_rows - done, PANEL);
        uint8_t *panel = (uint8_t *)w->data + (size_t)((first_row + done) / PANEL) * panel_bytes;
        if (n < PANEL) /* missing rows have scale zero */
            memset(panel, 0, panel_bytes);
        if (matmul__is_float(w->type)) {
            pack_panel_float(panel, src, n, w->n_in, w->type == DTYPE_F32 ? 4 : 2);
            continue;
        }
        for (int r = 0; r < n; r++) {
            if (matmul__is_k(w->type))
                pack_row_k(panel, w->type, r, src + (size_t)r * row_bytes, w->n_in / UNIT);
            else
                pack_row_32(panel, w->type, r, src + (size_t)r * row_bytes, w->n_in / UNIT);
        }
    }
}
