/* One row per route. A known path with another method is 405 with Allow; HEAD goes where GET does
 * (the connection drops the body); OPTIONS is answered from the table. */
#include "engine/http/http_api.h"

#include <stdio.h>
#include <string.h>

#include "engine/http/http_errors.h"

typedef void (*api_fn)(http_api *api, http_conn *conn, const http_request *req);

typedef struct route {
    const char *path;
    const char *method;
    api_fn handle;
} route;

static const route routes[] = {
    {"/v1/completions", "POST", api_completions_handle},
    {"/v1/models", "GET", api_models_handle},
    {"/health", "GET", api_health_handle},
    {"/metrics", "GET", api_metrics_handle},
    {"/version", "GET", api_version_handle},
};

void http_api_handle(void *arg, http_conn *conn, const http_request *req)
{
    http_api *api = arg;
    api->n_requests++;
    if (strcmp(req->method, "OPTIONS") == 0 && strcmp(req->path, "*") == 0) {
        http_conn_respond(conn, 204, NULL, "Allow: GET, HEAD, POST, OPTIONS\r\n", NULL, 0);
        return;
    }
    for (size_t i = 0; i < PGD_ARRAY_LEN(routes); i++) {
        const route *r = &routes[i];
        if (strcmp(r->path, req->path) != 0)
            continue;
        bool is_get = strcmp(r->method, "GET") == 0;
        if (strcmp(r->method, req->method) == 0 || (is_get && req->is_head)) {
            r->handle(api, conn, req);
            return;
        }
        char allow[64];
        snprintf(allow, sizeof(allow), "Allow: %s%s, OPTIONS\r\n", r->method,
                 is_get ? ", HEAD" : "");
        if (strcmp(req->method, "OPTIONS") == 0) {
            http_conn_respond(conn, 204, NULL, allow, NULL, 0);
            return;
        }
        strbuf b;
        strbuf_init(&b);
        char message[160];
        snprintf(message, sizeof(message), "%.60s expects %s, got %.20s", r->path, r->method,
                 req->method);
        http_error_append(&b, 405, NULL, NULL, message);
        http_conn_respond(conn, 405, "application/json", allow, b.data, b.n_bytes);
        strbuf_deinit(&b);
        return;
    }
    http_error_respond(conn, 404, NULL,
                       "no such path: %.200s; this server has /v1/completions, /v1/models, "
                       "/health, /metrics and /version",
                       req->path);
}
