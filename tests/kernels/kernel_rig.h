/* What the kernel tests share: seeded inputs with spikes, tolerances, and a loop over every instruction-set level of this machine.
 *
 * A test compares each level's op with the reference and, where I1 asks for it, a row alone with the same row in a batch, bit for
 * bit. A level whose op is the reference itself passes trivially and is replaced by its own version as soon as there is one.
 */
#ifndef TESTS_KERNELS_KERNEL_RIG_H
#define TESTS_KERNELS_KERNEL_RIG_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/mem.h"
#include "common/thread.h"
#include "kernels/ops.h"

/* f32 results of f32 inputs against double: some hundred roundings at most. */
#define KERNEL_RIG_RTOL 2e-5
#define KERNEL_RIG_ATOL 2e-6

typedef struct kernel_rig {
    const kernel_ops *ops;
    cpu_isa isa;
    cpu_pool *pool;   /* 2 threads; the ctx uses it or not */
    kernel_ctx ctx;   /* on the pool */
    kernel_ctx alone; /* no pool: the calling thread only */
} kernel_rig;

static uint64_t kernel_rig_state = 1;

static inline void kernel_rig_seed(uint64_t seed)
{
    kernel_rig_state = seed * 0x9E3779B97F4A7C15u + 1;
}

static inline uint32_t kernel_rig_u32(void)
{
    uint64_t z = (kernel_rig_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)(z >> 32);
}

/* In [first, last]. */
static inline int32_t kernel_rig_int(int32_t first, int32_t last)
{
    return first + (int32_t)(kernel_rig_u32() % (uint32_t)(last - first + 1));
}

/* About normal; one in 64 is a spike thirty times as large. */
static inline float kernel_rig_float(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)kernel_rig_u32() * 0x1p-32f - 0.5f;
    return kernel_rig_u32() % 64 == 0 ? sum * 50 : sum * 1.7f;
}

static inline float *kernel_rig_floats(int64_t n)
{
    float *x = mem_alloc_aligned((size_t)PGD_MAX(n, 1) * sizeof(float) + 64, 64);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++)
        x[i] = kernel_rig_float();
    return x;
}

static inline void kernel_rig_free(float *x, int64_t n)
{
    mem_free_aligned(x, (size_t)PGD_MAX(n, 1) * sizeof(float) + 64);
}

/* |got - want| <= atol + rtol |want|; a NaN on one side only fails. */
static inline void kernel_rig_assert_near(const float *got, const float *want, int64_t n,
                                          double atol, double rtol, const char *what)
{
    for (int64_t i = 0; i < n; i++) {
        if (isnan(want[i]) && isnan(got[i]))
            continue;
        double error = fabs((double)got[i] - want[i]);
        if (!(error <= atol + rtol * fabs((double)want[i])))
            fail_msg("%s: value %lld is %.9g, expected %.9g", what, (long long)i, got[i], want[i]);
    }
}

static inline void kernel_rig_assert_same(const float *got, const float *want, int64_t n,
                                          const char *what)
{
    for (int64_t i = 0; i < n; i++) {
        if (memcmp(&got[i], &want[i], sizeof(float)) != 0)
            fail_msg("%s: value %lld is %.9g, expected the same bits as %.9g", what, (long long)i,
                     got[i], want[i]);
    }
}

/* Runs test(rig) at every level that this machine and build have. */
static inline void kernel_rig_for_all(void (*test)(kernel_rig *rig), size_t workspace_bytes)
{
    kernel_rig rig = {0};
    int n_levels = 0;
    thread_set_flush_denormals();
    assert_int_equal(cpu_pool_create(&rig.pool, 2, false), PGD_OK);
    rig.alone.workspace_bytes = PGD_ROUND_UP(workspace_bytes + 64, 64);
    rig.alone.workspace = mem_alloc_aligned(rig.alone.workspace_bytes, 64);
    assert_non_null(rig.alone.workspace);
    rig.ctx = rig.alone;
    rig.ctx.pool = rig.pool;
    for (int isa = CPU_ISA_REF; isa <= CPU_ISA_NEON; isa++) {
        if (ops_cpu_get(&rig.ops, (cpu_isa)isa) != PGD_OK)
            continue;
        rig.isa = (cpu_isa)isa;
        kernel_rig_seed((uint64_t)isa + 1);
        test(&rig);
        n_levels++;
    }
    assert_true(n_levels >= 1);
    mem_free_aligned(rig.alone.workspace, rig.alone.workspace_bytes);
    cpu_pool_destroy(rig.pool);
}

#endif
