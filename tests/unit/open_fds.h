/* How many descriptors this process has open, for tests of leaks. */
#ifndef TESTS_UNIT_OPEN_FDS_H
#define TESTS_UNIT_OPEN_FDS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <dirent.h>

#include <cmocka.h>

/* Counts the one it reads with as well. */
static inline int n_open_fds(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    for (const struct dirent *e = readdir(d); e != NULL; e = readdir(d))
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

#endif
