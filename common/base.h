/* Vocabulary of the whole tree: ids, attributes, assertions.
 *
 * Seen by C17 and by nvcc's C++17, so it stays in the common subset of both.
 * Thread:  any
 */
#ifndef COMMON_BASE_H
#define COMMON_BASE_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#    define PGD_BEGIN_C extern "C" {
#    define PGD_END_C   }
#    define PGD_RESTRICT
#else
#    define PGD_BEGIN_C
#    define PGD_END_C
#    define PGD_RESTRICT restrict
#endif

#define PGD_MUST_USE          __attribute__((warn_unused_result))
#define PGD_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define PGD_NORETURN          __attribute__((noreturn))
#define PGD_LIKELY(x)         __builtin_expect(!!(x), 1)
#define PGD_UNLIKELY(x)       __builtin_expect(!!(x), 0)
/* A hint that this line will be used soon; p may be any address, valid or not. */
#define PGD_PREFETCH(p)    __builtin_prefetch(p)
#define PGD_ARRAY_LEN(a)   (sizeof(a) / sizeof((a)[0]))
#define PGD_MIN(a, b)      ((a) < (b) ? (a) : (b))
#define PGD_MAX(a, b)      ((a) > (b) ? (a) : (b))
#define PGD_CEIL_DIV(a, b) (((a) + (b)-1) / (b))
#define PGD_ROUND_UP(a, b) (PGD_CEIL_DIV(a, b) * (b))
#define PGD_VERSION_STRING "0.1.0"

/* Limits that appear in more than one process; each is also a config key or a protocol field. */
#define PGD_MAX_KV_GROUPS    8    /* KV-cache groups of a hybrid model */
#define PGD_MAX_KV_LAYERS    512  /* attention layers with KV, cross attention counted apart */
#define PGD_MAX_DRAFT_TOKENS 31   /* draft tokens of one request in one step */
#define PGD_MAX_LOGPROBS     20   /* alternatives per position, the sampled token not counted */
#define PGD_MAX_STOP_IDS     64   /* stop_token_ids of one request, the model's own not counted */
#define PGD_MAX_LOGIT_BIAS   1024 /* entries of logit_bias of one request */

PGD_BEGIN_C

typedef int32_t token_id; /* -1 = none */
typedef int32_t block_id; /* -1 = none; 0 is the null block of the pool */
typedef int32_t slot_id;  /* block_id * block_size + offset; -1 = do not write */

/* Prints file, line and the formatted values to stderr and aborts. For bugs only, never for
 * outside data. */
PGD_NORETURN void pgd_panic(const char *file, int line, const char *fmt, ...) PGD_PRINTF(3, 4);

#define PGD_PANIC(...) pgd_panic(__FILE__, __LINE__, __VA_ARGS__)
#define PGD_ASSERT(cond)                              \
    do {                                              \
        if (PGD_UNLIKELY(!(cond)))                    \
            PGD_PANIC("assertion failed: %s", #cond); \
    } while (0)
/* As PGD_ASSERT, with a message that shows the values. */
#define PGD_ASSERTF(cond, ...)      \
    do {                            \
        if (PGD_UNLIKELY(!(cond)))  \
            PGD_PANIC(__VA_ARGS__); \
    } while (0)
/* O(n) integrity checks: debug and sanitizer builds only (-DPGD_DEBUG=1). */
#if defined(PGD_DEBUG) && PGD_DEBUG
#    define PGD_DASSERT(cond) PGD_ASSERT(cond)
#else
#    define PGD_DASSERT(cond) ((void)0)
#endif

PGD_END_C
#endif
