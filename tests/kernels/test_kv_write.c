/* Writing and zeroing KV pages: where each value lands, conversions, saturation, and that nothing else is touched. */
#include "kernels/kv_write.h"
#include "kernels/kv_zero.h"
#include "tests/kernels/kernel_rig.h"

enum { N_BLOCKS = 7 };

static float load(const uint8_t *page, size_t elem, dtype type)
{
    uint16_t half;
    float value;
    if (type == DTYPE_F32) {
        memcpy(&value, page + elem * 4, 4);
        return value;
    }
    memcpy(&half, page + elem * 2, 2);
    return type == DTYPE_F16 ? dtype_f16_to_f32(half) : dtype_bf16_to_f32(half);
}

static float converted(float x, dtype type)
{
    if (type == DTYPE_F32)
        return x;
    if (type == DTYPE_BF16)
        return dtype_bf16_to_f32(dtype_f32_to_bf16(x));
    if (x > 65504 || x < -65504)
        return x > 0 ? 65504.0f : -65504.0f;
    return dtype_f16_to_f32(dtype_f32_to_f16(x));
}

static void write_and_check(kernel_rig *rig, kv_page_layout kv)
{
    size_t page_bytes = kv_page_bytes(&kv), n_bytes = N_BLOCKS * page_bytes;
    int32_t width = kv.n_kv_heads * kv.head_dim, n_slots = N_BLOCKS * kv.block_size;
    int32_t n_rows = kernel_rig_int(0, 60);
    int64_t stride = 2 * width + kernel_rig_int(0, 3), n = stride * PGD_MAX(n_rows, 1);
    uint8_t *pages = mem_alloc_aligned(n_bytes, 64), *before = mem_alloc(n_bytes);
    float *x = kernel_rig_floats(n);
    slot_id slots[60], used[N_BLOCKS * KV_PAGE_MAX_BLOCK_SIZE];
    for (int32_t s = 0; s < n_slots; s++)
        used[s] = -1;
    memset(pages, 0x5a, n_bytes);
    memcpy(before, pages, n_bytes);
    for (int32_t t = 0; t < n_rows; t++) {
        slots[t] = kernel_rig_int(-1, n_slots - 1);
        if (slots[t] >= 0 && used[slots[t]] >= 0)
            slots[t] = -1;
        if (slots[t] >= 0)
            used[slots[t]] = t;
        x[t * stride] = (float)kernel_rig_int(-3, 3) * 40000; /* out of range for F16 at times */
        x[t * stride + width] = kernel_rig_int(0, 9) == 0 ? NAN : 3e-6f; /* subnormal in F16 */
    }
    kv_write_args args = {pages, kv, x, stride, x + width, stride, slots, n_rows};
    assert_int_equal(rig->ops->kv_write(&args, &rig->ctx), PGD_OK);
    for (int32_t s = 0; s < n_slots; s++) {
        const uint8_t *page = pages + (size_t)(s / kv.block_size) * page_bytes;
        const uint8_t *old = before + (size_t)(s / kv.block_size) * page_bytes;
        size_t o = (size_t)(s % kv.block_size);
        for (int32_t i = 0; i < width; i++) {
            int32_t h = i / kv.head_dim, d = i % kv.head_dim;
            size_t k_at = kv_page_k_elem(&kv, h) + (size_t)d * (size_t)kv.block_size + o;
            size_t v_at = kv_page_v_elem(&kv, h) + o * (size_t)kv.head_dim + (size_t)d;
            float want[2], got[2] = {load(page, k_at, kv.type), load(page, v_at, kv.type)};
            if (used[s] >= 0) {
                want[0] = converted(x[used[s] * stride + i], kv.type);
                want[1] = converted(x[used[s] * stride + width + i], kv.type);
            } else {
                want[0] = load(old, k_at, kv.type);
                want[1] = load(old, v_at, kv.type);
            }
            kernel_rig_assert_near(got, want, 2, 0, 0, rig->ops->name);
        }
    }
    block_id zero[3] = {N_BLOCKS - 1, 2, 2};
    memcpy(before, pages, n_bytes);
    memset(before + 2 * page_bytes, 0, page_bytes);
    memset(before + (N_BLOCKS - 1) * page_bytes, 0, page_bytes);
    kv_zero_args zargs = {pages, page_bytes, zero, 3};
    assert_int_equal(rig->ops->kv_zero(&zargs, &rig->ctx), PGD_OK);
    assert_memory_equal(pages, before, n_bytes);
    mem_free_aligned(pages, n_bytes);
    mem_free(before);
    kernel_rig_free(x, n);
}

static void compare(kernel_rig *rig)
{
    const dtype types[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    const int32_t head_dims[] = {1, 8, 15, 32, 64, 80, 128};
    for (size_t k = 0; k < 3 * PGD_ARRAY_LEN(head_dims); k++)
        write_and_check(rig, (kv_page_layout){.type = types[k % 3],
                                              .n_kv_heads = kernel_rig_int(1, 4),
                                              .head_dim = head_dims[k / 3],
                                              .block_size = 16 * kernel_rig_int(1, 3)});
}

static void test_kv_write_all_levels(void **state)
{
    (void)state;
    kernel_rig_for_all(compare, 0);
}

static void test_kv_write_refuses_bad_layout(void **state)
{
    (void)state;
    kernel_ctx ctx = {0};
    kv_write_args args = {.kv = {DTYPE_F16, 2, 64, 16}, .k_stride = 128, .v_stride = 128};
    assert_int_equal(kv_write_ref(&args, &ctx), PGD_OK);
    args.kv.block_size = 24;
    assert_int_equal(kv_write_ref(&args, &ctx), PGD_EINVAL);
    args.kv = (kv_page_layout){DTYPE_Q8_0, 2, 64, 16};
    assert_int_equal(kv_write_ref(&args, &ctx), PGD_EINVAL);
    args.kv = (kv_page_layout){DTYPE_F16, 2, 65, 16};
    assert_int_equal(kv_write_ref(&args, &ctx), PGD_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_write_all_levels),
        cmocka_unit_test(test_kv_write_refuses_bad_layout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
