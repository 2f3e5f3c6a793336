/* posix_spawn, a pidfd and two pipes, all seen by the caller's one poll(). uv_spawn was the
 * alternative: it would put an event loop into the core thread for this alone, and a SIGCHLD
 * handler into a process that needs none.
 *
 * Order at the end of a child: see that it is dead without reaping (its group id stays reserved),
 * SIGKILL whatever is left in the group, read the rest of stderr, reap. Only then may the next one
 * start.
 */
#include "engine/supervisor.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"

#define N_LAST_LINES 4
#define LINE_BYTES   512
#define RECENT_US    3000000 /* older lines have nothing to do with the end */

extern char **environ;

struct supervisor {
    pid_t pid; /* 0 = none */
    int pid_fd;
    int stdin_fd;
    int stderr_fd;
    size_t line_bytes; /* of the line being read */
    char line[LINE_BYTES];
    char last[N_LAST_LINES][LINE_BYTES];
    uint64_t last_us[N_LAST_LINES];
    uint64_t n_lines;
    int signum;
    size_t words_at; /* of the epitaph */
    char epitaph[SUPERVISOR_TEXT_BYTES];
};

pgd_err supervisor_create(supervisor **out)
{
    supervisor *s = mem_calloc(1, sizeof *s);
    if (s == NULL)
        return PGD_ENOMEM;
    s->pid_fd = -1;
    s->stdin_fd = -1;
    s->stderr_fd = -1;
    *out = s;
    return PGD_OK;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void supervisor_destroy(supervisor *s)
{
    if (s == NULL)
        return;
    supervisor_kill(s);
    while (!supervisor_poll(s)) {
        struct pollfd p = {.fd = s->pid_fd, .events = POLLIN};
        (void)poll(&p, 1, 20);
    }
    mem_free(s);
}

/* --- start ------------------------------------------------------------------------------------ */

/* This process's environment, but with a JOURNAL_STREAM that says what is true of the child: its
 * stderr is a pipe, which leads to the journal if ours does. Caller frees the array; text is the
 * storage of the changed entry. */
static char **make_environment(char text[64], int stderr_fd)
{
    static const char name[] = "JOURNAL_STREAM=";
    struct stat st;
    size_t n = 0;
    while (environ[n] != NULL)
        n++;
    char **out = mem_calloc(n + 2, sizeof(*out));
    if (out == NULL)
        return NULL;
    size_t n_out = 0;
    for (size_t i = 0; i < n; i++) {
        if (strncmp(environ[i], name, sizeof(name) - 1) != 0)
            out[n_out++] = environ[i];
    }
    if (log_is_journal() && fstat(stderr_fd, &st) == 0) {
        snprintf(text, 64, "%s%ju:%ju", name, (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
        out[n_out] = text;
    }
    return out;
}

static int spawn(pid_t *pid, const char *path, const char *const argv[], int stdin_fd,
                 int stderr_fd)
{
    char journal_stream[64];
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t none;
    sigset_t defaults;
    int rv = posix_spawn_file_actions_init(&actions);
    if (rv != 0)
        return rv;
    if ((rv = posix_spawnattr_init(&attr)) != 0) {
        posix_spawn_file_actions_destroy(&actions);
        return rv;
    }
    char **environment = make_environment(journal_stream, stderr_fd);
    if (environment == NULL)
        rv = ENOMEM;
    /* Threads here have every signal blocked and some ignored; the child starts with neither. */
    sigemptyset(&none);
    sigfillset(&defaults);
    sigdelset(&defaults, SIGKILL);
    sigdelset(&defaults, SIGSTOP);
    if (rv == 0 && (rv = posix_spawn_file_actions_adddup2(&actions, stdin_fd, STDIN_FILENO)) == 0 &&
        (rv = posix_spawn_file_actions_adddup2(&actions, stderr_fd, STDOUT_FILENO)) == 0 &&
        (rv = posix_spawn_file_actions_adddup2(&actions, stderr_fd, STDERR_FILENO)) == 0 &&
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 34)
        (rv = posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1)) == 0 &&
#endif
        (rv = posix_spawnattr_setsigmask(&attr, &none)) == 0 &&
        (rv = posix_spawnattr_setsigdefault(&attr, &defaults)) == 0 &&
        (rv = posix_spawnattr_setpgroup(&attr, 0)) == 0 &&
        (rv = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
                                                  POSIX_SPAWN_SETPGROUP)) == 0)
        rv = posix_spawn(pid, path, &actions, &attr, (char *const *)(void *)argv, environment);
    mem_free(environment);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&actions);
    return rv;
}

static pgd_err fail_start(supervisor *s, pgd_why *why, const char *path, int error, int in[2],
                          int err[2])
{
    for (int i = 0; i < 2; i++) {
        close_fd(&in[i]);
        close_fd(&err[i]);
    }
    s->pid = 0;
    /* Those that another try cannot mend. */
    bool is_no_program = error == ENOENT || error == ENOTDIR || error == EACCES || error == ENOEXEC;
    return pgd_fail(why, is_no_program ? PGD_ENOENT : PGD_EIO, "cannot start %s: %s%s", path,
                    strerror(error),
                    is_no_program ? "; set worker_path to the paged-worker binary" : "");
}

