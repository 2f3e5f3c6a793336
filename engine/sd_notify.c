/* Linking libsystemd for these few datagrams would be its only use. */
#include "engine/sd_notify.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define SEND_TIMEOUT_S 5

static void send_message(const char *message, int flags)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    struct timeval timeout = {.tv_sec = SEND_TIMEOUT_S};
    if (path == NULL || (path[0] != '/' && path[0] != '@') || strlen(path) >= sizeof(addr.sun_path))
        return;
    memcpy(addr.sun_path, path, strlen(path));
    if (path[0] == '@')
        addr.sun_path[0] = '\0'; /* abstract name */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
    (void)!sendto(fd, message, strlen(message), flags | MSG_NOSIGNAL, (struct sockaddr *)&addr,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path)));
    close(fd);
}

void sd_notify_send(const char *message)
{
    send_message(message, 0);
}

void sd_notify_ping(void)
{
    send_message("WATCHDOG=1", MSG_DONTWAIT);
}

/* A positive decimal number and nothing else, or 0. */
static uint64_t read_number(const char *text)
{
    char *end;
    if (text == NULL || text[0] < '0' || text[0] > '9')
        return 0;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    return *end == '\0' && errno == 0 ? v : 0;
}

uint64_t sd_notify_watchdog_us(void)
{
    const char *pid = getenv("WATCHDOG_PID");
    if (pid != NULL && read_number(pid) != (uint64_t)getpid())
        return 0;
    return read_number(getenv("WATCHDOG_USEC"));
}
