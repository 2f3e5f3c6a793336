/* Leveled log lines on stderr: one write() per line, "component key=value ...".
 *
 * Levels: error (someone must act), warn (degraded), info (life cycle), debug (per step), trace
 * (per token). User text is never logged below trace. When stderr is the journal (JOURNAL_STREAM
 * names it) lines carry a <N> priority prefix and no time.
 * Thread:  any; log_init and log_set_level before other threads start, or from one thread
 */
#ifndef COMMON_LOG_H
#define COMMON_LOG_H

#include "common/err.h"

typedef enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG, LOG_TRACE } log_level;

/* role: "engine", "worker0"; copied. */
void log_init(const char *role, log_level level);
void log_set_level(log_level level);
log_level log_get_level(void);
/* Whether stderr was the journal at log_init. */
bool log_is_journal(void);
bool log_enabled(log_level level);
/* "error", "warn", "info", "debug", "trace" → level; false if the name is unknown. */
bool log_level_parse(log_level *out, const char *name);
const char *log_level_name(log_level level);

void log_write(log_level level, const char *component, const char *fmt, ...) PGD_PRINTF(3, 4);

/* A finished line, newline included, to where log_write writes; dropped where a write would block.
 */
void log_write_line(const char *line, size_t n_bytes);
/* Is this a line of log_write (of this or another process) of level info or below? */
bool log_line_is_chatter(const char *line);

#define log_error(component, ...) log_write(LOG_ERROR, component, __VA_ARGS__)
#define log_warn(component, ...)  log_write(LOG_WARN, component, __VA_ARGS__)
#define log_info(component, ...)  log_write(LOG_INFO, component, __VA_ARGS__)
#define log_debug(component, ...)                         \
    do {                                                  \
        if (log_enabled(LOG_DEBUG))                       \
            log_write(LOG_DEBUG, component, __VA_ARGS__); \
    } while (0)

/* Rate limiter for repeating failures: true at most once per period. Zero-initialise. Not atomic.
 */
typedef struct log_limit {
    uint64_t last_us;
    uint64_t n_suppressed;
} log_limit;
bool log_limit_pass(log_limit *limit, uint64_t period_us, uint64_t *n_suppressed);

#endif
