/* One line per request: who asked is told by its id, what it asked by path alone (never the query,
 * which may hold a key, nor any text).
 *
 *   access: method=POST path=/v1/completions status=200 bytes=412 ms=38.2 id=4f.. prompt_tokens=5
 *   output_tokens=16
 *
 * Thread:  io
 */
#ifndef ENGINE_HTTP_ACCESS_LOG_H
#define ENGINE_HTTP_ACCESS_LOG_H

#include "common/base.h"

#define ACCESS_LOG_LEFT 499 /* told as status when the client left before an answer began */

typedef struct access_entry {
    const char *id;
    const char *method;
    const char *path;
    int status;
    uint64_t n_body_bytes; /* of the request */
    uint64_t n_bytes;      /* of the answer, header and framing included, as far as it was sent */
    uint64_t duration_us;
    int64_t n_prompt_tokens; /* -1 = not a completion */
    int64_t n_output_tokens;
    bool left_early; /* the client was gone before the answer was out */
} access_entry;

void access_log_write(const access_entry *e);

#endif
