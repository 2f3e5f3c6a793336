/* Speed of the matrix products, as shares of what this machine can do in the same minute.
 *
 *   bench_matmul [-t threads] [-r rounds] [-i isa] [-m smol|1b|experts] [-c cpu] [type ...]
 *
 * Roofs: reading memory with one or several streams, f32 fma and int8 dot products from registers. One
 * "model" is the set of matrices of a decoder (each layer its own memory, so that caches do not
 * hold the weights); its time for 1 row is set against the packed bytes over the read rate, for
 * more rows against the operations over the peak. "experts" is one layer of a mixture, 8 of 64
 * experts for each row, as grouped products; its packed bytes are those of the experts that some row
 * chose, and both shares are told. The best of the rounds counts: on a shared machine the others show
 * the neighbours.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/mem.h"
#include "kernels/matmul.h"

enum { MAX_MATRICES = 200, READ_BYTES = 512 << 20 };

typedef struct bench {
    const matmul_impl *impl;
    kernel_ctx ctx;
    cpu_isa isa;
    int n_rounds;
    double read_gb_s;
    double fma_gflop_s;
    double int8_gop_s;
} bench;

static clockid_t clock_used = CLOCK_MONOTONIC;

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(clock_used, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static uint32_t rng(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

/* --- roofs --- */

static void *read_buffer;
static volatile uint64_t read_sink[64]; /* keeps the loads from being dropped */

/* Eight streams per thread, a line of each in turn. */
static void read_thread(void *arg, int32_t thread_idx, int32_t n_threads)
{
    (void)arg;
    size_t n_bytes = READ_BYTES / (size_t)n_threads;
    size_t stream_bytes = n_bytes / 8 / 64 * 64;
    const char *base = (const char *)read_buffer + (size_t)thread_idx * n_bytes;
    uint64_t sum = 0;
    for (size_t at = 0; at < stream_bytes; at += 64) {
        for (int s = 0; s < 8; s++) {
            uint64_t v;
            const char *p = base + (size_t)s * stream_bytes + at;
            __builtin_prefetch(p + 1024);
            memcpy(&v, p, sizeof(v));
            sum += v;
        }
    }
    read_sink[thread_idx % 64] = sum;
}

/* One stream per thread, left to the hardware's prefetchers. Which of the two is faster depends on the CPU. */
static void read_linear_thread(void *arg, int32_t thread_idx, int32_t n_threads)
{
    (void)arg;
    size_t n_bytes = READ_BYTES / (size_t)n_threads;
    const char *base = (const char *)read_buffer + (size_t)thread_idx * n_bytes;
    uint64_t sum = 0;
    for (size_t at = 0; at < n_bytes; at += 64) {
        uint64_t v;
        memcpy(&v, base + at, sizeof(v));
        sum += v;
    }
    read_sink[thread_idx % 64] = sum;
}

#if defined(__x86_64__)
enum { PEAK_LOOPS = 2000000 };

/* Twelve independent chains in one asm block: nothing for a compiler to spill. */
static void fma512_thread(void *arg, int32_t thread_idx, int32_t n_threads)
{
    (void)arg;
    (void)thread_idx;
    (void)n_threads;
    int64_t n = PEAK_LOOPS;
    __asm__ volatile(
        "1:\n\t"
        "vfmadd213ps %%zmm0, %%zmm1, %%zmm2\n\tvfmadd213ps %%zmm0, %%zmm1, %%zmm3\n\t"
        "vfmadd213ps %%zmm0, %%zmm1, %%zmm4\n\tvfmadd213ps %%zmm0, %%zmm1, %%zmm5\n\t"
        "vfmadd213ps %%zmm0, %%zmm1, %%zmm6\n\tvfmadd213ps %%zmm0, %%zmm1, %%zmm7\n\t"
        "vfmadd213ps %%zmm0, %%zmm1, %%zmm8\n\tvfmadd213ps %%zmm0, %%zmm1, %%zmm9\n\t"
        "vfmadd213ps %%zmm0, %%zmm1, %%zmm10\n\tvfmadd213ps %%zmm0, %%zmm1, %%zmm11\n\t"
        "vfmadd213ps %%zmm0, %%zmm1, %%zmm12\n\tvfmadd213ps %%zmm0, %%zmm1, %%zmm13\n\t"
        "dec %0\n\tjnz 1b"
        : "+r"(n)
        :
        : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
          "xmm11", "xmm12", "xmm13", "cc");
}

