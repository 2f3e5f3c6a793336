/* The table of operations that the decoder is written in; filled once by ops_cpu.c (later
 * ops_cuda.cu).
 *
 * Every op takes an args struct of device pointers and a kernel_ctx, is ordered by the ctx, never
 * allocates, never waits for the host. Each family's header has formula, shapes, types and limits.
 * An op with little work runs on the calling thread alone.
 * Thread:  the worker's main thread
 */
#ifndef KERNELS_OPS_H
#define KERNELS_OPS_H

#include "kernels/activation.h"
#include "kernels/add_positions.h"
#include "kernels/attention.h"
#include "kernels/embed.h"
#include "kernels/gated_act.h"
#include "kernels/kv_write.h"
#include "kernels/kv_zero.h"
#include "kernels/layernorm.h"
#include "kernels/matmul.h"
#include "kernels/moe.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/row_scale.h"
#include "kernels/sample.h"
#include "kernels/soft_cap.h"

PGD_BEGIN_C

/* Raised with any change of the bits that a kernel computes from the same inputs: an order of sums, a
 * rounding, a fused operation. What is kept of results beyond a worker's life is of one version. */
#define KERNELS_NUMERICS_VERSION 1

typedef struct kernel_ops {
    const char *name; /* "cpu avx512vnni" */
    const matmul_impl *matmul;
    pgd_err (*embed)(const embed_args *args, kernel_ctx *ctx);
    pgd_err (*rmsnorm)(const rmsnorm_args *args, kernel_ctx *ctx);
    pgd_err (*layernorm)(const layernorm_args *args, kernel_ctx *ctx);
    pgd_err (*rope)(const rope_args *args, kernel_ctx *ctx);
    pgd_err (*kv_write)(const kv_write_args *args, kernel_ctx *ctx);
    pgd_err (*kv_zero)(const kv_zero_args *args, kernel_ctx *ctx);
    pgd_err (*attention)(const attention_args *args, kernel_ctx *ctx);
    pgd_err (*gated_act)(const gated_act_args *args, kernel_ctx *ctx);
    pgd_err (*activation)(const activation_args *args, kernel_ctx *ctx);
    pgd_err (*add_positions)(const add_positions_args *args, kernel_ctx *ctx);
    pgd_err (*row_scale)(const row_scale_args *args, kernel_ctx *ctx);
    pgd_err (*soft_cap)(const soft_cap_args *args, kernel_ctx *ctx);
    pgd_err (*moe_route)(const moe_route_args *args, kernel_ctx *ctx);
    pgd_err (*moe_gather)(const moe_gather_args *args, kernel_ctx *ctx);
    pgd_err (*moe_combine)(const moe_combine_args *args, kernel_ctx *ctx);
    pgd_err (*sample)(const sample_args *args, kernel_ctx *ctx);
    /* Bytes of ctx->workspace that the op of the same name needs. */
    size_t (*attention_workspace_bytes)(const attention_limits *limits);
    size_t (*sample_workspace_bytes)(int32_t vocab_size, int32_t n_threads);
} kernel_ops;

/* Static storage. PGD_EUNSUPPORTED when this build or machine lacks the level. */
PGD_MUST_USE pgd_err ops_cpu_get(const kernel_ops **out, cpu_isa isa);

PGD_END_C
#endif
