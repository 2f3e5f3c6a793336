/* Who may talk to the server: the API keys, and which paths need none.
 *
 * A key is 1 to 512 visible ASCII bytes, one per line of the key file; blank lines and lines that
 * begin with '#' are skipped. Only SHA-256 digests are kept, and a presented key is compared with
 * all of them in a time that does not tell which one came near. Nothing here logs a key.
 * Limits:  HTTP_AUTH_MAX_KEYS keys, HTTP_AUTH_MAX_KEY_BYTES each
 * Thread:  io
 */
#ifndef ENGINE_HTTP_HTTP_AUTH_H
#define ENGINE_HTTP_HTTP_AUTH_H

#include "common/err.h"

#define HTTP_AUTH_MAX_KEYS      1024
#define HTTP_AUTH_MAX_KEY_BYTES 512

typedef struct http_auth http_auth;

/* Starts without keys: everything is allowed. */
PGD_MUST_USE pgd_err http_auth_create(http_auth **out);
void http_auth_destroy(http_auth *a);

/* Reads the keys: from path, or if that is "" from $CREDENTIALS_DIRECTORY/api-keys when it exists.
 * With neither nothing changes, so that a key file that is no longer named does not open a server
 * that was closed. Warns of a file that everybody may read. On failure the keys are what they were.
 * Errors: PGD_EINVAL (cannot be read, no key in it, a bad line: told by number, never by text),
 * PGD_ENOMEM */
PGD_MUST_USE pgd_err http_auth_load(http_auth *a, const char *path, pgd_why *why);
/* 0: no key is needed. */
int32_t http_auth_n_keys(const http_auth *a);

/* authorization, x_api_key: values of these headers, NULL when absent; "Bearer KEY" (the scheme in
 * any case), or the key itself. Either is enough. */
bool http_auth_allows(const http_auth *a, const char *method, const char *path,
                      const char *authorization, const char *x_api_key);

#endif
