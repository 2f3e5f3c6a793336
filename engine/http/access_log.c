/* Probes come every few seconds from every load balancer and monitor: they are logged at debug, so
 * that the lines of real requests stay together. */
#include "engine/http/access_log.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/log.h"

static bool is_probe(const char *path)
{
    return strcmp(path, "/health") == 0 || strcmp(path, "/metrics") == 0;
}

void access_log_write(const access_entry *e)
{
    log_level level = is_probe(e->path) ? LOG_DEBUG : LOG_INFO;
    char tokens[80] = "";
    if (!log_enabled(level))
        return;
    if (e->n_prompt_tokens >= 0)
        snprintf(tokens, sizeof(tokens), " prompt_tokens=%" PRId64 " output_tokens=%" PRId64,
                 e->n_prompt_tokens, e->n_output_tokens);
    log_write(level, "access",
              "method=%s path=%.200s status=%d bytes=%" PRIu64 " ms=%.1f id=%s%s%s", e->method,
              e->path, e->status, e->n_bytes, (double)e->duration_us * 1e-3, e->id, tokens,
              e->left_early ? " left_early=1" : "");
}
