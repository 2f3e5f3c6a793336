/* GGUF files with matrices of chosen types, made from another GGUF: plain quantisers and a writer for tests.
 *
 * The quantisers take a block's scale from its extreme values and round; they search for nothing better. What they write is judged by
 * dtype_dequantize_row, which is compared with the `gguf` package elsewhere.
 */
#ifndef TESTS_UNIT_QUANTIZED_MODEL_H
#define TESTS_UNIT_QUANTIZED_MODEL_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/gguf.h"
#include "tests/unit/model_builder.h"

/* --- blocks ---------------------------------------------------------------------------------------- */

/* Rounds to f16 and back, as the reader of a scale will see it. */
static inline float quantized__put_f16(uint8_t *out, float f)
{
    uint16_t h = dtype_f32_to_f16(f);
    memcpy(out, &h, sizeof(h));
    return dtype_f16_to_f32(h);
}

static inline int quantized__round(float x, float scale, int min, int max)
{
    long q = scale == 0 ? 0 : lrintf(x / scale);
    return (int)(q < min ? min : q > max ? max : q);
}

/* The value of largest magnitude, with its sign. */
static inline float quantized__extreme(const float *x, int n)
{
    float extreme = 0;
    for (int i = 0; i < n; i++)
        extreme = fabsf(x[i]) > fabsf(extreme) ? x[i] : extreme;
    return extreme;
}

static inline void quantized__range(float *min, float *max, const float *x, int n)
{
    *min = *max = x[0];
    for (int i = 1; i < n; i++) {
        *min = x[i] < *min ? x[i] : *min;
        *max = x[i] > *max ? x[i] : *max;
    }
}

/* Q4_0, Q5_0 (has_min false) and Q4_1, Q5_1: d, maybe m, maybe 32 high bits, nibbles. */
static inline void quantized__block_45(uint8_t *out, const float *x, int n_bits, bool has_min)
{
    int top = (1 << n_bits) - 1, half = has_min ? 0 : 1 << (n_bits - 1);
    uint32_t high = 0;
    float d, m = 0, min, max;
    if (has_min) {
        quantized__range(&min, &max, x, 32);
        d = quantized__put_f16(out, (max - min) / (float)top);
        m = quantized__put_f16(out + 2, min);
    } else {
        d = quantized__put_f16(out, quantized__extreme(x, 32) / (float)-half);
    }
    uint8_t *nibbles = out + (has_min ? 4 : 2) + (n_bits == 5 ? 4 : 0);
    memset(nibbles, 0, 16);
    for (int i = 0; i < 32; i++) {
        unsigned q = (unsigned)(quantized__round(x[i] - m, d, -half, top - half) + half);
        nibbles[i % 16] |= (uint8_t)((q & 15) << (i / 16 * 4));
        high |= (q >> 4) << i;
    }
    if (n_bits == 5)
        memcpy(nibbles - 4, &high, sizeof(high));
}

static inline void quantized__block_q8_0(uint8_t *out, const float *x)
{
    float d = quantized__put_f16(out, fabsf(quantized__extreme(x, 32)) / 127);
    for (int i = 0; i < 32; i++)
        out[2 + i] = (uint8_t)(int8_t)quantized__round(x[i], d, -127, 127);
}

