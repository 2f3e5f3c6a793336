/* A random cycle through all lines of a buffer makes each read wait for the one before it, and gives
 * no prefetcher anything to go by. Best of several short passes: other load only ever slows down. */
#include "engine/bench/machine_speed.h"

#include "common/clock.h"
#include "common/hash.h"
#include "common/mem.h"

#define LINE_WORDS  8 /* 64 bytes */
#define LARGE_BYTES ((size_t)256 << 20)
#define SMALL_BYTES ((size_t)512 << 10)
#define N_READS     200000
#define N_PASSES    3

/* Sattolo's shuffle: one cycle over all lines. */
static void link_lines(uint64_t *words, size_t n_lines)
{
    for (size_t i = 0; i < n_lines; i++)
        words[i * LINE_WORDS] = i;
    for (size_t i = n_lines - 1; i > 0; i--) {
        size_t k = hash_u64(i) % i;
        uint64_t next = words[i * LINE_WORDS];
        words[i * LINE_WORDS] = words[k * LINE_WORDS];
        words[k * LINE_WORDS] = next;
    }
}

static double read_ns(uint64_t *words, size_t n_bytes)
{
    double best_ns = 1e9;
    uint64_t at = 0;
    link_lines(words, n_bytes / (LINE_WORDS * sizeof *words));
    for (int pass = 0; pass < N_PASSES; pass++) {
        uint64_t start = clock_now_ns();
        for (int i = 0; i < N_READS; i++)
            at = words[at * LINE_WORDS];
        double ns = (double)(clock_now_ns() - start) / N_READS;
        best_ns = PGD_MIN(best_ns, ns);
    }
    words[1] = at; /* so that the reads are not left out */
    return best_ns;
}

static double read_gb_s(uint64_t *words)
{
    double best_ns = 1e18;
    uint64_t sum = 0;
    size_t n_words = LARGE_BYTES / sizeof *words;
    for (int pass = 0; pass < N_PASSES; pass++) {
        uint64_t start = clock_now_ns();
        for (size_t i = 0; i < n_words; i += 4)
            sum += words[i] ^ words[i + 1] ^ words[i + 2] ^ words[i + 3];
        double ns = (double)(clock_now_ns() - start);
        best_ns = PGD_MIN(best_ns, ns);
    }
    words[1] = sum;
    return (double)LARGE_BYTES / best_ns;
}

pgd_err machine_speed_measure(machine_speed *out)
{
    uint64_t *words = mem_alloc_aligned(LARGE_BYTES, 64);
    if (words == NULL)
        return PGD_ENOMEM;
    out->cache_read_ns = read_ns(words, SMALL_BYTES);
    out->random_read_ns = read_ns(words, LARGE_BYTES);
    out->read_gb_s = read_gb_s(words);
    mem_free_aligned(words, LARGE_BYTES);
    return PGD_OK;
}
