/* Tells systemd (Type=notify) about readiness and status, if NOTIFY_SOCKET is set; else does
 * nothing.
 *
 * Thread:  any
 */
#ifndef ENGINE_SD_NOTIFY_H
#define ENGINE_SD_NOTIFY_H

/* message: "READY=1\nSTATUS=..." as of sd_notify(3). */
void sd_notify_send(const char *message);

#endif
