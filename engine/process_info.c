/* Read from /proc at each call: a page is asked for every few seconds at most. */
#include "engine/process_info.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/file.h"

/* Seconds since 1970; the kernel tells ticks since boot, as field 22. */
static double read_start_s(void)
{
    char text[1024];
    const char *at = NULL;
    unsigned long long ticks;
    struct timespec now, up;
    if (file_read_proc(text, sizeof(text), "/proc/self/stat") > 0)
        at = strrchr(text, ')'); /* the name in parentheses may hold anything */
    for (int field = 2; at != NULL && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (at == NULL || sscanf(at, "%llu", &ticks) != 1 || clock_gettime(CLOCK_REALTIME, &now) != 0 ||
        clock_gettime(CLOCK_BOOTTIME, &up) != 0)
        return 0;
    return (double)(now.tv_sec - up.tv_sec) + (double)(now.tv_nsec - up.tv_nsec) * 1e-9 +
           (double)ticks / (double)sysconf(_SC_CLK_TCK);
}

static double count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    double n = 0;
    if (dir == NULL)
        return 0;
    for (const struct dirent *e; (e = readdir(dir)) != NULL;)
        n += e->d_name[0] != '.';
    closedir(dir);
    return n - 1; /* the directory's own */
}

void process_info_read(process_info *out)
{
    /* Once: a step of the wall clock must not move the start. */
    static double start_s;
    struct rusage usage;
    struct rlimit limit;
    char text[256];
    unsigned long long n_virtual, n_resident;
    memset(out, 0, sizeof(*out));
    if (getrusage(RUSAGE_SELF, &usage) == 0)
        out->cpu_s = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                     (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    if (file_read_proc(text, sizeof(text), "/proc/self/statm") > 0 &&
        sscanf(text, "%llu %llu", &n_virtual, &n_resident) == 2) {
        double page = (double)sysconf(_SC_PAGESIZE);
        out->virtual_bytes = (double)n_virtual * page;
        out->resident_bytes = (double)n_resident * page;
    }
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
        out->max_fds = (double)limit.rlim_cur;
    out->open_fds = count_fds();
    if (start_s == 0)
        start_s = read_start_s();
    out->start_s = start_s;
}