/* Q4_K, Q5_K: 8 groups of 32, each with a scale and a minimum of 6 bits. */
static inline void quantized__block_k45(uint8_t *out, const float *x, int n_bits)
{
    float scale[8], below[8], max_scale = 0, max_below = 0;
    int top = (1 << n_bits) - 1;
    for (int g = 0; g < 8; g++) {
        float min, max;
        quantized__range(&min, &max, x + 32 * g, 32);
        below[g] = min < 0 ? -min : 0;
        scale[g] = (max + below[g]) / (float)top;
        max_scale = fmaxf(max_scale, scale[g]);
        max_below = fmaxf(max_below, below[g]);
    }
    memset(out, 0, n_bits == 5 ? 176 : 144);
    float d = quantized__put_f16(out, max_scale / 63),
          dmin = quantized__put_f16(out + 2, max_below / 63);
    uint8_t *packed = out + 4, *high = out + 16, *low = out + (n_bits == 5 ? 48 : 16);
    for (int g = 0; g < 8; g++) {
        unsigned s = (unsigned)quantized__round(scale[g], d, 0, 63);
        unsigned m = (unsigned)quantized__round(below[g], dmin, 0, 63);
        if (g < 4) {
            packed[g] |= (uint8_t)s;
            packed[g + 4] |= (uint8_t)m;
        } else {
            packed[g + 4] |= (uint8_t)((s & 15) | (m & 15) << 4);
            packed[g - 4] |= (uint8_t)(s >> 4 << 6);
            packed[g] |= (uint8_t)(m >> 4 << 6);
        }
        for (int i = 0; i < 32; i++) {
            unsigned q =
                (unsigned)quantized__round(x[32 * g + i] + dmin * (float)m, d * (float)s, 0, top);
            low[g / 2 * 32 + i] |= (uint8_t)((q & 15) << (g % 2 * 4));
            if (n_bits == 5)
                high[i] |= (uint8_t)(q >> 4 << g);
        }
    }
}

/* 16 groups of 16, each with a signed scale of 8 bits. */
static inline void quantized__block_q6_k(uint8_t *out, const float *x)
{
    float scale[16], extreme;
    for (int g = 0; g < 16; g++)
        scale[g] = quantized__extreme(x + 16 * g, 16) / -32;
    extreme = quantized__extreme(scale, 16);
    memset(out, 0, 210);
    float d = quantized__put_f16(out + 208, extreme / -128);
    for (int i = 0; i < 256; i++) {
        int s = quantized__round(scale[i / 16], d, -128, 127);
        unsigned q = (unsigned)(quantized__round(x[i], d * (float)s, -32, 31) + 32);
        int half = i / 128, k = i / 32 % 4, j = i % 32;
        out[192 + i / 16] = (uint8_t)(int8_t)s;
        out[half * 64 + k % 2 * 32 + j] |= (uint8_t)((q & 15) << (k / 2 * 4));
        out[128 + half * 32 + j] |= (uint8_t)(q >> 4 << (k * 2));
    }
}

/* One block of type from the values x; block_elems of them. */
/* The largest magnitude falls on 4 or 6 of the scale; of two codes as near the lower one. */
static inline void quantized__block_mxfp4(uint8_t *out, const float *x)
{
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    float max = 0;
    uint8_t codes[32];
    for (int i = 0; i < 32; i++)
        max = PGD_MAX(max, fabsf(x[i]));
    int exponent = max > 0 ? ilogbf(max) - 2 : -127;
    out[0] = (uint8_t)(exponent + 127);
    for (int i = 0; i < 32; i++) {
        float scaled = ldexpf(fabsf(x[i]), -exponent);
        uint8_t best = 0;
        for (uint8_t c = 1; c < 8; c++)
            best = fabsf(scaled - values[c]) < fabsf(scaled - values[best]) ? c : best;
        codes[i] = (uint8_t)(best | (x[i] < 0 ? 8 : 0));
    }
    for (int j = 0; j < 16; j++)
        out[1 + j] = (uint8_t)(codes[j] | codes[j + 16] << 4);
}

