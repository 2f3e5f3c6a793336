/* `paged status --events`.
 *
 * Thread:  the main thread
 */
#ifndef ENGINE_CMD_STATUS_EVENTS_H
#define ENGINE_CMD_STATUS_EVENTS_H

#include "engine/http/http_client.h"

#define CMD_STATUS_EVENTS_URL_BYTES 400

/* Prints events as they come, until interrupted or the server goes. Returns the exit status. topic
 * NULL: any. */
int cmd_status_events_print(const char *url, const char *topic, bool is_json);
/* Where the server says it publishes them, as seen from here: an address for all interfaces becomes
 * that of the server. */
void cmd_status_events_url(char out[CMD_STATUS_EVENTS_URL_BYTES], const char *told,
                           const http_target *server);

#endif