pgd_err supervisor_start(supervisor *s, const char *path, const char *const argv[],
                         const char *stdin_text, pgd_why *why)
{
    int in[2] = {-1, -1};
    int err[2] = {-1, -1};
    PGD_ASSERTF(s->pid == 0, "supervisor: child %ld has not been reaped", (long)s->pid);
    s->line_bytes = 0;
    s->n_lines = 0;
    s->signum = 0;
    s->words_at = 0;
    s->epitaph[0] = 0;
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0)
        return fail_start(s, why, path, errno, in, err);
    (void)fcntl(err[0], F_SETFL, O_NONBLOCK);
    /* A few hundred bytes into an empty pipe never block. */
    size_t n_text = strlen(stdin_text);
    PGD_ASSERT(n_text < 4096);
    if (write(in[1], stdin_text, n_text) != (ssize_t)n_text)
        return fail_start(s, why, path, errno, in, err);
    int rv = spawn(&s->pid, path, argv, in[0], err[1]);
    if (rv != 0)
        return fail_start(s, why, path, rv, in, err);
    close_fd(&in[0]);
    close_fd(&err[1]);
    s->stdin_fd = in[1];
    s->stderr_fd = err[0];
    /* Without pidfds (before Linux 5.3) the end of stderr and the caller's regular polls tell. */
    s->pid_fd = (int)syscall(SYS_pidfd_open, s->pid, 0);
    return PGD_OK;
}

/* --- stderr ----------------------------------------------------------------------------------- */

static void end_line(supervisor *s)
{
    s->line[s->line_bytes] = 0;
    if (!log_line_is_chatter(s->line)) {
        s->last_us[s->n_lines % N_LAST_LINES] = clock_now_us();
        memcpy(s->last[s->n_lines++ % N_LAST_LINES], s->line, s->line_bytes + 1);
    }
    s->line[s->line_bytes++] = '\n';
    log_write_line(s->line, s->line_bytes);
    s->line_bytes = 0;
}

static void carry_stderr(supervisor *s)
{
    char buf[4096];
    /* Bounded, so that a worker that floods its stderr cannot hold this thread. */
    for (int turn = 0; turn < 16 && s->stderr_fd >= 0; turn++) {
        ssize_t n = read(s->stderr_fd, buf, sizeof buf);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return;
        if (n == 0)
            close_fd(&s->stderr_fd);
        for (ssize_t i = 0; i < n; i++) {
            if (buf[i] == '\n' || s->line_bytes == LINE_BYTES - 2)
                end_line(s);
            if (buf[i] != '\n')
                s->line[s->line_bytes++] = buf[i];
        }
        if (n == 0 && s->line_bytes > 0)
            end_line(s);
    }
}

/* --- end -------------------------------------------------------------------------------------- */

static void write_epitaph(supervisor *s, int status)
{
    size_t cap = sizeof s->epitaph;
    int n;
    s->signum = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (s->signum != 0)
        n = snprintf(s->epitaph, cap, "killed by signal %d (%s)", s->signum, strsignal(s->signum));
    else
        n = snprintf(s->epitaph, cap, "exited with status %d", WEXITSTATUS(status));
    s->words_at = (size_t)n;
    const char *lead = "; it said: ";
    uint64_t first = s->n_lines - PGD_MIN(s->n_lines, N_LAST_LINES);
    for (uint64_t i = first; i < s->n_lines && n > 0 && (size_t)n < cap; i++) {
        if (clock_now_us() - s->last_us[i % N_LAST_LINES] > RECENT_US)
            continue;
        n += snprintf(s->epitaph + n, cap - (size_t)n, "%s%s", lead, s->last[i % N_LAST_LINES]);
        lead = " | ";
    }
}

bool supervisor_poll(supervisor *s)
{
    siginfo_t info = {0};
    int status = 0;
    if (s->pid == 0)
        return true;
    carry_stderr(s);
    if (waitid(P_PID, (id_t)s->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0)
        return false;
    (void)kill(-s->pid, SIGKILL);
    carry_stderr(s);
    if (s->stderr_fd >= 0 && s->line_bytes > 0)
        end_line(s);
    pid_t got;
    do
        got = waitpid(s->pid, &status, 0);
    while (got < 0 && errno == EINTR);
    write_epitaph(s, status);
    close_fd(&s->pid_fd);
    close_fd(&s->stdin_fd);
    close_fd(&s->stderr_fd);
    s->pid = 0;
    return true;
}

int supervisor_get_fds(const supervisor *s, int fds[SUPERVISOR_MAX_FDS])
{
    int n = 0;
    if (s->pid_fd >= 0)
        fds[n++] = s->pid_fd;
    if (s->stderr_fd >= 0)
        fds[n++] = s->stderr_fd;
    return n;
}

void supervisor_kill(supervisor *s)
{
    if (s->pid == 0)
        return;
    (void)kill(-s->pid, SIGKILL);
    (void)kill(s->pid, SIGKILL); /* the group may not exist yet */
}

pid_t supervisor_get_pid(const supervisor *s)
{
    return s->pid;
}

const char *supervisor_get_epitaph(const supervisor *s)
{
    return s->epitaph;
}

const char *supervisor_get_last_words(const supervisor *s)
{
    return s->epitaph + s->words_at;
}

int supervisor_get_signal(const supervisor *s)
{
    return s->signum;
}
