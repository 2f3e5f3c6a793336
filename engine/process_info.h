/* What the system says of this process, for the metrics page.
 *
 * Thread:  one at a time
 */
#ifndef ENGINE_PROCESS_INFO_H
#define ENGINE_PROCESS_INFO_H

#include "common/base.h"

typedef struct process_info {
    double cpu_s; /* user and system */
    double resident_bytes;
    double virtual_bytes;
    double open_fds;
    double max_fds;
    double start_s; /* since 1970 */
} process_info;

/* What cannot be read is 0. */
void process_info_read(process_info *out);

#endif
