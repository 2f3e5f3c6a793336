/* Which web pages may use this server from a browser (CORS).
 *
 * Nothing is allowed unless configured: a page on any site that a user visits could otherwise read
 * from a server on that user's own machine.
 * Thread:  any
 */
#ifndef ENGINE_HTTP_HTTP_CORS_H
#define ENGINE_HTTP_HTTP_CORS_H

#include "common/strbuf.h"

/* Checks a list as of allowed_origins: "" (none), "*" (every one), or origins such as
 * "https://app.example:8443" separated by commas. */
PGD_MUST_USE pgd_err http_cors_check(const char *allowed_origins, pgd_why *why);

/* What a request says of where it comes from; NULL = header absent. */
typedef struct http_cors_request {
    const char *origin;            /* Origin */
    const char *requested_method;  /* Access-Control-Request-Method: a preflight, with OPTIONS */
    const char *requested_headers; /* Access-Control-Request-Headers */
    bool is_options;
} http_cors_request;

/* Appends the header lines of the answer, each ending in \r\n; none when no origin is configured. */
void http_cors_append(strbuf *out, const char *allowed_origins, const http_cors_request *req);

#endif
