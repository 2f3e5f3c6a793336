/* The routes: which handler answers which path and method.
 *
 * Thread:  io
 */
#ifndef ENGINE_HTTP_HTTP_API_H
#define ENGINE_HTTP_HTTP_API_H

#include "engine/engine.h"
#include "engine/http/http_conn.h"
#include "engine/http/http_metrics.h"
#include "engine/http/http_server.h"

#define HTTP_API_MAX_UNKNOWN 64

/* What handlers share. */
typedef struct http_api {
    engine *engine;
    http_server *server;
    bool draining;
    int64_t started_s;   /* wall clock */
    uint64_t started_us; /* monotonic */
    uint64_t n_refused_queue;
    int32_t n_intakes;   /* completions being read and tokenized on the pool */
    int32_t n_renders;   /* prompts and whole answers being rendered there */
    int32_t n_text_jobs; /* texts and ids being translated on the pool */
    uint64_t unknown_fields[HTTP_API_MAX_UNKNOWN]; /* [n_unknown_fields] hashes of logged names */
    int32_t n_unknown_fields;
    http_metrics metrics;
} http_api;

/* What the pool works on for requests: each will still be answered. */
static inline int32_t http_api_n_pool_jobs(const http_api *api)
{
    return api->n_intakes + api->n_renders + api->n_text_jobs;
}

/* An http_handler_fn with arg = http_api *. */
void http_api_handle(void *arg, http_conn *conn, const http_request *req);
/* An http_answered_fn with arg = http_api *. */
void http_api_answered(void *arg, const access_entry *entry);
/* Path of a route as OpenAPI writes it ("/v1/models/{model}"), NULL behind the last. */
const char *http_api_route_path(int route_idx);
const char *http_api_route_method(int route_idx);
/* See api_openapi.h. */
const char *http_api_route_operation(int route_idx);

/* api_completions.c */
void api_completions_handle(http_api *api, http_conn *conn, const http_request *req);
/* api_admin.c */
void api_health_handle(http_api *api, http_conn *conn, const http_request *req);
void api_models_handle(http_api *api, http_conn *conn, const http_request *req);
void api_model_handle(http_api *api, http_conn *conn, const http_request *req);
void api_version_handle(http_api *api, http_conn *conn, const http_request *req);
void api_reset_prefix_cache_handle(http_api *api, http_conn *conn, const http_request *req);
/* api_openapi.c */
void api_openapi_handle(http_api *api, http_conn *conn, const http_request *req);
/* api_metrics.c */
void api_metrics_handle(http_api *api, http_conn *conn, const http_request *req);
/* api_tokenize.c */
void api_tokenize_handle(http_api *api, http_conn *conn, const http_request *req);
void api_detokenize_handle(http_api *api, http_conn *conn, const http_request *req);

#endif
