/* Runs something in a child process and says how it ended, so that a violation, an assertion of the
 * engine, a sanitizer's report or an endless loop are all just a failure.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_SIM_CATCH_H
#define TESTS_SIM_SIM_CATCH_H

#include "common/base.h"

typedef struct sim_verdict {
    bool is_failed;
    char text[4096]; /* the beginning of what it wrote to stderr, or how it ended */
    char key[200];   /* its first line without numbers: equal for equal failures */
} sim_verdict;

/* limit_s: after that the child is killed, which is a failure. The child shares nothing with the
 * caller but mappings. */
void sim_catch(sim_verdict *v, void (*fn)(void *arg), void *arg, int limit_s);

#endif
