/* Sizes, names and exact dequantisation of tensor element types.
 *
 * dtype_dequantize_row is the definition of what a quantized weight means: the fast kernels are
 * tested against it, and it is bit-equal to the `gguf` Python package, which rounds to f32 after
 * every multiplication and addition. Each product is therefore stored in a variable of its own
 * before it is added to something: C17 lets a compiler fuse a*b+c only inside one expression.
 *
 * Block layouts (all little-endian, d and m are f16, q of value i):
 *
 *   Q4_0  d | 16 bytes: byte j = q[j] | q[j+16] << 4                       (q - 8) * d
 *   Q4_1  d m | the same                                                   q * d + m
 *   Q5_0  d | 32 high bits, bit i is bit 4 of q[i] | as Q4_0               (q - 16) * d
 *   Q5_1  d m | high bits | as Q4_0                                        q * d + m
 *   Q8_0  d | 32 signed bytes                                              q * d
 *   MXFP4 e | 16 bytes as Q4_0, q an E2M1 code      (twice its value) * 2^(e - 128)
 *   Q4_K  d dmin | 12 bytes: 8 scales and 8 minima of 6 bits | 128 bytes: per group of 64 values
 *         32 bytes, low nibbles first         (d * scale) * q - (dmin * min), for each 32 values
 *   Q5_K  d dmin | 12 bytes | 32 bytes of high bits: bit g for the g-th 32 values | 128 bytes
 *   Q6_K  128 bytes of low nibbles | 64 bytes of high bit pairs | 16 signed scales | d
 *                                             (d * scale) * (q - 32), for each 16 values
 */
#include "common/model/dtype.h"

#include <string.h>

#include <strings.h>

#include "common/bytes.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "model files are read in place");

/* Types with is_weight == false are known by size only: they are listed, never computed with. */
static const dtype_info infos[] = {
    {DTYPE_F32, "F32", 1, 4, true},         {DTYPE_F16, "F16", 1, 2, true},
    {DTYPE_Q4_0, "Q4_0", 32, 18, true},     {DTYPE_Q4_1, "Q4_1", 32, 20, true},
    {DTYPE_Q5_0, "Q5_0", 32, 22, true},     {DTYPE_Q5_1, "Q5_1", 32, 24, true},
    {DTYPE_Q8_0, "Q8_0", 32, 34, true},     {(dtype)10, "Q2_K", 256, 84, false},
    {(dtype)11, "Q3_K", 256, 110, false},   {DTYPE_Q4_K, "Q4_K", 256, 144, true},
    {DTYPE_Q5_K, "Q5_K", 256, 176, true},   {DTYPE_Q6_K, "Q6_K", 256, 210, true},
    {(dtype)16, "IQ2_XXS", 256, 66, false}, {(dtype)17, "IQ2_XS", 256, 74, false},
    {(dtype)18, "IQ3_XXS", 256, 98, false}, {(dtype)19, "IQ1_S", 256, 50, false},
    {(dtype)20, "IQ4_NL", 32, 18, false},   {(dtype)21, "IQ3_S", 256, 110, false},
    {(dtype)22, "IQ2_S", 256, 82, false},   {(dtype)23, "IQ4_XS", 256, 136, false},
    {DTYPE_I8, "I8", 1, 1, false},          {DTYPE_I16, "I16", 1, 2, false},
    {DTYPE_I32, "I32", 1, 4, false},        {(dtype)27, "I64", 1, 8, false},
    {(dtype)28, "F64", 1, 8, false},        {(dtype)29, "IQ1_M", 256, 56, false},
    {DTYPE_BF16, "BF16", 1, 2, true},       {(dtype)34, "TQ1_0", 256, 54, false},
    {(dtype)35, "TQ2_0", 256, 66, false},   {DTYPE_MXFP4, "MXFP4", 32, 17, true},
};

const dtype_info *dtype_get_info(int32_t gguf_type_id)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(infos); i++) {
        if ((int32_t)infos[i].type == gguf_type_id)
            return &infos[i];
    }
    return NULL;
}

dtype dtype_parse(const char *name)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(infos); i++) {
        if (strcasecmp(infos[i].name, name) == 0)
            return infos[i].type;
    }
    return DTYPE_NONE;
}

#define TEN_NAMES(d)                                                                          \
    "type " d "0", "type " d "1", "type " d "2", "type " d "3", "type " d "4", "type " d "5", \
        "type " d "6", "type " d "7", "type " d "8", "type " d "9"

