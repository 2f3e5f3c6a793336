/* Giving back much memory without stopping the loop: the kernel takes tens of milliseconds for
 * hundreds of megabytes, so that is done on the pool.
 *
 * Thread:  io
 */
#ifndef ENGINE_HTTP_POOL_FREE_H
#define ENGINE_HTTP_POOL_FREE_H

#include <uv.h>

#include "common/strbuf.h"

#define POOL_FREE_MIN_BYTES 1048576 /* less is freed at once */

/* As strbuf_deinit. */
void pool_free_strbuf(uv_loop_t *loop, strbuf *b);

#endif
