/* The log sink. A line is built in a stack buffer and leaves in one write(), so that lines of
 * several threads and of engine and worker on one stderr never mix. Level and role are the only
 * state of this file. */
#include "common/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <poll.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"

static atomic_int sink_level = LOG_INFO;
static char sink_role[16] = "paged";
static bool sink_is_journal;

static const char *const level_names[] = {"error", "warn", "info", "debug", "trace"};
/* syslog priorities: err, warning, info, debug, debug */
static const int level_priorities[] = {3, 4, 6, 7, 7};

/* The variable alone says little: a terminal may be opened, or stderr redirected, below a service
 * that has it. "DEVICE:INODE" must be that of stderr. */
static bool stderr_is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    struct stat st;
    uintmax_t device, inode;
    int used = 0;
    return stream != NULL && fstat(STDERR_FILENO, &st) == 0 &&
           sscanf(stream, "%ju:%ju%n", &device, &inode, &used) == 2 && stream[used] == '\0' &&
           device == (uintmax_t)st.st_dev && inode == (uintmax_t)st.st_ino;
}

void log_init(const char *role, log_level level)
{
    snprintf(sink_role, sizeof(sink_role), "%s", role);
    sink_is_journal = stderr_is_journal();
    log_set_level(level);
}

void log_set_level(log_level level)
{
    atomic_store_explicit(&sink_level, (int)level, memory_order_relaxed);
}

log_level log_get_level(void)
{
    return (log_level)atomic_load_explicit(&sink_level, memory_order_relaxed);
}

bool log_is_journal(void)
{
    return sink_is_journal;
}

bool log_enabled(log_level level)
{
    return (int)level <= (int)log_get_level();
}

bool log_level_parse(log_level *out, const char *name)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(level_names); i++) {
        if (strcasecmp(name, level_names[i]) == 0) {
            *out = (log_level)i;
            return true;
        }
    }
    return false;
}

const char *log_level_name(log_level level)
{
    return level_names[level];
}

/* One event is one line, and nothing that a message quotes (a client's field name) may command a
 * terminal: control characters of ASCII and, in UTF-8, of Latin-1. */
static void clean(char *line, int n)
{
    for (int i = 0; i < n; i++) {
        unsigned char c = (unsigned char)line[i];
        if (c == '\n' || c == '\r' || c == '\t')
            line[i] = ' ';
        else if (c < 0x20 || c == 0x7F)
            line[i] = '?';
        else if (c == 0xC2 && i + 1 < n && (unsigned char)line[i + 1] < 0xA0)
            line[i] = line[i + 1] = '?';
    }
}

void log_write(log_level level, const char *component, const char *fmt, ...)
{
    if (!log_enabled(level))
        return;
    char line[2048];
    int used;
    if (sink_is_journal) {
        used = snprintf(line, sizeof(line), "<%d>%s %s: ", level_priorities[level], sink_role,
                        component);
    } else {
        struct timespec ts;
        struct tm tm;
        clock_gettime(CLOCK_REALTIME, &ts);
        localtime_r(&ts.tv_sec, &tm);
        used = (int)strftime(line, sizeof(line), "%H:%M:%S", &tm);
        used += snprintf(line + used, sizeof(line) - (size_t)used,
                         ".%03ld %-5s %s %s: ", ts.tv_nsec / 1000000, level_names[level], sink_role,
                         component);
    }
    va_list args;
    va_start(args, fmt);
    int body = vsnprintf(line + used, sizeof(line) - (size_t)used - 1, fmt, args);
    va_end(args);
    if (body < 0)
        return;
    used += body;
    if (used > (int)sizeof(line) - 2)
        used = (int)sizeof(line) - 2;
    clean(line, used);
    line[used++] = '\n';
    log_write_line(line, (size_t)used);
}

void log_write_line(const char *line, size_t n_bytes)
{
    /* Whoever reads our stderr may stand still: that costs lines, not the service. */
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&p, 1, 0) == 0)
        return;
    ssize_t written = write(STDERR_FILENO, line, n_bytes);
    (void)written; /* nowhere to tell that stderr is gone, or its disk full */
}

bool log_line_is_chatter(const char *line)
{
    char level[8];
    int priority;
    if (line[0] == '<')
        return sscanf(line, "<%d>%7s", &priority, level) == 2 &&
               priority > level_priorities[LOG_WARN];
    if (sscanf(line, "%*2d:%*2d:%*2d.%*3d %7s", level) != 1)
        return false;
    for (size_t i = LOG_INFO; i < PGD_ARRAY_LEN(level_names); i++)
        if (strcmp(level, level_names[i]) == 0)
            return true;
    return false;
}

bool log_limit_pass(log_limit *limit, uint64_t period_us, uint64_t *n_suppressed)
{
    uint64_t now = clock_now_us();
    if (limit->last_us != 0 && now - limit->last_us < period_us) {
        limit->n_suppressed++;
        return false;
    }
    limit->last_us = now;
    if (n_suppressed != NULL)
        *n_suppressed = limit->n_suppressed;
    limit->n_suppressed = 0;
    return true;
}