static void fma256_thread(void *arg, int32_t thread_idx, int32_t n_threads)
{
    (void)arg;
    (void)thread_idx;
    (void)n_threads;
    int64_t n = PEAK_LOOPS;
    __asm__ volatile(
        "1:\n\t"
        "vfmadd213ps %%ymm0, %%ymm1, %%ymm2\n\tvfmadd213ps %%ymm0, %%ymm1, %%ymm3\n\t"
        "vfmadd213ps %%ymm0, %%ymm1, %%ymm4\n\tvfmadd213ps %%ymm0, %%ymm1, %%ymm5\n\t"
        "vfmadd213ps %%ymm0, %%ymm1, %%ymm6\n\tvfmadd213ps %%ymm0, %%ymm1, %%ymm7\n\t"
        "vfmadd213ps %%ymm0, %%ymm1, %%ymm8\n\tvfmadd213ps %%ymm0, %%ymm1, %%ymm9\n\t"
        "vfmadd213ps %%ymm0, %%ymm1, %%ymm10\n\tvfmadd213ps %%ymm0, %%ymm1, %%ymm11\n\t"
        "vfmadd213ps %%ymm0, %%ymm1, %%ymm12\n\tvfmadd213ps %%ymm0, %%ymm1, %%ymm13\n\t"
        "dec %0\n\tjnz 1b"
        : "+r"(n)
        :
        : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
          "xmm11", "xmm12", "xmm13", "cc");
}

static void vnni_thread(void *arg, int32_t thread_idx, int32_t n_threads)
{
    (void)arg;
    (void)thread_idx;
    (void)n_threads;
    int64_t n = PEAK_LOOPS;
    __asm__ volatile("1:\n\t"
                     "vpdpbusd %%zmm0, %%zmm1, %%zmm2\n\tvpdpbusd %%zmm0, %%zmm1, %%zmm3\n\t"
                     "vpdpbusd %%zmm0, %%zmm1, %%zmm4\n\tvpdpbusd %%zmm0, %%zmm1, %%zmm5\n\t"
                     "vpdpbusd %%zmm0, %%zmm1, %%zmm6\n\tvpdpbusd %%zmm0, %%zmm1, %%zmm7\n\t"
                     "vpdpbusd %%zmm0, %%zmm1, %%zmm8\n\tvpdpbusd %%zmm0, %%zmm1, %%zmm9\n\t"
                     "vpdpbusd %%zmm0, %%zmm1, %%zmm10\n\tvpdpbusd %%zmm0, %%zmm1, %%zmm11\n\t"
                     "vpdpbusd %%zmm0, %%zmm1, %%zmm12\n\tvpdpbusd %%zmm0, %%zmm1, %%zmm13\n\t"
                     "dec %0\n\tjnz 1b"
                     : "+r"(n)
                     :
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "cc");
}
#endif

static double best_run_s(const bench *b, cpu_pool_fn fn)
{
    double best = 1e9;
    for (int i = 0; i < 7; i++) {
        double start = now_s();
        cpu_pool_run(b->ctx.pool, fn, NULL);
        best = PGD_MIN(best, now_s() - start);
    }
    return best;
}

static void measure_roofs(bench *b)
{
    int32_t n_threads = cpu_pool_n_threads(b->ctx.pool);
    double read_s = best_run_s(b, read_thread);
    double linear_s = best_run_s(b, read_linear_thread);
    b->read_gb_s = READ_BYTES * 1e-9 / PGD_MIN(read_s, linear_s);
#if defined(__x86_64__)
    double n_ops = 2.0 * 12 * PEAK_LOOPS * n_threads * 1e-9;
    if (b->isa >= CPU_ISA_AVX512)
        b->fma_gflop_s = n_ops * 16 / best_run_s(b, fma512_thread);
    else if (b->isa == CPU_ISA_AVX2)
        b->fma_gflop_s = n_ops * 8 / best_run_s(b, fma256_thread);
    if (b->isa == CPU_ISA_AVX512VNNI)
        b->int8_gop_s = n_ops * 64 / best_run_s(b, vnni_thread);
    else /* pmaddubsw and paddw: 4 operations a byte in two instructions, fma has 2 a float in one */
        b->int8_gop_s = b->fma_gflop_s * 2;
#endif
    printf("read %.1f GB/s, f32 fma %.0f GFLOP/s, int8 %.0f GOP/s (%d threads, %s)\n", b->read_gb_s,
           b->fma_gflop_s, b->int8_gop_s, (int)n_threads, cpu_features_name(b->isa));
}

