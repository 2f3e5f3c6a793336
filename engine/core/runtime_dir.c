/* Sockets are named worker-<engine pid>-<epoch>-<random>.sock: the pid tells which ones are left
 * over. */
#include "engine/core/runtime_dir.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

static pgd_err pick(char out[RUNTIME_DIR_BYTES], const char *wanted, pgd_why *why)
{
    const char *systemd = getenv("RUNTIME_DIRECTORY");
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    int n;
    if (wanted != NULL && wanted[0] != 0)
        n = snprintf(out, RUNTIME_DIR_BYTES, "%s", wanted);
    else if (systemd != NULL && systemd[0] == '/')
        n = snprintf(out, RUNTIME_DIR_BYTES, "%.*s", (int)strcspn(systemd, ":"), systemd);
    else if (xdg != NULL && xdg[0] == '/')
        n = snprintf(out, RUNTIME_DIR_BYTES, "%s/paged", xdg);
    else
        n = snprintf(out, RUNTIME_DIR_BYTES, "/tmp/paged-%lu", (unsigned long)geteuid());
    if (n < 0 || n >= RUNTIME_DIR_BYTES)
        return pgd_fail(why, PGD_EINVAL,
                        "runtime_dir: expected a path of at most %d bytes, got %d, at %.80s...; "
                        "set runtime_dir to a shorter one",
                        RUNTIME_DIR_BYTES - 1, n, out);
    return PGD_OK;
}

pgd_err runtime_dir_prepare(char out[RUNTIME_DIR_BYTES], const char *wanted, pgd_why *why)
{
    struct stat st;
    PGD_TRY(pick(out, wanted, why));
    if (mkdir(out, 0700) != 0 && errno != EEXIST)
        return pgd_fail(why, PGD_EIO, "runtime_dir: cannot make %s: %s", out, strerror(errno));
    if (lstat(out, &st) != 0)
        return pgd_fail(why, PGD_EIO, "runtime_dir: cannot read %s: %s", out, strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return pgd_fail(why, PGD_EINVAL,
                        "runtime_dir: expected a directory, got something else, at %s", out);
    if (st.st_uid != geteuid())
        return pgd_fail(
            why, PGD_EINVAL,
            "runtime_dir: expected owner %lu, got %lu, at %s; set runtime_dir to one of your own",
            (unsigned long)geteuid(), (unsigned long)st.st_uid, out);
    if ((st.st_mode & 077) != 0)
        return pgd_fail(why, PGD_EINVAL,
                        "runtime_dir: expected mode 0700, got %04o, at %s; run chmod 700 on it",
                        (unsigned)(st.st_mode & 07777), out);
    return PGD_OK;
}

void runtime_dir_sweep(const char *dir)
{
    DIR *d = opendir(dir);
    if (d == NULL)
        return;
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d)) {
        long pid;
        int used = 0;
        if (sscanf(e->d_name, "worker-%ld-%*[0-9]-%*[0-9a-f].sock%n", &pid, &used) < 1 ||
            used == 0 || e->d_name[used] != 0)
            continue;
        if (pid > 0 && kill((pid_t)pid, 0) != 0 && errno == ESRCH)
            (void)unlinkat(dirfd(d), e->d_name, 0); /* a loser of this race finds it gone */
    }
    closedir(d);
}
