/* fork and exec by hand: the child asks for its parent-death signal and binds itself to its CPUs
 * before it becomes the daemon, which neither posix_spawn nor uv_spawn can do. Readiness is read
 * from the log line that says so, since the port is the daemon's choice. */
#include "engine/bench/bench_daemon.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/mem.h"
#include "engine/bench/proc_cpu.h"
#include "engine/paths.h"

#define MAX_FLAGS     220
#define MAX_LOG_BYTES (64u << 20)
#define POLL_US       10000
#define STOP_LIMIT_US 45000000u /* shutdown_timeout_s and some more */
#define EXIT_NO_START 71

static void become_daemon(const char *path, char *const *argv, int log_fd, pid_t parent,
                          const char *cpus)
{
    pgd_why why = {0};
    sigset_t none;
    int null_fd = open("/dev/null", O_RDWR);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    dup2(null_fd, STDIN_FILENO);
    dup2(null_fd, STDOUT_FILENO);
    dup2(log_fd, STDERR_FILENO);
    /* The terminal's Ctrl-C is for the measuring process, which then stops this one. */
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(EXIT_NO_START);
    if (cpus != NULL && proc_cpu_bind(cpus, &why) != PGD_OK) {
        dprintf(STDERR_FILENO, "paged bench: %s\n", why.text);
        _exit(EXIT_NO_START);
    }
    execv(path, argv);
    dprintf(STDERR_FILENO, "paged bench: cannot start %s: %s\n", path, strerror(errno));
    _exit(EXIT_NO_START);
}

/* False once it has ended by itself. */
static bool is_alive(bench_daemon *d)
{
    int status;
    if (d->pid == 0)
        return false;
    if (waitpid(d->pid, &status, WNOHANG) != d->pid)
        return true;
    d->pid = 0;
    d->exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_NO_START;
    return false;
}

/* The last bytes of the log from a line's beginning, into out. */
static void read_tail(const bench_daemon *d, char *out, size_t cap)
{
    int fd = open(d->log_path, O_RDONLY | O_CLOEXEC);
    off_t size = fd >= 0 ? lseek(fd, 0, SEEK_END) : 0;
    off_t from = size > (off_t)(cap - 1) ? size - (off_t)(cap - 1) : 0;
    ssize_t n = fd >= 0 ? pread(fd, out, cap - 1, from) : 0;
    if (fd >= 0)
        close(fd);
    n = PGD_MAX(n, 0);
    while (n > 0 && out[n - 1] == '\n')
        n--;
    out[n] = '\0';
    char *newline = from > 0 ? strchr(out, '\n') : NULL;
    if (newline != NULL)
        memmove(out, newline + 1, strlen(newline));
}

/* "... ready model=NAME url=URL max_model_len=..." */
static bool find_url(bench_daemon *d)
{
    char *text;
    size_t n;
    bool found = false;
    if (file_read(&text, &n, d->log_path, MAX_LOG_BYTES, NULL) != PGD_OK)
        return false;
    const char *line = strstr(text, " ready model=");
    const char *url = line != NULL ? strstr(line, " url=") : NULL;
    if (url != NULL) {
        url += 5;
        size_t n_url = strcspn(url, " \n");
        found = url[n_url] != '\0' && n_url < sizeof(d->url);
        if (found)
            snprintf(d->url, sizeof(d->url), "%.*s", (int)n_url, url);
    }
    mem_free(text);
    return found;
}

static pgd_err open_log(bench_daemon *d, int *fd, pgd_why *why)
{
    const char *dir = getenv("TMPDIR");
    int n = snprintf(d->log_path, sizeof(d->log_path), "%s/paged-bench-XXXXXX",
                     dir != NULL && dir[0] != '\0' ? dir : "/tmp");
    if (n < 0 || (size_t)n >= sizeof(d->log_path))
        return pgd_fail(why, PGD_EINVAL, "TMPDIR: expected a shorter path");
    *fd = mkostemp(d->log_path, O_CLOEXEC);
    if (*fd < 0)
        return pgd_fail(why, PGD_EIO, "cannot make %s: %s", d->log_path, strerror(errno));
    return PGD_OK;
}

pgd_err bench_daemon_start(bench_daemon *d, const char *const *flags, const char *cpus,
                           uv_loop_t *loop, const bool *stop, pgd_why *why)
{
    static const char *const first[] = {"paged", "serve", "--port", "0", "--log-level", "info"};
    const char *argv[MAX_FLAGS + PGD_ARRAY_LEN(first) + 1];
    char path[1100];
    char dir[1024];
    int fd = -1;
    size_t n = 0;
    *d = (bench_daemon){.exit_status = EXIT_NO_START};
    for (; n < PGD_ARRAY_LEN(first); n++)
        argv[n] = first[n];
    for (; *flags != NULL && n < PGD_ARRAY_LEN(argv) - 1; flags++)
        argv[n++] = *flags;
    argv[n] = NULL;
    if (!paths_exe_dir(dir, sizeof(dir)) || !file_join(path, sizeof(path), dir, "paged"))
        return pgd_fail(why, PGD_EIO, "cannot tell where paged is");
    PGD_TRY(open_log(d, &fd, why));
    pid_t parent = getpid();
    d->pid = fork();
    if (d->pid == 0)
        become_daemon(path, (char *const *)(uintptr_t)argv, fd, parent, cpus);
    close(fd);
    if (d->pid < 0) {
        d->pid = 0;
        unlink(d->log_path);
        d->log_path[0] = '\0';
        return pgd_fail(why, PGD_EIO, "cannot start a process: %s", strerror(errno));
    }
    while (!find_url(d)) {
        char tail[400];
        if (*stop) {
            bench_daemon_stop(d);
            return pgd_fail(why, PGD_ECLOSED, "interrupted");
        }
        if (!is_alive(d)) {
            read_tail(d, tail, sizeof(tail));
            unlink(d->log_path);
            d->log_path[0] = '\0';
            return pgd_fail(why, PGD_ECLOSED, "the daemon did not start:\n%s", tail);
        }
        uv_run(loop, UV_RUN_NOWAIT); /* signals */
        usleep(POLL_US);
    }
    return PGD_OK;
}

bool bench_daemon_stop(bench_daemon *d)
{
    if (d->log_path[0] == '\0')
        return true;
    bool was_alive = is_alive(d);
    if (was_alive) {
        uint64_t end_us = clock_now_us() + STOP_LIMIT_US;
        kill(d->pid, SIGTERM);
        while (is_alive(d)) {
            if (clock_now_us() > end_us)
                kill(d->pid, SIGKILL);
            usleep(POLL_US);
        }
    }
    bool ok = was_alive && d->exit_status == 0;
    if (ok) {
        unlink(d->log_path);
    } else {
        char tail[2000];
        read_tail(d, tail, sizeof(tail));
        fprintf(stderr, "paged bench: the daemon ended %swith status %d; %s ends in:\n%s\n",
                was_alive ? "" : "during the run, ", d->exit_status, d->log_path, tail);
    }
    d->log_path[0] = '\0';
    return ok;
}