/* --- models --- */

typedef struct shape {
    int32_t n_out;
    int32_t n_in;
    int32_t n_parts; /* weights of one call, each [n_out, n_in] */
} shape;

typedef struct model {
    const char *name;
    shape shapes[4]; /* qkv (as one), o, gate and up, down */
    int32_t n_layers;
} model;

static const model models[] = {
    {"smol", {{960, 576, 1}, {576, 576, 1}, {1536, 576, 2}, {576, 1536, 1}}, 30},
    {"1b", {{3072, 2048, 1}, {2048, 2048, 1}, {8192, 2048, 2}, {2048, 8192, 1}}, 4},
};

static packed_weight make_weight(const bench *b, void *dst, dtype type, int32_t n_out, int32_t n_in,
                                 double *pack_s)
{
    size_t n_bytes = dtype_row_bytes(type, n_in) * (size_t)n_out;
    uint8_t *src = mem_alloc_aligned(n_bytes, 64);
    packed_weight w = {.type = type, .n_out = n_out, .n_in = n_in};
    w.n_bytes = b->impl->packed_bytes(type, n_out, n_in);
    w.data = dst;
    PGD_ASSERT(src != NULL);
    for (size_t i = 0; i + 4 <= n_bytes; i += 4) {
        /* 0x2c2c as f16 is 0.065, as bf16 and f32 tiny but normal: fine for every position of a
         * scale */
        uint32_t v = (rng() & 0x03ff03ffu) | 0x2c002c00u;
        memcpy(src + i, &v, 4);
    }
    double start = now_s();
    b->impl->pack(&w, src, 0, n_out);
    *pack_s += now_s() - start;
    mem_free_aligned(src, n_bytes);
    return w;
}

static void run_model(const bench *b, const model *m, dtype type)
{
    static packed_weight w[MAX_MATRICES];
    static const int32_t row_counts[] = {1, 2, 4, 8, 16, 32, 128, 512};
    enum { MAX_ROWS = 512, MAX_N = 8192 };
    int32_t n = 0;
    double n_values = 0;
    double pack_s = 0;
    size_t layer_bytes = 0;
    for (int s = 0; s < 4; s++) {
        size_t part = b->impl->packed_bytes(type, m->shapes[s].n_out, m->shapes[s].n_in);
        if (part == 0) {
            printf("%-5s %-5s not for this shape\n", m->name, dtype_name((int32_t)type));
            return;
        }
        layer_bytes += part * (size_t)m->shapes[s].n_parts;
    }
    /* One block, as a worker has it: huge pages. */
    size_t all_bytes = layer_bytes * (size_t)m->n_layers;
    char *weights = mem_alloc_aligned(all_bytes, 64);
    PGD_ASSERT(weights != NULL);
    size_t used = 0;
    for (int32_t l = 0; l < m->n_layers; l++) {
        for (int s = 0; s < 4; s++) {
            for (int32_t p = 0; p < m->shapes[s].n_parts; p++) {
                w[n] = make_weight(b, weights + used, type, m->shapes[s].n_out, m->shapes[s].n_in,
                                   &pack_s);
                used += w[n].n_bytes;
                n_values += (double)w[n].n_out * w[n].n_in;
                n++;
            }
        }
    }
    double n_bytes = (double)all_bytes;
    float *x = mem_alloc_aligned((size_t)MAX_ROWS * MAX_N * sizeof(float), 64);
    float *out[2];
    for (int i = 0; i < 2; i++)
        out[i] = mem_alloc_aligned((size_t)MAX_ROWS * MAX_N * sizeof(float), 64);
    for (int i = 0; i < MAX_ROWS * MAX_N; i++)
        x[i] = (float)(int32_t)rng() * 0x1p-31f;
    printf("%-5s %-5s %6.1f MB packed at %.2f GB/s;", m->name, dtype_name((int32_t)type),
           n_bytes * 1e-6, n_bytes * 1e-9 / pack_s);
    bool is_float = type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16;
    double peak = is_float ? b->fma_gflop_s : b->int8_gop_s;
    for (size_t r = 0; r < PGD_ARRAY_LEN(row_counts); r++) {
        double best = 1e9;
        for (int round = 0; round < b->n_rounds; round++) {
            double start = now_s();
            int32_t at = 0;
            for (int32_t l = 0; l < m->n_layers; l++) {
                for (int s = 0; s < 4; s++) {
                    matmul_args args = {.x = x,
                                        .x_stride = m->shapes[s].n_in,
                                        .n_rows = row_counts[r],
                                        .n_in = m->shapes[s].n_in,
                                        .n_weights = m->shapes[s].n_parts};
                    for (int32_t p = 0; p < args.n_weights; p++) {
                        args.weights[p] = &w[at++];
                        args.out[p] = out[p];
                        args.out_stride[p] = m->shapes[s].n_out;
                    }
                    PGD_ASSERT(b->impl->run(&args, (kernel_ctx *)&b->ctx) == PGD_OK);
                }
            }
            best = PGD_MIN(best, now_s() - start);
        }
        double rows_s = row_counts[r] / best;
        if (row_counts[r] == 1)
            printf(" 1: %.0f/s %.2f bw;", rows_s, n_bytes * 1e-9 / best / b->read_gb_s);
        else
            printf(" %d: %.0f/s %.2f;", (int)row_counts[r], rows_s,
                   2 * n_values * rows_s * 1e-9 / peak);
        fflush(stdout);
    }
    printf("\n");
    mem_free_aligned(weights, all_bytes);
    mem_free_aligned(x, (size_t)MAX_ROWS * MAX_N * sizeof(float));
    for (int i = 0; i < 2; i++)
        mem_free_aligned(out[i], (size_t)MAX_ROWS * MAX_N * sizeof(float));
}

