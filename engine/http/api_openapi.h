/* The OpenAPI 3.1 document, made from the table of routes and the table of completion fields.
 *
 * Thread:  io
 */
#ifndef ENGINE_HTTP_API_OPENAPI_H
#define ENGINE_HTTP_API_OPENAPI_H

/* Operations as the rows of the route table name them: JSON with ' for " and @name for what is
 * known at run time only. */
extern const char api_openapi_completions[];
extern const char api_openapi_models[];
extern const char api_openapi_model[];
extern const char api_openapi_tokenize[];
extern const char api_openapi_detokenize[];
extern const char api_openapi_reset[];
extern const char api_openapi_health[];
extern const char api_openapi_metrics[];
extern const char api_openapi_version[];
extern const char api_openapi_document[];

#endif
