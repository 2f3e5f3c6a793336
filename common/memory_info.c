/* A container sees the machine's /proc/meminfo but is killed at its cgroup's limit, so both are
 * read. A cgroup is found through /proc/self/cgroup; every ancestor may have a limit of its own,
 * and inside a cgroup namespace the path is "/". Files that are missing or odd count as no limit.
 */
#include "common/memory_info.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PATH_BYTES 1024

/* The value of the "key N" line of a file (key NULL: the file is one number). False when absent or
 * "max". */
static bool read_number(uint64_t *out, const char *path, const char *key)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    char line[256];
    bool found = false;
    size_t key_len = key ? strlen(key) : 0;
    while (!found && fgets(line, sizeof(line), f)) {
        if (key &&
            (strncmp(line, key, key_len) != 0 || (line[key_len] != ' ' && line[key_len] != ':')))
            continue;
        found = sscanf(line + key_len + (key ? 1 : 0), " %" SCNu64, out) == 1;
        if (!key)
            break;
    }
    (void)fclose(f);
    return found;
}

static void lower(memory_info *out, uint64_t limit, uint64_t used)
{
    out->total_bytes = PGD_MIN(out->total_bytes, limit);
    out->free_bytes = PGD_MIN(out->free_bytes, limit > used ? limit - used : 0);
}

/* Applies the limits of the cgroup directory and of every ancestor up to base (a prefix of dir). */
static void apply_tree(memory_info *out, char *dir, size_t base_len, bool is_v2)
{
    const char *limit_name = is_v2 ? "memory.max" : "memory.limit_in_bytes";
    const char *used_name = is_v2 ? "memory.current" : "memory.usage_in_bytes";
    const char *cache_key = is_v2 ? "inactive_file" : "total_inactive_file";
    for (;;) {
        char path[MAX_PATH_BYTES + 64];
        uint64_t limit, used, cache = 0;
        (void)snprintf(path, sizeof(path), "%s/%s", dir, limit_name);
        bool has_limit = read_number(&limit, path, NULL);
        (void)snprintf(path, sizeof(path), "%s/%s", dir, used_name);
        if (has_limit && read_number(&used, path, NULL)) {
            (void)snprintf(path, sizeof(path), "%s/memory.stat", dir);
            (void)read_number(&cache, path, cache_key);
            lower(out, limit, used > cache ? used - cache : 0);
        }
        char *slash = strlen(dir) > base_len ? strrchr(dir, '/') : NULL;
        if (!slash || (size_t)(slash - dir) < base_len)
            return;
        *slash = '\0';
    }
}

static void apply_line(memory_info *out, const char *root, char *line)
{
    /* "0::/path" is version 2; "4:memory:/path" or a list with memory in it is version 1. */
    char *controllers = strchr(line, ':');
    char *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path)
        return;
    *path++ = '\0';
    controllers++;
    path[strcspn(path, "\n")] = '\0';
    bool is_v2 = controllers[0] == '\0';
    bool is_v1 = false;
    for (char *save = NULL, *name = strtok_r(controllers, ",", &save); name;
         name = strtok_r(NULL, ",", &save))
        is_v1 = is_v1 || strcmp(name, "memory") == 0;
    if ((!is_v2 && !is_v1) || strstr(path, ".."))
        return;
    char dir[MAX_PATH_BYTES];
    int base_len = snprintf(dir, sizeof(dir), "%s/sys/fs/cgroup%s", root, is_v2 ? "" : "/memory");
    if (base_len < 0 || (size_t)base_len + strlen(path) >= sizeof(dir))
        return;
    if (strcmp(path, "/") != 0)
        memcpy(dir + base_len, path, strlen(path) + 1);
    apply_tree(out, dir, (size_t)base_len, is_v2);
}

void memory_info_read_at(memory_info *out, const char *root)
{
    char path[MAX_PATH_BYTES], line[MAX_PATH_BYTES];
    uint64_t total_kib = 0, available_kib = 0;
    (void)snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    (void)read_number(&total_kib, path, "MemTotal");
    (void)read_number(&available_kib, path, "MemAvailable");
    out->total_bytes = total_kib * 1024;
    out->free_bytes = available_kib * 1024;
    (void)snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    if (!f)
        return;
    while (fgets(line, sizeof(line), f))
        apply_line(out, root, line);
    (void)fclose(f);
}

void memory_info_read(memory_info *out)
{
    memory_info_read_at(out, "");
}