/* --- a mixture of experts --- */

enum { N_EXPERTS = 64, N_CHOSEN = 8, EXPERT_DIM = 2048, EXPERT_FFN = 768, MAX_TOKENS = 64 };

/* Random distinct experts for each of n_tokens rows, as moe_route sorts them; the number of experts
 * that have rows. */
static int32_t choose_experts(int32_t group_start[N_EXPERTS + 1], int32_t n_tokens)
{
    int32_t n_rows[N_EXPERTS] = {0}, n_filled = 0;
    for (int32_t t = 0; t < n_tokens; t++) {
        uint64_t taken = 0;
        for (int32_t k = 0; k < N_CHOSEN;) {
            uint32_t e = rng() % N_EXPERTS;
            if ((taken >> e & 1) != 0)
                continue;
            taken |= UINT64_C(1) << e;
            n_rows[e]++;
            k++;
        }
    }
    group_start[0] = 0;
    for (int32_t e = 0; e < N_EXPERTS; e++) {
        group_start[e + 1] = group_start[e] + n_rows[e];
        n_filled += n_rows[e] > 0;
    }
    return n_filled;
}

static void run_experts(const bench *b, dtype type)
{
    static const int32_t token_counts[] = {1, 2, 4, 16, MAX_TOKENS};
    static const int32_t shapes[2][2] = {{2 * EXPERT_FFN, EXPERT_DIM}, {EXPERT_DIM, EXPERT_FFN}};
    static packed_weight w[2][N_EXPERTS];
    size_t n_bytes[2], max_values = (size_t)MAX_TOKENS * N_CHOSEN * EXPERT_DIM;
    double pack_s = 0;
    for (int i = 0; i < 2; i++)
        n_bytes[i] = b->impl->packed_bytes(type, shapes[i][0], shapes[i][1]);
    size_t all_bytes = N_EXPERTS * (n_bytes[0] + n_bytes[1]), used = 0;
    char *weights = mem_alloc_aligned(all_bytes, 64);
    float *x = mem_alloc_aligned(max_values * sizeof(float), 64);
    float *out = mem_alloc_aligned(max_values * sizeof(float), 64);
    PGD_ASSERT(weights != NULL && x != NULL && out != NULL);
    for (int i = 0; i < 2; i++) {
        for (int32_t e = 0; e < N_EXPERTS; e++, used += n_bytes[i])
            w[i][e] = make_weight(b, weights + used, type, shapes[i][0], shapes[i][1], &pack_s);
    }
    for (size_t i = 0; i < max_values; i++)
        x[i] = (float)(int32_t)rng() * 0x1p-31f;
    bool is_float = type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16;
    double peak = is_float ? b->fma_gflop_s : b->int8_gop_s;
    printf("%-7s %-5s %6.1f MB;", "experts", dtype_name((int32_t)type), (double)all_bytes * 1e-6);
    for (size_t k = 0; k < PGD_ARRAY_LEN(token_counts); k++) {
        double best_bw = 0, best_ops = 0, best_rows_s = 0;
        for (int round = 0; round < 4 * b->n_rounds; round++) {
            int32_t group_start[N_EXPERTS + 1];
            int32_t n_filled = choose_experts(group_start, token_counts[k]);
            double values = 0, start = now_s();
            for (int i = 0; i < 2; i++) {
                matmul_args args = {.x = x,
                                    .x_stride = shapes[i][1],
                                    .n_rows = token_counts[k] * N_CHOSEN,
                                    .n_in = shapes[i][1],
                                    .n_weights = 1,
                                    .weights = {w[i]},
                                    .out = {out},
                                    .out_stride = {shapes[i][0]},
                                    .group_start = group_start,
                                    .n_groups = N_EXPERTS};
                PGD_ASSERT(b->impl->run(&args, (kernel_ctx *)&b->ctx) == PGD_OK);
                values += (double)args.n_rows * shapes[i][0] * shapes[i][1];
            }
            double s = now_s() - start;
            double moved = (double)n_filled * (double)(n_bytes[0] + n_bytes[1]);
            best_bw = PGD_MAX(best_bw, moved * 1e-9 / s / b->read_gb_s);
            best_ops = PGD_MAX(best_ops, 2 * values * 1e-9 / s / peak);
            best_rows_s = PGD_MAX(best_rows_s, token_counts[k] / s);
        }
        printf(" %d: %.0f/s %.2f bw %.2f;", (int)token_counts[k], best_rows_s, best_bw, best_ops);
        fflush(stdout);
    }
    printf("\n");
    mem_free_aligned(weights, all_bytes);
    mem_free_aligned(x, max_values * sizeof(float));
    mem_free_aligned(out, max_values * sizeof(float));
}

