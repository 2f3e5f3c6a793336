/* A socket in the place of systemd's: receives what sd_notify sends. */
#ifndef TESTS_UNIT_NOTIFY_RIG_H
#define TESTS_UNIT_NOTIFY_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct notify_rig {
    int fd;
    char path[64];
    char message[1024]; /* of the last notify_rig_receive */
} notify_rig;

static inline void notify_rig_open(notify_rig *r)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(r->path, sizeof(r->path), "/tmp/paged-test-notify-%ld", (long)getpid());
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", r->path);
    unlink(r->path);
    r->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    assert_true(r->fd >= 0);
    assert_int_equal(bind(r->fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    setenv("NOTIFY_SOCKET", r->path, 1);
}

static inline void notify_rig_close(notify_rig *r)
{
    close(r->fd);
    unlink(r->path);
    unsetenv("NOTIFY_SOCKET");
}

/* The next message, "" when there is none. */
static inline const char *notify_rig_receive(notify_rig *r)
{
    ssize_t n = recv(r->fd, r->message, sizeof(r->message) - 1, 0);
    r->message[n > 0 ? n : 0] = '\0';
    return r->message;
}

#endif
