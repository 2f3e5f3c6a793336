/* Speed of paged attention, set against merely reading the same keys and values in the same minute.
 *
 *   bench_attention [-t threads] [-r rounds] [-i isa] [-k f32|f16|bf16] [-c cpu]
 *
 * Each case is a step of a decoder of several layers, each with its own pages in random order, so
 * that short contexts come from where a step would find them. Printed: microseconds per layer, GB/s
 * of keys and values, that as a share of the plain read (for long contexts the roof), and GFLOP/s
 * (for prompts, where keys are read from caches, the figure that counts). The best of the rounds
 * counts.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/mem.h"
#include "kernels/ops.h"

enum { N_LAYERS = 8, BLOCK_SIZE = 16, MAX_SEQS = 32 };

typedef struct shape {
    const char *name;
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_dim;
} shape;

typedef struct load {
    const char *name;
    int32_t n_seqs;
    int32_t n_rows; /* of each sequence */
    int32_t n_context;
} load;

typedef struct bench {
    const kernel_ops *ops;
    kernel_ctx ctx;
    dtype kv_type;
    int32_t n_rounds;
    clockid_t clock;
} bench;

/* One case with its memory. */
typedef struct scene {
    attention_args args;
    int32_t n_blocks; /* of a layer */
    size_t layer_bytes;
    uint8_t *pages; /* [N_LAYERS] */
    block_id *table;
    int32_t query_start[MAX_SEQS + 1];
    int32_t n_context[MAX_SEQS];
    int32_t seq_row[MAX_SEQS];
    float *q;
    float *out;
} scene;

static const shape shapes[] = {{"smol", 9, 3, 64}, {"1b", 32, 8, 64}, {"8b", 32, 8, 128}};
static const load loads[] = {
    {"decode 1 x 128", 1, 1, 128},       {"decode 1 x 640", 1, 1, 640},
    {"decode 1 x 4096", 1, 1, 4096},     {"decode 16 x 160", 16, 1, 160},
    {"prompt 1 x 128", 1, 128, 128},     {"prompt 1 x 512", 1, 512, 512},
    {"chunk 256 of 2048", 1, 256, 2048},
};