const char *dtype_name(int32_t gguf_type_id)
{
    /* Static storage for every id that a file of today or soon may hold. */
    static const char *const by_id[] = {
        TEN_NAMES(""),  TEN_NAMES("1"), TEN_NAMES("2"), TEN_NAMES("3"), TEN_NAMES("4"),
        TEN_NAMES("5"), TEN_NAMES("6"), TEN_NAMES("7"), TEN_NAMES("8"), TEN_NAMES("9")};
    const dtype_info *info = dtype_get_info(gguf_type_id);
    if (info != NULL)
        return info->name;
    if (gguf_type_id >= 0 && gguf_type_id < (int32_t)PGD_ARRAY_LEN(by_id))
        return by_id[gguf_type_id];
    return "unknown type";
}

size_t dtype_row_bytes(dtype type, int64_t n_elems)
{
    const dtype_info *info = dtype_get_info((int32_t)type);
    if (info == NULL || n_elems < 0 || n_elems % info->block_elems != 0)
        return 0;
    size_t n_bytes;
    if (__builtin_mul_overflow((size_t)(n_elems / info->block_elems), (size_t)info->block_bytes,
                               &n_bytes))
        return 0;
    return n_bytes;
}

static float f32_from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static uint32_t f32_to_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

/* As the F16C instructions do it: exact, a signalling NaN becomes quiet. */
float dtype_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1fu;
    uint32_t mantissa = h & 0x3ffu;
    if (exponent == 0x1f)
        return f32_from_bits(sign | 0x7f800000u | (mantissa << 13) |
                             (mantissa != 0 ? 0x400000u : 0u));
    if (exponent != 0)
        return f32_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    /* Zero and subnormals: mantissa * 2^-24 is exact in f32. */
    float magnitude = (float)mantissa * 0x1p-24f;
    return f32_from_bits(sign | f32_to_bits(magnitude));
}

uint16_t dtype_f32_to_f16(float f)
{
    uint32_t bits = f32_to_bits(f);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) /* 65520 and up round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        /* Below 2^-14: the result counts units of 2^-24. Adding 2^-1, whose last bit is worth
         * 2^-24, makes the FPU round to such units, to nearest even. */
        float rounded = f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (f32_to_bits(rounded) - 0x3f000000u));
    }
    uint32_t odd = (magnitude >> 13) & 1u;
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

float dtype_bf16_to_f32(uint16_t h)
{
    return f32_from_bits((uint32_t)h << 16);
}

