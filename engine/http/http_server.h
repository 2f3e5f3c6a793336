/* Listening sockets, the set of connections, and the API keys that they ask for.
 *
 * bind happens at create, before any model is loaded: a busy port is told within milliseconds.
 * Accepting begins at http_server_start, also while the model loads (handlers answer 503 then).
 * Sockets that systemd passes (LISTEN_FDS) take the place of host, port and uds; their clients wait
 * in the kernel until http_server_accept_inherited, so that the one whose connection started the
 * service gets its answer.
 * Thread:  io
 */
#ifndef ENGINE_HTTP_HTTP_SERVER_H
#define ENGINE_HTTP_HTTP_SERVER_H

#include <uv.h>

#include "config/config.h"
#include "engine/http/http_conn.h"

typedef struct http_server http_server;

/* Called for each complete request; must answer now or later, exactly once (see http_conn.h). */
typedef void (*http_handler_fn)(void *arg, http_conn *conn, const http_request *req);

/* Called when an answer has ended; of each request exactly once, refused ones included. */
typedef void (*http_answered_fn)(void *arg, const access_entry *entry);

PGD_MUST_USE pgd_err http_server_create(http_server **out, uv_loop_t *loop, const config *cfg,
                                        http_handler_fn handler, http_answered_fn answered,
                                        void *arg, pgd_why *why);
PGD_MUST_USE pgd_err http_server_start(http_server *s, pgd_why *why);
/* Begins to accept on sockets of systemd; does nothing without them or when called again. */
void http_server_accept_inherited(http_server *s);
/* Reads the API keys again; on failure the old ones stay. n_keys: how many there are now. */
PGD_MUST_USE pgd_err http_server_load_keys(http_server *s, const config *cfg, int32_t *n_keys,
                                           pgd_why *why);
/* Of the first listening socket: "http://127.0.0.1:8000" or "unix:/path"; borrow until destroy. */
const char *http_server_address(const http_server *s);
/* Stops listening, once the clients that wait in the kernel are in. Idle connections close now, busy
 * ones after their answer; a first request, or one that has begun to arrive, may come within
 * grace_us (it is handed on like any other). Called again it can only shorten that. */
void http_server_drain(http_server *s, uint64_t grace_us);
/* Closes everything; on_closed is called when no handle is left, then destroy. */
void http_server_close(http_server *s, void (*on_closed)(void *arg), void *arg);
void http_server_destroy(http_server *s);
int32_t http_server_n_connections(const http_server *s);
/* Some connection's answer is not out yet, or a drain still waits for its request. */
bool http_server_is_busy(const http_server *s);
/* 0: no key is needed. */
int32_t http_server_n_keys(const http_server *s);
/* Borrow until destroy. */
const http_counters *http_server_get_counters(const http_server *s);

#endif
