/* Lines as they come out of stderr: for people, and for the journal. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/log.h"

/* What the calls between begin and end wrote. */
typedef struct capture {
    int saved_fd;
    int pipe[2];
    char text[8192];
} capture;

static void capture_begin(capture *c)
{
    assert_int_equal(pipe(c->pipe), 0);
    c->saved_fd = dup(STDERR_FILENO);
    dup2(c->pipe[1], STDERR_FILENO);
}

static const char *capture_end(capture *c)
{
    dup2(c->saved_fd, STDERR_FILENO);
    close(c->saved_fd);
    close(c->pipe[1]);
    ssize_t n = read(c->pipe[0], c->text, sizeof(c->text) - 1);
    c->text[n > 0 ? n : 0] = '\0';
    close(c->pipe[0]);
    return c->text;
}

static void say_all(void)
{
    log_error("a", "x=%d", 1);
    log_warn("b", "y");
    log_info("c", "z");
    log_debug("d", "not shown");
}

static const char *speak(capture *c, const char *journal_stream)
{
    if (journal_stream != NULL)
        setenv("JOURNAL_STREAM", journal_stream, 1);
    log_init("engine", LOG_INFO);
    say_all();
    const char *text = capture_end(c);
    unsetenv("JOURNAL_STREAM");
    return text;
}

static void test_log_plain(void **state)
{
    (void)state;
    static const char *const streams[] = {NULL, "", "1:2", "x", "8:"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(streams); i++) {
        capture c;
        int h, m, s, ms, used = 0;
        capture_begin(&c);
        const char *text = speak(&c, streams[i]);
        if (sscanf(text, "%2d:%2d:%2d.%3d error engine a: x=1\n%n", &h, &m, &s, &ms, &used) != 4 ||
            used == 0)
            fail_msg("row %zu: %s", i, text);
        assert_non_null(strstr(text, " warn  engine b: y\n"));
        assert_null(strstr(text, "not shown"));
        assert_false(log_is_journal());
    }
}

static void test_log_journal(void **state)
{
    (void)state;
    capture c;
    struct stat st;
    char stream[64];
    capture_begin(&c);
    assert_int_equal(fstat(STDERR_FILENO, &st), 0);
    snprintf(stream, sizeof(stream), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    assert_string_equal(speak(&c, stream), "<3>engine a: x=1\n<4>engine b: y\n<6>engine c: z\n");
    assert_true(log_is_journal());
    /* the descriptor has changed since the variable was set, or there is more in it */
    strcat(stream, "0");
    capture_begin(&c);
    assert_null(strstr(speak(&c, stream), "<3>"));
    assert_false(log_is_journal());
}

/* One event is one line, whatever it quotes and however long it is. */
static void test_log_one_line(void **state)
{
    (void)state;
    capture c;
    char big[5000];
    memset(big, 'x', sizeof(big));
    big[sizeof(big) - 1] = '\0';
    capture_begin(&c);
    log_init("engine", LOG_INFO);
    log_info("a", "%s", "one\ntwo\r\x1B[31m\xC2\x9B");
    const char *text = capture_end(&c);
    assert_non_null(strstr(text, "one two ?[31m??\n"));
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    capture_begin(&c);
    log_info("a", "%s", big);
    text = capture_end(&c);
    assert_int_equal(strlen(text), 2047);
    assert_int_equal(text[2046], '\n');
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_log_plain),
        cmocka_unit_test(test_log_journal),
        cmocka_unit_test(test_log_one_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
