/* A worker is a child of its engine, so one pass over /proc finds it without either being asked. */
#include "engine/bench/proc_cpu.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#include "common/file.h"

/* Parent and CPU time of one process. */
static bool read_stat(pid_t pid, pid_t *parent, uint64_t *cpu_us)
{
    char path[64];
    char text[1024];
    int ppid;
    unsigned long long user;
    unsigned long long system;
    snprintf(path, sizeof(path), "/proc/%ld/stat", (long)pid);
    if (file_read_proc(text, sizeof(text), path) == 0)
        return false;
    /* The name, in parentheses, may hold anything. */
    const char *behind = strrchr(text, ')');
    if (behind == NULL ||
        sscanf(behind + 1, " %*c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &ppid, &user,
               &system) != 3)
        return false;
    *parent = ppid;
    *cpu_us = (user + system) * 1000000u / (unsigned long long)sysconf(_SC_CLK_TCK);
    return true;
}

bool proc_cpu_read(proc_cpu *out, pid_t pid)
{
    pid_t parent;
    *out = (proc_cpu){0};
    DIR *dir = read_stat(pid, &parent, &out->self_us) ? opendir("/proc") : NULL;
    if (dir == NULL)
        return false;
    for (const struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
        uint64_t us;
        if (!isdigit((unsigned char)e->d_name[0]) ||
            !read_stat((pid_t)atol(e->d_name), &parent, &us) || parent != pid)
            continue;
        out->children_us += us;
        out->n_children++;
    }
    closedir(dir);
    return true;
}

pgd_err proc_cpu_bind(const char *list, pgd_why *why)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    const char *at = list;
    do {
        char *end;
        long first = strtol(at, &end, 10);
        long last = first;
        bool ok = isdigit((unsigned char)*at) != 0;
        if (ok && *end == '-') {
            at = end + 1;
            ok = isdigit((unsigned char)*at) != 0;
            last = strtol(at, &end, 10);
        }
        if (!ok || (*end != ',' && *end != '\0') || first > last || last >= CPU_SETSIZE)
            return pgd_fail(why, PGD_EINVAL, "expected CPUs as in 0 or 0,2-3, got %s", list);
        for (long cpu = first; cpu <= last; cpu++)
            CPU_SET((size_t)cpu, &set);
        at = *end == ',' ? end + 1 : end;
    } while (*at != '\0');
    if (sched_setaffinity(0, sizeof(set), &set) != 0)
        return pgd_fail(why, PGD_EIO, "cannot use the CPUs %s: %s", list, strerror(errno));
    return PGD_OK;
}