static uint32_t rng(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static double now_s(const bench *b)
{
    struct timespec ts;
    clock_gettime(b->clock, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static void *alloc(size_t n_bytes)
{
    void *p = mem_alloc_aligned(n_bytes, 64);
    PGD_ASSERT(p != NULL);
    return p;
}

static void scene_init(scene *s, const bench *b, const shape *sh, const load *ld)
{
    memset(s, 0, sizeof(*s));
    kv_page_layout kv = {b->kv_type, sh->n_kv_heads, sh->head_dim, BLOCK_SIZE};
    int32_t blocks_per_seq = PGD_CEIL_DIV(ld->n_context, BLOCK_SIZE);
    int32_t n_rows = ld->n_seqs * ld->n_rows, width = sh->n_heads * sh->head_dim;
    s->n_blocks = ld->n_seqs * blocks_per_seq;
    s->layer_bytes = (size_t)s->n_blocks * kv_page_bytes(&kv);
    s->pages = alloc(N_LAYERS * s->layer_bytes);
    /* Small values of the type, whatever their exact size. */
    for (size_t i = 0; i + 4 <= N_LAYERS * s->layer_bytes; i += 4) {
        uint32_t v = (rng() & 0x83ff83ffu) | 0x38003800u;
        memcpy(s->pages + i, &v, 4);
    }
    s->table = alloc((size_t)s->n_blocks * sizeof(block_id));
    for (int32_t i = 0; i < s->n_blocks; i++) {
        int32_t j = (int32_t)(rng() % (uint32_t)(i + 1));
        s->table[i] = s->table[j];
        s->table[j] = i;
    }
    for (int32_t i = 0; i < ld->n_seqs; i++) {
        s->query_start[i + 1] = (i + 1) * ld->n_rows;
        s->n_context[i] = ld->n_context;
        s->seq_row[i] = i;
    }
    s->q = alloc((size_t)n_rows * (size_t)width * sizeof(float));
    s->out = alloc((size_t)n_rows * (size_t)width * sizeof(float));
    for (int32_t i = 0; i < n_rows * width; i++)
        s->q[i] = (float)(int32_t)rng() * 0x1p-31f;
    s->args = (attention_args){.out = s->out,
                               .out_stride = width,
                               .q = s->q,
                               .q_stride = width,
                               .n_heads = sh->n_heads,
                               .kv = kv,
                               .n_seqs = ld->n_seqs,
                               .query_start = s->query_start,
                               .n_context = s->n_context,
                               .seq_row = s->seq_row,
                               .block_table = s->table,
                               .block_table_stride = blocks_per_seq,
                               .scale = 1 / sqrtf((float)sh->head_dim)};
}

static void scene_deinit(scene *s, const load *ld)
{
    size_t n = (size_t)ld->n_seqs * (size_t)ld->n_rows * (size_t)s->args.q_stride * sizeof(float);
    mem_free_aligned(s->pages, N_LAYERS * s->layer_bytes);
    mem_free_aligned(s->table, (size_t)s->n_blocks * sizeof(block_id));
    mem_free_aligned(s->q, n);
    mem_free_aligned(s->out, n);
}

typedef struct reading {
    const uint8_t *at;
    size_t n_bytes;
    uint64_t sum[64];
} reading;

/* A line of each of four streams in turn. */
static void read_thread(void *arg, int32_t thread_idx, int32_t n_threads)
{
    reading *r = arg;
    size_t stream = r->n_bytes / (size_t)n_threads / 4 / 64 * 64;
    const uint8_t *at = r->at + (size_t)thread_idx * 4 * stream;
    uint64_t sum = 0;
    for (size_t i = 0; i < stream; i += 64) {
        for (size_t k = 0; k < 4; k++) {
            uint64_t v;
            memcpy(&v, at + k * stream + i, sizeof(v));
            sum += v;
        }
    }
    r->sum[thread_idx % 64] = sum;
}

static double time_read_s(const bench *b, const scene *s)
{
    reading r = {.at = s->pages, .n_bytes = N_LAYERS * s->layer_bytes};
    double best = 1e9;
    for (int32_t i = 0; i < b->n_rounds; i++) {
        double start = now_s(b);
        cpu_pool_run(b->ctx.pool, read_thread, &r);
        best = PGD_MIN(best, now_s(b) - start);
    }
    return best / N_LAYERS;
}

static double time_layer_s(bench *b, scene *s)
{
    double best = 1e9;
    for (int32_t i = 0; i < b->n_rounds; i++) {
        double start = now_s(b);
        for (int32_t layer = 0; layer < N_LAYERS; layer++) {
            s->args.pages = s->pages + (size_t)layer * s->layer_bytes;
            PGD_ASSERT(b->ops->attention(&s->args, &b->ctx) == PGD_OK);
        }
        best = PGD_MIN(best, now_s(b) - start);
    }
    return best / N_LAYERS;
}

static void run_case(bench *b, const shape *sh, const load *ld)
{
    scene s;
    scene_init(&s, b, sh, ld);
    attention_limits limits = {.max_rows = ld->n_seqs * ld->n_rows,
                               .max_seqs = ld->n_seqs,
                               .max_context = ld->n_context,
                               .n_heads = sh->n_heads,
                               .kv = s.args.kv,
                               .n_threads = cpu_pool_n_threads(b->ctx.pool)};
    b->ctx.workspace_bytes = PGD_MAX(b->ops->attention_workspace_bytes(&limits), 64);
    b->ctx.workspace = alloc(b->ctx.workspace_bytes);
    double layer_s = time_layer_s(b, &s), read_s = time_read_s(b, &s);
    /* Two products per key, dimension and head; a prompt's rows see half of their own keys. */
    double keys = ld->n_context - 0.5 * (ld->n_rows - 1);
    double flop = 4.0 * ld->n_seqs * ld->n_rows * keys * sh->n_heads * sh->head_dim;
    printf("%-5s %-18s %9.1f us %7.2f GB/s %5.2f of read %8.1f GFLOP/s\n", sh->name, ld->name,
           layer_s * 1e6, (double)s.layer_bytes * 1e-9 / layer_s, read_s / layer_s,
           flop * 1e-9 / layer_s);
    mem_free_aligned(b->ctx.workspace, b->ctx.workspace_bytes);
    scene_deinit(&s, ld);
}

int main(int argc, char **argv)
{
    bench b = {.kv_type = DTYPE_F16, .n_rounds = 15, .clock = CLOCK_MONOTONIC};
    cpu_isa isa = cpu_features_best();
    int32_t n_threads = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *value = argv[i + 1];
        char option = argv[i][0] == '-' ? argv[i][1] : 0;
        if (option == 't')
            n_threads = atoi(value);
        else if (option == 'r')
            b.n_rounds = PGD_MAX(atoi(value), 1);
        else if (option == 'k')
            b.kv_type = dtype_parse(value);
        else if (option == 'c')
            b.clock = CLOCK_PROCESS_CPUTIME_ID;
        else if (option == 'i') {
            for (cpu_isa l = CPU_ISA_REF; l <= CPU_ISA_AVX512VNNI; l++)
                isa = strcmp(value, cpu_features_name(l)) == 0 ? l : isa;
        }
    }
    PGD_ASSERT(ops_cpu_get(&b.ops, isa) == PGD_OK);
    PGD_ASSERT(cpu_pool_create(&b.ctx.pool, n_threads, true) == PGD_OK);
    printf("%s, %s, %d threads, KV %s\n", cpu_features_cpu_name(), b.ops->name,
           (int)cpu_pool_n_threads(b.ctx.pool), dtype_name((int32_t)b.kv_type));
    for (size_t i = 0; i < PGD_ARRAY_LEN(shapes); i++) {
        for (size_t j = 0; j < PGD_ARRAY_LEN(loads); j++)
            run_case(&b, &shapes[i], &loads[j]);
    }
    cpu_pool_destroy(b.ctx.pool);
    return 0;
}
