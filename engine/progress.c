/* stderr is a terminal: one line redrawn in place. Else: a log line per tenth, which journald can
 * keep. */
#include "engine/progress.h"

#include <stdio.h>

#include <unistd.h>

#include "common/log.h"

#define BAR_WIDTH 40

void progress_show(progress *p, const char *what, uint64_t done, uint64_t total)
{
    if (total == 0)
        return;
    int percent = (int)((double)done * 100.0 / (double)total);
    if (!isatty(STDERR_FILENO)) {
        if (percent / 10 > p->last_tenth) {
            p->last_tenth = percent / 10;
            log_info("serve", "%s %d%% (%.0f of %.0f MB)", what, percent, (double)done / 1e6,
                     (double)total / 1e6);
        }
        return;
    }
    char bar[BAR_WIDTH + 1];
    for (int i = 0; i < BAR_WIDTH; i++)
        bar[i] = i < percent * BAR_WIDTH / 100 ? '#' : '.';
    bar[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r%s [%s] %3d%%", what, bar, percent);
    fflush(stderr);
    p->shown = true;
}

void progress_end(progress *p)
{
    if (p->shown)
        fputs("\r\033[K", stderr);
    p->shown = false;
}
