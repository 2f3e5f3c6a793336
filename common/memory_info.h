/* How much memory this process may still take.
 *
 * The smallest of MemAvailable and what each cgroup limit above the process leaves (version 2:
 * memory.max and memory.current, page cache that can be dropped counted as free; version 1:
 * memory.limit_in_bytes and memory.usage_in_bytes).
 * Thread:  any
 * Source:  the kernel's Documentation/admin-guide/cgroup-v2.rst
 */
#ifndef COMMON_MEMORY_INFO_H
#define COMMON_MEMORY_INFO_H

#include "common/base.h"

typedef struct memory_info {
    uint64_t total_bytes; /* of the machine, or the limit when that is smaller */
    uint64_t free_bytes;
} memory_info;

void memory_info_read(memory_info *out);
/* The same with another root in place of "/" and its proc/self/cgroup, for tests. */
void memory_info_read_at(memory_info *out, const char *root);

#endif
