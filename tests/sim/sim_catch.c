/* stderr goes to an anonymous file, which is read when the child is gone: unlike a pipe it takes any
 * amount without a reader. */
#include "tests/sim/sim_catch.h"

#include <ctype.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void make_key(sim_verdict *v)
{
    size_t n = 0;
    for (const char *c = v->text; *c != '\0' && *c != '\n' && n + 1 < sizeof v->key; c++) {
        if (!isdigit((unsigned char)*c))
            v->key[n++] = *c;
    }
    v->key[n] = '\0';
}

void sim_catch(sim_verdict *v, void (*fn)(void *arg), void *arg, int limit_s)
{
    memset(v, 0, sizeof *v);
    int fd = memfd_create("stderr", MFD_CLOEXEC);
    if (fd < 0)
        abort();
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0)
        abort();
    if (pid == 0) {
        dup2(fd, STDERR_FILENO);
        alarm((unsigned)limit_s);
        fn(arg);
        exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    v->is_failed = !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    ssize_t n = pread(fd, v->text, sizeof v->text - 1, 0);
    v->text[n > 0 ? n : 0] = '\0';
    close(fd);
    if (v->is_failed && WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        snprintf(v->text, sizeof v->text, "no end after %d s", limit_s);
    else if (v->is_failed && n <= 0)
        snprintf(v->text, sizeof v->text, "ended with wait status %d", status);
    make_key(v);
}
