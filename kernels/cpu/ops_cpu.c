/* The CPU's op tables, one per instruction-set level: each op takes the best version that this
 * build has for the level.
 *
 * The tables are constant but for the matmul pointer, which is filled when a level is asked for:
 * together they are the dispatch table, the one piece of mutable file-level state here. */
#include "kernels/ops.h"

/* Ops of which there is one version: they move whole rows or blocks, or are little
 * work. */
#define COMMON_OPS                                                                  \
    .embed = embed_ref, .kv_zero = kv_zero_ref, .add_positions = add_positions_ref, \
    .row_scale = row_scale_ref, .moe_route = moe_route_ref, .moe_gather = moe_gather_ref

#define OPS_OF(level)                                                                           \
    COMMON_OPS, .rmsnorm = rmsnorm_##level, .rope = rope_##level, .kv_write = kv_write_##level, \
                .attention = attention_##level, .gated_act = gated_act_##level,                 \
                .layernorm = layernorm_##level, .activation = activation_##level,               \
                .soft_cap = soft_cap_##level, .moe_combine = moe_combine_##level,               \
                .sample = sample_##level, .sample_workspace_bytes = sample_ref_workspace_bytes

#define REF_OPS         OPS_OF(ref), .attention_workspace_bytes = attention_ref_workspace_bytes
#define SIMD_OPS(level) OPS_OF(level), .attention_workspace_bytes = attention_simd_workspace_bytes

static kernel_ops tables[] = {
    [CPU_ISA_REF] = {.name = "cpu ref", REF_OPS},
#if defined(__x86_64__)
    [CPU_ISA_AVX2] = {.name = "cpu avx2", SIMD_OPS(avx2)},
    [CPU_ISA_AVX512] = {.name = "cpu avx512", SIMD_OPS(avx512)},
    [CPU_ISA_AVX512VNNI] = {.name = "cpu avx512vnni", SIMD_OPS(avx512)},
#endif
    [CPU_ISA_NEON] = {.name = "cpu neon", REF_OPS},
};

pgd_err ops_cpu_get(const kernel_ops **out, cpu_isa isa)
{
    *out = NULL;
    if ((size_t)isa >= PGD_ARRAY_LEN(tables) || !cpu_features_has(isa))
        return PGD_EUNSUPPORTED;
    const matmul_impl *matmul = matmul_get_impl(isa);
    if (!matmul)
        return PGD_EUNSUPPORTED;
    tables[isa].matmul = matmul;
    *out = &tables[isa];
    return PGD_OK;
}
