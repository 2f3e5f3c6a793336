/* Origins are compared whole, byte by byte, as browsers send them: no patterns, which have let
 * attackers' look-alike hosts in elsewhere. No Access-Control-Allow-Credentials: keys travel in a
 * header that the page sets itself, never in cookies. The headers that a preflight asks for are
 * allowed as asked, because clients add their own (x-stainless-...) and none has a meaning here
 * that the key does not guard. */
#include "engine/http/http_cors.h"

#include <string.h>

#define MAX_REQUESTED_HEADERS_BYTES 2048
#define PREFLIGHT_AGE_S             600

/* Next element of a comma list without blanks around it; false at the end. */
static bool next_item(const char **at, const char **item, size_t *n_bytes)
{
    *at += strspn(*at, " ,");
    *item = *at;
    *n_bytes = strcspn(*at, ",");
    *at += *n_bytes;
    while (*n_bytes > 0 && (*item)[*n_bytes - 1] == ' ')
        (*n_bytes)--;
    return *n_bytes > 0;
}

static bool is_star(const char *item, size_t n_bytes)
{
    return n_bytes == 1 && item[0] == '*';
}

pgd_err http_cors_check(const char *allowed_origins, pgd_why *why)
{
    const char *item;
    size_t n;
    for (const char *at = allowed_origins; next_item(&at, &item, &n);) {
        const char *host = strstr(item, "://");
        size_t n_scheme = host != NULL ? (size_t)(host - item) : n;
        bool is_origin =
            n_scheme > 0 && n_scheme + 3 < n && memchr(host + 3, '/', n - n_scheme - 3) == NULL;
        for (size_t i = 0; i < n; i++)
            is_origin = is_origin && item[i] > 0x20 && item[i] < 0x7F;
        if (!is_origin && !is_star(item, n))
            return pgd_fail(why, PGD_EINVAL,
                            "allowed_origins: expected * or origins such as "
                            "https://app.example:8443 (no path), got \"%.*s\"",
                            (int)n, item);
    }
    return PGD_OK;
}

static bool allows(const char *allowed_origins, const char *origin, bool *is_any)
{
    const char *item;
    size_t n;
    bool found = false;
    *is_any = false;
    for (const char *at = allowed_origins; next_item(&at, &item, &n);) {
        *is_any = *is_any || is_star(item, n);
        found = found || (strlen(origin) == n && memcmp(origin, item, n) == 0);
    }
    return found || *is_any;
}

void http_cors_append(strbuf *out, const char *allowed_origins, const http_cors_request *req)
{
    bool is_any;
    if (allowed_origins[0] == '\0')
        return;
    bool is_allowed = allows(allowed_origins, req->origin != NULL ? req->origin : "", &is_any);
    if (!is_any) /* also without an Origin: a cache must not give this answer to another page */
        strbuf_append_str(out, "Vary: Origin\r\n");
    if (req->origin == NULL || !is_allowed)
        return;
    strbuf_appendf(out, "Access-Control-Allow-Origin: %s\r\n", is_any ? "*" : req->origin);
    if (!req->is_options || req->requested_method == NULL) {
        strbuf_append_str(out, "Access-Control-Expose-Headers: X-Request-Id, Retry-After\r\n");
        return;
    }
    strbuf_appendf(out,
                   "Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS\r\n"
                   "Access-Control-Max-Age: %d\r\n",
                   PREFLIGHT_AGE_S);
    if (req->requested_headers != NULL &&
        strlen(req->requested_headers) <= MAX_REQUESTED_HEADERS_BYTES)
        strbuf_appendf(out, "Access-Control-Allow-Headers: %s\r\n", req->requested_headers);
}
