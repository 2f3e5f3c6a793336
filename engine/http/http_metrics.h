/* Counts of answers: by route, method and status, with durations and sizes.
 *
 * Thread:  io
 */
#ifndef ENGINE_HTTP_HTTP_METRICS_H
#define ENGINE_HTTP_HTTP_METRICS_H

#include "engine/histogram.h"
#include "engine/http/access_log.h"

#define HTTP_METRICS_MAX_ROUTES   16 /* paths that are no route included, as the last one */
#define HTTP_METRICS_MAX_METHODS  5
#define HTTP_METRICS_MAX_STATUSES 32

typedef struct http_metrics {
    uint64_t n_answers[HTTP_METRICS_MAX_ROUTES][HTTP_METRICS_MAX_METHODS]
                      [HTTP_METRICS_MAX_STATUSES];
    histogram duration_s[HTTP_METRICS_MAX_ROUTES];
    uint64_t n_request_bytes; /* of bodies */
    uint64_t n_answer_bytes;
} http_metrics;

void http_metrics_init(http_metrics *m);
void http_metrics_note(http_metrics *m, int route_idx, const access_entry *e);
/* Name of a method by its index, "other" last; static storage. */
const char *http_metrics_method(int method_idx);

#endif