uint16_t dtype_f32_to_bf16(float f)
{
    uint32_t bits = f32_to_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static uint16_t load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static float load_f16(const uint8_t *p)
{
    return dtype_f16_to_f32(load_u16(p));
}

/* q * d, and q * d + m rounded twice. */
static float scale_add(float d, int32_t q, float m)
{
    float product = d * (float)q;
    return product + m;
}

static void dequantize_q4_0(float *out, const uint8_t *b)
{
    float d = load_f16(b);
    for (int j = 0; j < 16; j++) {
        out[j] = d * (float)((b[2 + j] & 0xf) - 8);
        out[j + 16] = d * (float)((b[2 + j] >> 4) - 8);
    }
}

static void dequantize_q4_1(float *out, const uint8_t *b)
{
    float d = load_f16(b);
    float m = load_f16(b + 2);
    for (int j = 0; j < 16; j++) {
        out[j] = scale_add(d, b[4 + j] & 0xf, m);
        out[j + 16] = scale_add(d, b[4 + j] >> 4, m);
    }
}

static int32_t high_bit(uint32_t high, int idx)
{
    return (int32_t)((high >> idx) & 1u) << 4;
}

static void dequantize_q5_0(float *out, const uint8_t *b)
{
    float d = load_f16(b);
    uint32_t high = bytes_load_u32(b + 2);
    for (int j = 0; j < 16; j++) {
        out[j] = d * (float)(((b[6 + j] & 0xf) | high_bit(high, j)) - 16);
        out[j + 16] = d * (float)(((b[6 + j] >> 4) | high_bit(high, j + 16)) - 16);
    }
}

static void dequantize_q5_1(float *out, const uint8_t *b)
{
    float d = load_f16(b);
    float m = load_f16(b + 2);
    uint32_t high = bytes_load_u32(b + 4);
    for (int j = 0; j < 16; j++) {
        out[j] = scale_add(d, (b[8 + j] & 0xf) | high_bit(high, j), m);
        out[j + 16] = scale_add(d, (b[8 + j] >> 4) | high_bit(high, j + 16), m);
    }
}

static void dequantize_q8_0(float *out, const uint8_t *b)
{
    float d = load_f16(b);
    for (int j = 0; j < 32; j++)
        out[j] = d * (float)(int8_t)b[2 + j];
}

/* Four bits of MXFP4: sign, two bits of exponent, one of mantissa. Doubled, so that all are whole. */
static const int8_t e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static void dequantize_mxfp4(float *out, const uint8_t *b)
{
    /* 2^(e - 128), half of what the E8M0 scale says; the lowest two are below the normal range. */
    uint32_t e = b[0];
    float d = f32_from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    for (int j = 0; j < 16; j++) {
        out[j] = d * (float)e2m1_doubled[b[1 + j] & 0xf];
        out[j + 16] = d * (float)e2m1_doubled[b[1 + j] >> 4];
    }
}

/* The 6-bit scale and minimum of group g (0..7) of a Q4_K or Q5_K block: groups 0..3 lie in the low
 * 6 bits of bytes g and g+4, the others have 4 bits in byte g+4 and 2 in the top of bytes g-4 and
 * g. */
static void k_scale_min(int32_t *scale, int32_t *min, const uint8_t *s, int g)
{
    if (g < 4) {
        *scale = s[g] & 63;
        *min = s[g + 4] & 63;
    } else {
        *scale = (s[g + 4] & 0xf) | (s[g - 4] >> 6) << 4;
        *min = (s[g + 4] >> 4) | (s[g] >> 6) << 4;
    }
}

/* high: the 32 bytes of high bits of Q5_K, NULL for Q4_K. */
static void dequantize_k45(float *out, const uint8_t *b, const uint8_t *high, const uint8_t *low)
{
    float d = load_f16(b);
    float dmin = load_f16(b + 2);
    for (int g = 0; g < 8; g++) {
        int32_t scale;
        int32_t min;
        k_scale_min(&scale, &min, b + 4, g);
        float group_d = d * (float)scale;
        float group_min = dmin * (float)min;
        const uint8_t *bytes = low + g / 2 * 32;
        for (int j = 0; j < 32; j++) {
            int32_t q = g % 2 == 0 ? bytes[j] & 0xf : bytes[j] >> 4;
            if (high != NULL)
                q |= ((high[j] >> g) & 1) << 4;
            out[g * 32 + j] = scale_add(group_d, q, -group_min);
        }
    }
}

static void dequantize_q4_k(float *out, const uint8_t *b)
{
    dequantize_k45(out, b, NULL, b + 16);
}

static void dequantize_q5_k(float *out, const uint8_t *b)
{
    dequantize_k45(out, b, b + 16, b + 48);
}

static void dequantize_q6_k(float *out, const uint8_t *b)
{
    const uint8_t *low = b;
    const uint8_t *high = b + 128;
    const uint8_t *scales = b + 192;
    float d = load_f16(b + 208);
    for (int i = 0; i < 256; i++) {
        /* Each half of 128 values: quarter k of 32 has its low bits in byte (k%2)*32+j, nibble k/2,
         * and its high bits in bit pair k of byte j. */
        int half = i / 128;
        int k = i / 32 % 4;
        int j = i % 32;
        int nibble = low[half * 64 + k % 2 * 32 + j] >> (k / 2 * 4) & 0xf;
        int pair = high[half * 32 + j] >> (k * 2) & 3;
        float group_d = d * (float)(int8_t)scales[i / 16];
        out[i] = group_d * (float)((nibble | pair << 4) - 32);
    }
}

typedef void (*block_fn)(float *out, const uint8_t *block);

static block_fn get_block_fn(dtype type)
{
    switch (type) {
    case DTYPE_Q4_0:
        return dequantize_q4_0;
    case DTYPE_Q4_1:
        return dequantize_q4_1;
    case DTYPE_Q5_0:
        return dequantize_q5_0;
    case DTYPE_Q5_1:
        return dequantize_q5_1;
    case DTYPE_Q8_0:
        return dequantize_q8_0;
    case DTYPE_Q4_K:
        return dequantize_q4_k;
    case DTYPE_Q5_K:
        return dequantize_q5_k;
    case DTYPE_Q6_K:
        return dequantize_q6_k;
    case DTYPE_MXFP4:
        return dequantize_mxfp4;
    default:
        return NULL;
    }
}

void dtype_dequantize_row(float *out, const void *in, int64_t n_elems, dtype type)
{
    const uint8_t *bytes = in;
    if (type == DTYPE_F32) {
        memcpy(out, in, (size_t)n_elems * sizeof(float));
        return;
    }
    if (type == DTYPE_F16 || type == DTYPE_BF16) {
        for (int64_t i = 0; i < n_elems; i++) {
            uint16_t h = load_u16(bytes + 2 * i);
            out[i] = type == DTYPE_F16 ? dtype_f16_to_f32(h) : dtype_bf16_to_f32(h);
        }
        return;
    }
    block_fn fn = get_block_fn(type);
    const dtype_info *info = dtype_get_info((int32_t)type);
    PGD_ASSERTF(fn != NULL, "dtype_dequantize_row: type %d has no values", (int)type);
    PGD_ASSERTF(n_elems % info->block_elems == 0, "dtype_dequantize_row: %lld values of %s",
                (long long)n_elems, info->name);
    for (int64_t i = 0; i < n_elems / info->block_elems; i++)
        fn(out + i * info->block_elems, bytes + i * info->block_bytes);
}
