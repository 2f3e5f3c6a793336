/* What a load generator must know of one event of a streamed completion, read without building a
 * tree: it runs once per chunk of a thousand streams.
 *
 * Understands the events of /v1/completions and of chat completions.
 * Thread:  any
 */
#ifndef ENGINE_BENCH_STREAM_EVENT_H
#define ENGINE_BENCH_STREAM_EVENT_H

#include "common/err.h"

typedef struct stream_event {
    bool is_done;     /* [DONE] */
    bool has_text;    /* a choice with text that is not empty, or with token ids */
    bool is_finished; /* a choice with a finish_reason */
    bool has_usage;
    int64_t n_prompt_tokens; /* of usage; 0 when it does not tell */
    int64_t n_completion_tokens;
    int64_t n_cached_tokens;
    const char *
        error; /* the error object's message as it stands in the JSON; borrow of data, NULL = none */
    size_t n_error_bytes;
} stream_event;

/* False when data is not a JSON object (or [DONE]). Members of another type than expected count as
 * absent. */
PGD_MUST_USE bool stream_event_read(stream_event *out, const char *data, size_t n_bytes);

#endif
