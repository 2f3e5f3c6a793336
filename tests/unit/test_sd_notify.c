/* The datagrams of systemd's protocol, and who is meant by its variables. */
#include "common/base.h"
#include "engine/sd_notify.h"
#include "tests/unit/notify_rig.h"

static void test_sd_notify_sends(void **state)
{
    (void)state;
    notify_rig r;
    notify_rig_open(&r);
    sd_notify_send("READY=1\nSTATUS=here");
    assert_string_equal(notify_rig_receive(&r), "READY=1\nSTATUS=here");
    sd_notify_ping();
    assert_string_equal(notify_rig_receive(&r), "WATCHDOG=1");
    unsetenv("NOTIFY_SOCKET");
    sd_notify_send("READY=1");
    setenv("NOTIFY_SOCKET", "relative", 1);
    sd_notify_send("READY=1");
    setenv("NOTIFY_SOCKET", "", 1);
    sd_notify_send("READY=1");
    char too_long[300];
    memset(too_long, 'x', sizeof(too_long));
    too_long[0] = '/';
    too_long[sizeof(too_long) - 1] = '\0';
    setenv("NOTIFY_SOCKET", too_long, 1);
    sd_notify_send("READY=1");
    assert_string_equal(notify_rig_receive(&r), "");
    notify_rig_close(&r);
    sd_notify_send("READY=1"); /* nobody there */
}

static void test_sd_notify_abstract_socket(void **state)
{
    (void)state;
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    char name[64], got[16] = "";
    int len = snprintf(name, sizeof(name), "@paged-test-%ld", (long)getpid());
    memcpy(addr.sun_path + 1, name + 1, (size_t)len - 1);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    socklen_t addr_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)len);
    assert_int_equal(bind(fd, (struct sockaddr *)&addr, addr_len), 0);
    setenv("NOTIFY_SOCKET", name, 1);
    sd_notify_send("READY=1");
    assert_int_equal(recv(fd, got, sizeof(got), 0), 7);
    assert_string_equal(got, "READY=1");
    unsetenv("NOTIFY_SOCKET");
    close(fd);
}

/* A watchdog ping to a full socket must not wait. */
static void test_sd_notify_ping_never_waits(void **state)
{
    (void)state;
    notify_rig r;
    int n = 0;
    notify_rig_open(&r);
    for (int i = 0; i < 5000; i++)
        sd_notify_ping();
    while (notify_rig_receive(&r)[0] != '\0')
        n++;
    assert_true(n > 0 && n < 5000);
    notify_rig_close(&r);
}

static void test_sd_notify_watchdog(void **state)
{
    (void)state;
    static const struct {
        const char *usec, *pid;
        uint64_t wanted;
    } rows[] = {
        {NULL, NULL, 0},
        {"30000000", NULL, 30000000},
        {"0", NULL, 0},
        {"-5", NULL, 0},
        {"", NULL, 0},
        {"10s", NULL, 0},
        {"5000", "1", 0},
        {"5000", "", 0},
        {"99999999999999999999999", NULL, 0},
        {"5000", "self", 5000},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        char self[32];
        snprintf(self, sizeof(self), "%ld", (long)getpid());
        unsetenv("WATCHDOG_USEC");
        unsetenv("WATCHDOG_PID");
        if (rows[i].usec != NULL)
            setenv("WATCHDOG_USEC", rows[i].usec, 1);
        if (rows[i].pid != NULL)
            setenv("WATCHDOG_PID", strcmp(rows[i].pid, "self") == 0 ? self : rows[i].pid, 1);
        if (sd_notify_watchdog_us() != rows[i].wanted)
            fail_msg("row %zu", i);
    }
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sd_notify_sends),
        cmocka_unit_test(test_sd_notify_abstract_socket),
        cmocka_unit_test(test_sd_notify_ping_never_waits),
        cmocka_unit_test(test_sd_notify_watchdog),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
