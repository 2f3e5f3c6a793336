/* Error answers in the OpenAI shape: {"error": {"message", "type", "param", "code"}}.
 *
 * Thread:  io
 */
#ifndef ENGINE_HTTP_HTTP_ERRORS_H
#define ENGINE_HTTP_HTTP_ERRORS_H

#include "common/strbuf.h"
#include "engine/http/http_conn.h"

const char *http_status_text(int status);
/* Statuses in a row from 0 on, for arrays; http_status_at gives -1 behind the last. */
int http_status_idx(int status);
int http_status_at(int idx);

/* Appends the object {"error": ...}. param may be NULL; code NULL = the status as a number. */
void http_error_append(strbuf *out, int status, const char *param, const char *code,
                       const char *message);
/* Answers a request that has not begun to stream; 429 and 503 carry Retry-After,
 * 401 WWW-Authenticate. */
void http_error_respond(http_conn *c, int status, const char *param, const char *fmt, ...)
    PGD_PRINTF(4, 5);
/* The same with a code such as "model_not_found" or "context_length_exceeded". */
void http_error_respond_code(http_conn *c, int status, const char *param, const char *code,
                             const char *message);
/* 405; allow is the header line, with its \r\n. */
void http_error_respond_method(http_conn *c, const char *allow, const char *message);
/* Of a 404 with code model_not_found: the model asked for, the one served. */
#define HTTP_ERROR_NO_MODEL "the model `%.200s` does not exist here; this server has `%.120s`"
void http_error_respond_no_model(http_conn *c, const char *asked, const char *served);

#endif
