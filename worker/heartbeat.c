/* One poll() with half a second as its clock: nothing else wakes this thread. The process ends by
 * _exit: the main thread may be in the middle of a step, and nothing of it is worth keeping. */
#include "worker/heartbeat.h"

#include <errno.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/log.h"
#include "common/mem.h"
#include "common/thread.h"
#include "proto/control.h"

#define PERIOD_MS 500

struct heartbeat {
    heartbeat_opts opts;
    int stop_fd;
    pthread_t thread;
};

static void exit_gone(const char *how)
{
    log_info("worker", "the engine is gone (%s), exiting", how);
    _exit(0);
}

static void run(void *arg)
{
    heartbeat *h = arg;
    struct pollfd fds[3] = {{.fd = h->stop_fd, .events = POLLIN},
                            {.fd = h->opts.stdin_fd, .events = POLLIN},
                            {.fd = engine_link_get_lost_fd(h->opts.link), .events = POLLIN}};
    for (;;) {
        int n = poll(fds, PGD_ARRAY_LEN(fds), PERIOD_MS);
        if (n < 0 && errno != EINTR)
            exit_gone("poll failed");
        if (n > 0 && fds[0].revents != 0)
            return;
        if (n > 0 && fds[2].revents != 0)
            exit_gone("message pipe closed");
        if (n > 0 && fds[1].revents != 0) {
            char byte;
            if (read(fds[1].fd, &byte, 1) <= 0)
                exit_gone("stdin closed");
        }
        heartbeat_msg msg = {.progress = __atomic_load_n(h->opts.progress, __ATOMIC_RELAXED),
                             .last_step_id =
                                 __atomic_load_n(h->opts.last_step_id, __ATOMIC_RELAXED)};
        /* A full queue means that the engine does not read just now; the next beat says the same
         * and more. */
        pgd_err err =
            engine_link_send(h->opts.link, WIRE_HEARTBEAT, &control_heartbeat_record, &msg, false);
        if (err != PGD_OK && err != PGD_EAGAIN)
            exit_gone(pgd_err_text(err));
    }
}

pgd_err heartbeat_start(heartbeat **out, const heartbeat_opts *opts)
{
    heartbeat *h = mem_calloc(1, sizeof *h);
    if (h == NULL)
        return PGD_ENOMEM;
    h->opts = *opts;
    h->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pgd_err err = h->stop_fd < 0 ? PGD_EIO : thread_start(&h->thread, "heartbeat", run, h);
    if (err != PGD_OK) {
        if (h->stop_fd >= 0)
            close(h->stop_fd);
        mem_free(h);
        return err;
    }
    *out = h;
    return PGD_OK;
}

void heartbeat_stop(heartbeat *h)
{
    uint64_t one = 1;
    if (h == NULL)
        return;
    ssize_t n = write(h->stop_fd, &one, sizeof one);
    (void)n; /* an eventfd of count 0 takes it */
    thread_join(h->thread);
    close(h->stop_fd);
    mem_free(h);
}
