/* One table of statuses: the reason phrase and the error type that clients switch on. */
#include "engine/http/http_errors.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct status_row {
    int status;
    const char *text;
    const char *type;
} status_row;

static const status_row rows[] = {
    {200, "OK", ""},
    {204, "No Content", ""},
    {400, "Bad Request", "invalid_request_error"},
    {401, "Unauthorized", "authentication_error"},
    {404, "Not Found", "not_found_error"},
    {405, "Method Not Allowed", "invalid_request_error"},
    {408, "Request Timeout", "invalid_request_error"},
    {413, "Content Too Large", "invalid_request_error"},
    {417, "Expectation Failed", "invalid_request_error"},
    {429, "Too Many Requests", "rate_limit_error"},
    {431, "Request Header Fields Too Large", "invalid_request_error"},
    {500, "Internal Server Error", "server_error"},
    {501, "Not Implemented", "not_implemented_error"},
    {503, "Service Unavailable", "unavailable_error"},
    {504, "Gateway Timeout", "timeout_error"},
    {499, "Client Closed Request", ""}, /* never sent: the client left before an answer began */
    {505, "HTTP Version Not Supported", "invalid_request_error"},
};

static const status_row *find_row(int status)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        if (rows[i].status == status)
            return &rows[i];
    }
    PGD_PANIC("HTTP status %d has no row", status);
}

int http_status_idx(int status)
{
    return (int)(find_row(status) - rows);
}

int http_status_at(int idx)
{
    return idx < (int)PGD_ARRAY_LEN(rows) ? rows[idx].status : -1;
}

const char *http_status_text(int status)
{
    return find_row(status)->text;
}

void http_error_append(strbuf *out, int status, const char *param, const char *code,
                       const char *message)
{
    strbuf_append_str(out, "{\"error\":{\"message\":");
    strbuf_append_json(out, message, __builtin_strlen(message));
    strbuf_appendf(out, ",\"type\":\"%s\",\"param\":", find_row(status)->type);
    if (param != NULL)
        strbuf_append_json(out, param, __builtin_strlen(param));
    else
        strbuf_append_str(out, "null");
    if (code != NULL)
        strbuf_appendf(out, ",\"code\":\"%s\"}}", code);
    else
        strbuf_appendf(out, ",\"code\":%d}}", status);
}

static void respond(http_conn *c, int status, const char *param, const char *code,
                    const char *message, const char *extra)
{
    strbuf b;
    strbuf_init(&b);
    http_error_append(&b, status, param, code, message);
    http_conn_respond(c, status, "application/json", extra, b.data, b.n_bytes);
    strbuf_deinit(&b);
}

void http_error_respond_code(http_conn *c, int status, const char *param, const char *code,
                             const char *message)
{
    const char *extra = NULL;
    if (status == 429 || status == 503)
        extra = "Retry-After: 1\r\n";
    else if (status == 401)
        extra = "WWW-Authenticate: Bearer\r\n";
    respond(c, status, param, code, message, extra);
}

void http_error_respond_method(http_conn *c, const char *allow, const char *message)
{
    respond(c, 405, NULL, NULL, message, allow);
}

void http_error_respond(http_conn *c, int status, const char *param, const char *fmt, ...)
{
    char message[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof(message), fmt, args);
    va_end(args);
    http_error_respond_code(c, status, param, NULL, message);
}

void http_error_respond_no_model(http_conn *c, const char *asked, const char *served)
{
    char message[480];
    snprintf(message, sizeof(message), HTTP_ERROR_NO_MODEL, asked, served);
    http_error_respond_code(c, 404, "model", "model_not_found", message);
}
