/* The faults of planted_bugs.txt, as the build planted them in copies of the engine's sources.
 *
 * Thread:  one at a time
 */
#ifndef TESTS_SIM_PLANTED_BUGS_H
#define TESTS_SIM_PLANTED_BUGS_H

#include "common/base.h"

typedef struct planted_bug {
    const char *name;
    const char *file;
    bool is_planted; /* its text was found in the file, once */
} planted_bug;

extern const planted_bug planted_bugs[]; /* [n_planted_bugs], bug n at n - 1 */
extern const int n_planted_bugs;
/* The one that is in force, 0 = none. */
extern int sim_planted;

#endif
