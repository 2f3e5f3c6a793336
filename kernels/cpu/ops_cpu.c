/* The CPU's op tables, one per instruction-set level: each op takes the best version that this
 * build has for the level.
 *
 * The tables are constant but for the matmul pointer, which is filled when a level is asked for:
 * together they are the dispatch table, the one piece of mutable file-level state here. */
#include "kernels/ops.h"

#define REF_OPS                                                                             \
    .embed = embed_ref, .rmsnorm = rmsnorm_ref, .rope = rope_ref, .kv_write = kv_write_ref, \
    .kv_zero = kv_zero_ref, .attention = attention_ref, .silu_mul = silu_mul_ref,           \
    .sample = sample_ref, .attention_workspace_bytes = attention_ref_workspace_bytes,       \
    .sample_workspace_bytes = sample_ref_workspace_bytes

static kernel_ops tables[] = {
    [CPU_ISA_REF] = {.name = "cpu ref", REF_OPS},
    [CPU_ISA_AVX2] = {.name = "cpu avx2", REF_OPS},
    [CPU_ISA_AVX512] = {.name = "cpu avx512", REF_OPS},
    [CPU_ISA_AVX512VNNI] = {.name = "cpu avx512vnni", REF_OPS},
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
