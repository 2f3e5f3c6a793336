/* A bar on a terminal, plain lines elsewhere.
 *
 * Thread:  one at a time; zero-initialise
 */
#ifndef ENGINE_PROGRESS_H
#define ENGINE_PROGRESS_H

#include "common/base.h"

typedef struct progress {
    bool shown;
    int last_tenth; /* plain lines come at each tenth */
} progress;

void progress_show(progress *p, const char *what, uint64_t done, uint64_t total);
/* Clears the bar. */
void progress_end(progress *p);

#endif
