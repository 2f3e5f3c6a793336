/* Children of every kind: that exit, are killed, talk, leave grandchildren, cannot be started. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/log.h"
#include "engine/supervisor.h"

static void start_sh(supervisor *s, const char *script, const char *stdin_text)
{
    pgd_why why = {0};
    const char *argv[] = {"/bin/sh", "-c", script, NULL};
    if (supervisor_start(s, "/bin/sh", argv, stdin_text, &why) != PGD_OK)
        fail_msg("%s", why.text);
}

/* As the core thread does: poll the descriptors, then the supervisor. */
static void wait_end(supervisor *s)
{
    uint64_t end_us = clock_now_us() + 10000000;
    while (!supervisor_poll(s)) {
        int fds[SUPERVISOR_MAX_FDS];
        struct pollfd p[SUPERVISOR_MAX_FDS];
        int n = supervisor_get_fds(s, fds);
        for (int i = 0; i < n; i++)
            p[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
        (void)poll(p, (nfds_t)n, 100);
        if (clock_now_us() > end_us)
            fail_msg("the child did not end");
    }
}

static void expect(supervisor *s, const char *epitaph)
{
    wait_end(s);
    assert_string_equal(supervisor_get_epitaph(s), epitaph);
    assert_int_equal(supervisor_get_pid(s), 0);
}

static void test_supervisor_status(void **state)
{
    (void)state;
    supervisor *s;
    assert_int_equal(supervisor_create(&s), PGD_OK);
    assert_true(supervisor_poll(s)); /* none yet */
    start_sh(s, "exit 7", "");
    assert_true(supervisor_get_pid(s) > 0);
    expect(s, "exited with status 7");
    start_sh(s, "kill -SEGV $$", "");
    expect(s, "killed by signal 11 (Segmentation fault)");
    start_sh(s, "exit 0", "");
    expect(s, "exited with status 0");
    supervisor_destroy(s);
}

static void test_supervisor_lines(void **state)
{
    (void)state;
    supervisor *s;
    assert_int_equal(supervisor_create(&s), PGD_OK);
    start_sh(s, "for i in 1 2 3 4 5 6; do echo line$i >&2; done; echo out; printf end >&2; exit 1",
             "");
    expect(s, "exited with status 1; it said: line5 | line6 | out | end");
    /* of a very long line the parts are kept, and nothing overflows */
    start_sh(s, "head -c 3000 /dev/zero | tr '\\0' x >&2", "");
    wait_end(s);
    assert_non_null(strstr(supervisor_get_epitaph(s), "exited with status 0; it said: xxx"));
    supervisor_destroy(s);
}

/* Our own log is quoted from warn up only; what others print, and crashes above all, always. */
static void test_supervisor_words_that_matter(void **state)
{
    (void)state;
    supervisor *s;
    assert_int_equal(supervisor_create(&s), PGD_OK);
    start_sh(s,
             "echo '12:00:00.000 info  worker0 worker: loaded' >&2;"
             "echo '12:00:00.001 debug worker0 worker: step=1' >&2;"
             "echo '<6>worker0 worker: loaded' >&2; kill -ABRT $$",
             "");
    expect(s, "killed by signal 6 (Aborted)");
    assert_string_equal(supervisor_get_last_words(s), "");
    assert_int_equal(supervisor_get_signal(s), 6);
    start_sh(s,
             "echo '12:00:00.000 warn  worker0 kv: low' >&2; echo 'info: not ours' >&2;"
             "echo '<3>worker0 cuda: gone' >&2; echo '12:00:00.001 info  worker0 a: b' >&2; exit 3",
             "");
    expect(s,
           "exited with status 3; it said: 12:00:00.000 warn  worker0 kv: low | info: not ours | "
           "<3>worker0 cuda: gone");
    assert_int_equal(supervisor_get_signal(s), 0);
    /* one that cannot be started has neither end nor words of the one before */
    const char *argv[] = {"/nonexistent", NULL};
    assert_int_equal(supervisor_start(s, argv[0], argv, "", NULL), PGD_ENOENT);
    assert_string_equal(supervisor_get_epitaph(s), "");
    supervisor_destroy(s);
}

/* When our stderr is the journal the child's pipe leads there, and its JOURNAL_STREAM says so;
 * otherwise it has none, whatever ours was. */
static void test_supervisor_journal(void **state)
{
    (void)state;
    static const char script[] = "test \"$JOURNAL_STREAM\" = \"$(stat -L -c %d:%i /dev/fd/2)\" && "
                                 "echo same || echo \"other:$JOURNAL_STREAM:\"";
    supervisor *s;
    struct stat st;
    char stream[64];
    assert_int_equal(supervisor_create(&s), PGD_OK);
    setenv("JOURNAL_STREAM", "1:2", 1);
    log_init("test", LOG_ERROR);
    start_sh(s, script, "");
    expect(s, "exited with status 0; it said: other::");
    assert_int_equal(fstat(STDERR_FILENO, &st), 0);
    snprintf(stream, sizeof(stream), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    setenv("JOURNAL_STREAM", stream, 1);
    log_init("test", LOG_ERROR);
    start_sh(s, script, "");
    expect(s, "exited with status 0; it said: same");
    unsetenv("JOURNAL_STREAM");
    log_init("test", LOG_ERROR);
    supervisor_destroy(s);
}

static void test_supervisor_stdin(void **state)
{
    (void)state;
    supervisor *s;
    assert_int_equal(supervisor_create(&s), PGD_OK);
    /* the text comes, and then stdin stays open: the second read waits until we kill */
    start_sh(s, "read a; echo got $a >&2; read b; echo closed >&2", "secret\n");
    usleep(300000);
    assert_false(supervisor_poll(s));
    supervisor_kill(s);
    expect(s, "killed by signal 9 (Killed); it said: got secret");
    supervisor_destroy(s);
}

/* The whole group goes, a grandchild that ignores signals too; and a stopped child. */
static void test_supervisor_kill_group(void **state)
{
    (void)state;
    supervisor *s;
    char path[] = "/tmp/paged-test-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(supervisor_create(&s), PGD_OK);
    char script[200];
    snprintf(script, sizeof script,
             "(trap '' TERM INT HUP; echo $$ > %s; sleep 60) & exec sleep 60", path);
    start_sh(s, script, "");
    usleep(300000);
    pid_t group = supervisor_get_pid(s);
    assert_int_equal(kill(group, SIGSTOP), 0);
    assert_int_equal(kill(-group, 0), 0);
    supervisor_kill(s);
    expect(s, "killed by signal 9 (Killed)");
    bool is_gone = false;
    for (int i = 0; i < 200 && !is_gone; i++) {
        is_gone = kill(-group, 0) != 0;
        usleep(10000);
    }
    /* An orphan that nobody reaps stays a zombie in its group; that is all that may be left. */
    if (!is_gone) {
        char cmd[128];
        snprintf(cmd, sizeof cmd, "! ps -o stat= -g %ld 2>/dev/null | grep -v '^Z'", (long)group);
        assert_int_equal(system(cmd), 0);
    }
    supervisor_destroy(s);
    close(fd);
    unlink(path);
}

/* A leader that ends by itself takes what it left behind with it. */
static void test_supervisor_orphans(void **state)
{
    (void)state;
    supervisor *s;
    assert_int_equal(supervisor_create(&s), PGD_OK);
    start_sh(s, "sleep 60 & exit 3", "");
    expect(s, "exited with status 3"); /* although the sleep holds stderr open */
    supervisor_destroy(s);
}

static void test_supervisor_no_program(void **state)
{
    (void)state;
    supervisor *s;
    pgd_why why = {0};
    const char *argv[] = {"/nonexistent/x", NULL};
    assert_int_equal(supervisor_create(&s), PGD_OK);
    assert_int_equal(supervisor_start(s, "/nonexistent/x", argv, "", &why), PGD_ENOENT);
    assert_non_null(strstr(why.text, "cannot start /nonexistent/x: No such file"));
    assert_int_equal(supervisor_start(s, "/etc/passwd", argv, "", &why), PGD_ENOENT);
    assert_non_null(strstr(why.text, "Permission denied; set worker_path"));
    assert_true(supervisor_poll(s));
    start_sh(s, "exit 0", ""); /* still usable */
    expect(s, "exited with status 0");
    supervisor_destroy(s);
}

/* The child has its own three descriptors and no signal mask of ours. */
static void test_supervisor_clean_child(void **state)
{
    (void)state;
    supervisor *s;
    sigset_t all;
    sigset_t old;
    int fds[2];
    assert_int_equal(pipe(fds), 0); /* not close-on-exec, on purpose */
    sigfillset(&all);
    assert_int_equal(pthread_sigmask(SIG_SETMASK, &all, &old), 0);
    assert_int_equal(supervisor_create(&s), PGD_OK);
    start_sh(s, "ls /proc/self/fd | tr '\\n' ' ' >&2; grep SigBlk /proc/self/status >&2", "");
    wait_end(s);
    assert_int_equal(pthread_sigmask(SIG_SETMASK, &old, NULL), 0);
    const char *said = supervisor_get_epitaph(s);
    if (strstr(said, "0 1 2 3 ") == NULL ||
        strstr(said, "4 ") != NULL) /* 3 is the directory that ls reads */
        fail_msg("descriptors: %s", said);
    assert_non_null(strstr(said, "SigBlk:\t0000000000000000"));
    supervisor_destroy(s);
    close(fds[0]);
    close(fds[1]);
}

static void test_supervisor_destroy_kills(void **state)
{
    (void)state;
    supervisor *s;
    assert_int_equal(supervisor_create(&s), PGD_OK);
    start_sh(s, "exec sleep 60", "");
    pid_t pid = supervisor_get_pid(s);
    supervisor_destroy(s);
    assert_int_equal(kill(pid, 0), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_supervisor_status),
        cmocka_unit_test(test_supervisor_lines),
        cmocka_unit_test(test_supervisor_words_that_matter),
        cmocka_unit_test(test_supervisor_journal),
        cmocka_unit_test(test_supervisor_stdin),
        cmocka_unit_test(test_supervisor_kill_group),
        cmocka_unit_test(test_supervisor_orphans),
        cmocka_unit_test(test_supervisor_no_program),
        cmocka_unit_test(test_supervisor_clean_child),
        cmocka_unit_test(test_supervisor_destroy_kills),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
