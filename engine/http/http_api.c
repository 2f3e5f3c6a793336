/* One row per route. A path that ends in {name} takes everything behind the last fixed slash, further
 * slashes included, and its handler undoes percent-encoding. A known path with another method is 405
 * with Allow; HEAD goes where GET does (the connection drops the body); OPTIONS is answered from the
 * table. */
#include "engine/http/http_api.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "engine/http/api_openapi.h"
#include "engine/http/http_errors.h"

typedef void (*api_fn)(http_api *api, http_conn *conn, const http_request *req);

typedef struct route {
    const char *path;
    const char *method;
    api_fn handle;
    const char *operation; /* for the OpenAPI document */
} route;

static const route routes[] = {
    {"/v1/completions", "POST", api_completions_handle, api_openapi_completions},
    {"/v1/models", "GET", api_models_handle, api_openapi_models},
    {"/v1/models/{model}", "GET", api_model_handle, api_openapi_model},
    {"/tokenize", "POST", api_tokenize_handle, api_openapi_tokenize},
    {"/detokenize", "POST", api_detokenize_handle, api_openapi_detokenize},
    {"/reset_prefix_cache", "POST", api_reset_prefix_cache_handle, api_openapi_reset},
    {"/health", "GET", api_health_handle, api_openapi_health},
    {"/metrics", "GET", api_metrics_handle, api_openapi_metrics},
    {"/version", "GET", api_version_handle, api_openapi_version},
    {"/openapi.json", "GET", api_openapi_handle, api_openapi_document},
};

static bool matches(const route *r, const char *path)
{
    const char *name = strchr(r->path, '{');
    if (name == NULL)
        return strcmp(r->path, path) == 0;
    size_t n_fixed = (size_t)(name - r->path);
    return strncmp(r->path, path, n_fixed) == 0 && path[n_fixed] != '\0';
}

const char *http_api_route_path(int route_idx)
{
    return route_idx < (int)PGD_ARRAY_LEN(routes) ? routes[route_idx].path : NULL;
}

const char *http_api_route_method(int route_idx)
{
    return routes[route_idx].method;
}

const char *http_api_route_operation(int route_idx)
{
    return routes[route_idx].operation;
}

void http_api_answered(void *arg, const access_entry *entry)
{
    static_assert(PGD_ARRAY_LEN(routes) < HTTP_METRICS_MAX_ROUTES, "the last one is for others");
    http_api *api = arg;
    int idx = 0;
    while (idx < (int)PGD_ARRAY_LEN(routes) && !matches(&routes[idx], entry->path))
        idx++;
    http_metrics_note(&api->metrics, idx, entry);
}

static void respond_no_path(http_conn *conn, const char *path)
{
    char list[512] = "";
    size_t used = 0;
    for (size_t i = 0; i < PGD_ARRAY_LEN(routes); i++)
        used += (size_t)snprintf(list + used, sizeof(list) - used, " %s", routes[i].path);
    PGD_ASSERT(used < sizeof(list));
    http_error_respond(conn, 404, NULL, "no such path: %.200s; this server has%s", path, list);
}

void http_api_handle(void *arg, http_conn *conn, const http_request *req)
{
    http_api *api = arg;
    if (strcmp(req->method, "OPTIONS") == 0 && strcmp(req->path, "*") == 0) {
        http_conn_respond(conn, 204, NULL, "Allow: GET, HEAD, POST, OPTIONS\r\n", NULL, 0);
        return;
    }
    for (size_t i = 0; i < PGD_ARRAY_LEN(routes); i++) {
        const route *r = &routes[i];
        if (!matches(r, req->path))
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
        char message[160];
        snprintf(message, sizeof(message), "%.60s expects %s, got %.20s", r->path, r->method,
                 req->method);
        http_error_respond_method(conn, allow, message);
        return;
    }
    respond_no_path(conn, req->path);
}
