/* systemd's notification protocol (Type=notify): one datagram per message to NOTIFY_SOCKET; without
 * that variable nothing is sent.
 *
 * Thread:  any
 */
#ifndef ENGINE_SD_NOTIFY_H
#define ENGINE_SD_NOTIFY_H

#include "common/base.h"

/* message: "READY=1\nSTATUS=..." as of sd_notify(3). Waits a few seconds at most when the service
 * manager does not read. */
void sd_notify_send(const char *message);

/* How often WATCHDOG=1 is expected of this process; 0 = never. */
uint64_t sd_notify_watchdog_us(void);
/* Sends WATCHDOG=1; never waits. */
void sd_notify_ping(void);

#endif