int main(int argc, char **argv)
{
    static const dtype all[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q8_0,
                                DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_0, DTYPE_Q5_1,
                                DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K, DTYPE_MXFP4};
    bench b = {.isa = cpu_features_best(), .n_rounds = 5};
    int32_t n_threads = 0;
    const char *only_model = NULL;
    int i = 1;
    for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
        const char *value = argv[i + 1];
        if (argv[i][1] == 't')
            n_threads = atoi(value);
        else if (argv[i][1] == 'r')
            b.n_rounds = atoi(value);
        else if (argv[i][1] == 'm')
            only_model = value;
        else if (argv[i][1] == 'c')
            clock_used = CLOCK_PROCESS_CPUTIME_ID;
        else if (argv[i][1] == 'i') {
            for (cpu_isa isa = CPU_ISA_REF; isa <= CPU_ISA_AVX512VNNI; isa++)
                b.isa = strcmp(value, cpu_features_name(isa)) == 0 ? isa : b.isa;
        }
    }
    b.impl = matmul_get_impl(b.isa);
    PGD_ASSERT(b.impl != NULL && b.isa != CPU_ISA_REF);
    PGD_ASSERT(cpu_pool_create(&b.ctx.pool, n_threads, true) == PGD_OK);
    b.ctx.workspace_bytes = b.impl->workspace_bytes(512, 8192, cpu_pool_n_threads(b.ctx.pool));
    b.ctx.workspace = mem_alloc_aligned(b.ctx.workspace_bytes, 64);
    read_buffer = mem_alloc_aligned(READ_BYTES, 64);
    PGD_ASSERT(b.ctx.workspace != NULL && read_buffer != NULL);
    memset(read_buffer, 1, READ_BYTES);
    printf("%s\n", cpu_features_cpu_name());
    measure_roofs(&b);
    for (size_t m = 0; m < PGD_ARRAY_LEN(models); m++) {
        if (only_model != NULL && strcmp(only_model, models[m].name) != 0)
            continue;
        for (size_t t = 0; t < PGD_ARRAY_LEN(all); t++) {
            bool wanted = i >= argc;
            for (int a = i; a < argc; a++)
                wanted |= dtype_parse(argv[a]) == all[t];
            if (wanted)
                run_model(&b, &models[m], all[t]);
        }
    }
    for (size_t t = 0; t < PGD_ARRAY_LEN(all); t++) {
        bool wanted = i >= argc;
        for (int a = i; a < argc; a++)
            wanted |= dtype_parse(argv[a]) == all[t];
        if (wanted && (only_model == NULL || strcmp(only_model, "experts") == 0))
            run_experts(&b, all[t]);
    }
    measure_roofs(&b);
    mem_free_aligned(read_buffer, READ_BYTES);
    mem_free_aligned(b.ctx.workspace, b.ctx.workspace_bytes);
    cpu_pool_destroy(b.ctx.pool);
    return 0;
}