static inline void quantized__block(uint8_t *out, const float *x, dtype type)
{
    uint16_t h;
    switch (type) {
    case DTYPE_F32:
        memcpy(out, x, 4);
        break;
    case DTYPE_F16:
        (void)quantized__put_f16(out, *x);
        break;
    case DTYPE_BF16:
        h = dtype_f32_to_bf16(*x);
        memcpy(out, &h, 2);
        break;
    case DTYPE_Q8_0:
        quantized__block_q8_0(out, x);
        break;
    case DTYPE_Q6_K:
        quantized__block_q6_k(out, x);
        break;
    case DTYPE_MXFP4:
        quantized__block_mxfp4(out, x);
        break;
    case DTYPE_Q4_K:
    case DTYPE_Q5_K:
        quantized__block_k45(out, x, type == DTYPE_Q4_K ? 4 : 5);
        break;
    case DTYPE_Q4_0:
    case DTYPE_Q4_1:
        quantized__block_45(out, x, 4, type == DTYPE_Q4_1);
        break;
    case DTYPE_Q5_0:
    case DTYPE_Q5_1:
        quantized__block_45(out, x, 5, type == DTYPE_Q5_1);
        break;
    default:
        abort();
    }
}

/* out: dtype_row_bytes(type, n) bytes. */
static inline void quantize_row(void *out, const float *x, int64_t n, dtype type)
{
    const dtype_info *info = dtype_get_info((int32_t)type);
    for (int64_t i = 0; i < n / info->block_elems; i++)
        quantized__block((uint8_t *)out + i * info->block_bytes, x + i * info->block_elems, type);
}

/* --- files ----------------------------------------------------------------------------------------- */

/* A tensor to be written: values of `from`, in type. */
typedef struct quantized_tensor {
    char name[64];
    const gguf_tensor *from;
    int64_t first_row; /* the rows of `from` from here on, then those before it */
    dtype type;
    bool drops; /* all values as F32, after a passage through type */
} quantized_tensor;

static inline void quantized__put_tensor(builder *b, const quantized_tensor *t)
{
    int64_t n_rows = t->from->n_dims == 1 ? 1 : t->from->dims[0];
    int64_t n_cols = t->from->n_dims == 1 ? t->from->dims[0] : t->from->dims[1];
    size_t from_bytes = dtype_row_bytes((dtype)t->from->type_id, n_cols);
    size_t row_bytes = dtype_row_bytes(t->type, n_cols);
    float *values = malloc((size_t)n_cols * sizeof(float));
    uint8_t *row = malloc(row_bytes);
    if (values == NULL || row == NULL)
        abort();
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *source = t->from->data + (size_t)((t->first_row + i) % n_rows) * from_bytes;
        dtype_dequantize_row(values, source, n_cols, (dtype)t->from->type_id);
        quantize_row(row, values, n_cols, t->type);
        if (t->drops) {
            dtype_dequantize_row(values, row, n_cols, t->type);
            builder_put(b, values, (size_t)n_cols * sizeof(float));
        } else {
            builder_put(b, row, row_bytes);
        }
    }
    while (b->n_bytes % 32 != 0)
        builder_put(b, "", 1);
    free(values);
    free(row);
}

/* A file with the metadata of source and these tensors. */
static inline void quantized_write(const char *path, const gguf_file *source,
                                   const quantized_tensor *tensors, int n)
{
    builder b;
    gguf_string first_key;
    uint64_t counts[2] = {(uint64_t)n, (uint64_t)gguf_n_values(source)};
    builder_begin(&b);
    memcpy(b.data + 8, counts, sizeof(counts));
    /* The values lie between the first key's length and the first tensor's. */
    if (gguf_get_value_at(source, 0, &first_key) == NULL)
        abort();
    const char *values = first_key.data - 8;
    builder_put(&b, values, (size_t)(gguf_get_tensor_at(source, 0)->name.data - 8 - values));
    for (int i = 0; i < n; i++) {
        const gguf_tensor *from = tensors[i].from;
        int64_t n_rows = from->n_dims == 1 ? 0 : from->dims[0];
        builder_tensor(&b, tensors[i].name, tensors[i].drops ? DTYPE_F32 : tensors[i].type, n_rows,
                       from->dims[from->n_dims - 1]);
    }
    while (b.n_bytes % 32 != 0)
        builder_put(&b, "", 1);
    for (int i = 0; i < n; i++)
        quantized__put_tensor(&b, &tensors[i]);
    builder_write(path, b.data, b.n_bytes);
    builder_free(&b);
}

#endif
