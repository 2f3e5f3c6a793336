/* /proc/self/exe tells where we are, so that a source tree, an installation and a moved prefix work
 * alike. */
#include "engine/paths.h"

#include <stdio.h>
#include <string.h>

#include <unistd.h>

#include "common/file.h"

bool paths_exe_dir(char *out, size_t cap)
{
    ssize_t n = readlink("/proc/self/exe", out, cap - 1);
    if (n <= 0 || (size_t)n >= cap - 1)
        return false;
    out[n] = '\0';
    char *slash = strrchr(out, '/');
    if (slash == NULL)
        return false;
    *slash = '\0';
    return true;
}

bool paths_find_bundled_model(char *out, size_t cap)
{
    static const char *const places[] = {
        "../share/paged/models/paged-tiny.gguf", /* PREFIX/bin */
        "../../config/models/paged-tiny.gguf",   /* build/bin */
    };
    char dir[1024];
    if (!paths_exe_dir(dir, sizeof(dir)))
        return false;
    for (size_t i = 0; i < PGD_ARRAY_LEN(places); i++) {
        if (file_join(out, cap, dir, places[i]) && file_exists(out))
            return true;
    }
    return false;
}
