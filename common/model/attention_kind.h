/* What a layer attends to, and with that how long its KV blocks are needed.
 *
 *   FULL      every earlier token
 *   SLIDING   the last `window` tokens, the token itself included
 *   CHUNKED   earlier tokens of its own chunk of `window` tokens: positions >= p / window * window
 *   CROSS     the encoder's tokens, all of them (encoder-decoder models)
 * Values are on the wire. Thread: any
 */
#ifndef COMMON_MODEL_ATTENTION_KIND_H
#define COMMON_MODEL_ATTENTION_KIND_H

#include "common/base.h"

PGD_BEGIN_C

typedef enum attention_kind {
    ATTENTION_FULL = 0,
    ATTENTION_SLIDING = 1,
    ATTENTION_CHUNKED = 2,
    ATTENTION_CROSS = 3,
    ATTENTION_KIND_LAST = ATTENTION_CROSS
} attention_kind;

/* "full", "sliding window", "chunked local", "cross"; static storage. */
static inline const char *attention_kind_name(attention_kind kind)
{
    static const char *const names[] = {"full", "sliding window", "chunked local", "cross"};
    return (unsigned)kind < PGD_ARRAY_LEN(names) ? names[kind] : "unknown";
}

PGD_END_C
#endif
