/* One array over everything that is told apart: what comes from outside (path, method) is mapped to
 * an index first, so that nobody can grow it. */
#include "engine/http/http_metrics.h"

#include <string.h>

#include "engine/http/http_errors.h"

static const double duration_bounds[] = {0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                                         1,     2.5,   5,    10,    30,   60,  120,  300};
static const char *const methods[HTTP_METRICS_MAX_METHODS] = {"GET", "POST", "HEAD", "OPTIONS",
                                                              "other"};

void http_metrics_init(http_metrics *m)
{
    memset(m, 0, sizeof(*m));
    for (int i = 0; i < HTTP_METRICS_MAX_ROUTES; i++)
        histogram_init(&m->duration_s[i], duration_bounds, PGD_ARRAY_LEN(duration_bounds));
}

void http_metrics_note(http_metrics *m, int route_idx, const access_entry *e)
{
    int method = 0;
    while (method < HTTP_METRICS_MAX_METHODS - 1 && strcmp(methods[method], e->method) != 0)
        method++;
    int status = http_status_idx(e->status);
    PGD_ASSERTF(route_idx >= 0 && route_idx < HTTP_METRICS_MAX_ROUTES && status >= 0 &&
                    status < HTTP_METRICS_MAX_STATUSES,
                "route %d, status %d", route_idx, e->status);
    m->n_answers[route_idx][method][status]++;
    m->n_request_bytes += e->n_body_bytes;
    m->n_answer_bytes += e->n_bytes;
    histogram_add(&m->duration_s[route_idx], (double)e->duration_us * 1e-6);
}

const char *http_metrics_method(int method_idx)
{
    return methods[method_idx];
}
