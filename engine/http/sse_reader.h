/* Server-sent events out of a byte stream that may be cut anywhere.
 *
 * An event is the `data` lines before an empty line, joined by \n; other fields and comments are
 * skipped. Lines end in \n or \r\n. What a stream leaves unfinished at its end is no event.
 * Limits:  max_event_bytes for an event and for a line; beyond it feed answers false for good
 * Owns:    its buffers
 * Thread:  one at a time
 */
#ifndef ENGINE_HTTP_SSE_READER_H
#define ENGINE_HTTP_SSE_READER_H

#include "common/strbuf.h"

/* data: the event, not NUL-terminated; a borrow for the call. False stops the feeding. */
typedef bool (*sse_event_fn)(void *arg, const char *data, size_t n_bytes);

typedef struct sse_reader {
    strbuf line;  /* begun in an earlier feed */
    strbuf event; /* data lines so far */
    size_t max_event_bytes;
    bool has_data;
    bool is_stopped;
} sse_reader;

void sse_reader_init(sse_reader *r, size_t max_event_bytes);
void sse_reader_deinit(sse_reader *r);
/* For the next stream; buffers are kept. */
void sse_reader_reset(sse_reader *r);
/* False: an event was too large, memory ran out or fn said stop. */
bool sse_reader_feed(sse_reader *r, const char *data, size_t n_bytes, sse_event_fn fn, void *arg);

#endif
