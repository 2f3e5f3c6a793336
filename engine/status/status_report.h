/* A server's state for people and for scripts. Rates are of the time between two states of one
 * server; a figure that the server does not tell is left out of the text and null in the JSON.
 *
 * Thread:  any
 */
#ifndef ENGINE_STATUS_STATUS_REPORT_H
#define ENGINE_STATUS_STATUS_REPORT_H

#include "common/strbuf.h"
#include "engine/status/server_status.h"

/* Lines, each ending in \n. */
void status_report_text(strbuf *out, const server_status *now, const server_status *before,
                        const char *url);
/* One object without a newline. */
void status_report_json(strbuf *out, const server_status *now, const server_status *before,
                        const char *url);

#endif
