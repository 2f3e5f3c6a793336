/* What the service manager hears, line by line. */
#include "engine/service_status.h"
#include "tests/unit/notify_rig.h"

static void test_service_status_loading(void **state)
{
    (void)state;
    notify_rig r;
    service_status s = {0};
    core_stats stats = {0};
    notify_rig_open(&r);
    service_status_loading(&s, &stats); /* nothing is known yet */
    assert_string_equal(notify_rig_receive(&r), "");
    stats.load_total_bytes = 200000000;
    service_status_loading(&s, &stats); /* no progress: no more time */
    assert_string_equal(notify_rig_receive(&r), "STATUS=loading the model: 0 % of 200 MB");
    service_status_loading(&s, &stats);
    assert_string_equal(notify_rig_receive(&r), "");
    stats.load_done_bytes = 50000000;
    service_status_loading(&s, &stats);
    assert_string_equal(notify_rig_receive(&r), "EXTEND_TIMEOUT_USEC=60000000\n"
                                                "STATUS=loading the model: 25 % of 200 MB");
    stats.load_done_bytes = 50000001; /* the same line, but it moves */
    service_status_loading(&s, &stats);
    assert_string_equal(notify_rig_receive(&r), "EXTEND_TIMEOUT_USEC=60000000\n"
                                                "STATUS=loading the model: 25 % of 200 MB");
    stats.load_done_bytes = 0; /* another worker begins */
    service_status_loading(&s, &stats);
    assert_string_equal(notify_rig_receive(&r), "STATUS=loading the model: 0 % of 200 MB");
    notify_rig_close(&r);
}

static void test_service_status_serving(void **state)
{
    (void)state;
    notify_rig r;
    service_status s = {0};
    core_stats stats = {0};
    uint64_t now = 1000000000;
    notify_rig_open(&r);
    service_status_reload_end(&s); /* READY=1 would be a lie before it is */
    service_status_reload_begin(&s);
    assert_string_equal(notify_rig_receive(&r), "");
    service_status_ready(&s, "tiny", "http://127.0.0.1:8000");
    assert_string_equal(notify_rig_receive(&r),
                        "READY=1\nSTATUS=serving tiny on http://127.0.0.1:8000");
    service_status_serving(&s, &stats, now);
    assert_string_equal(notify_rig_receive(&r),
                        "STATUS=serving tiny on http://127.0.0.1:8000: idle");
    stats.scheduler.n_running = 3;
    stats.scheduler.n_waiting = 1;
    stats.n_queued_commands = 1;
    stats.scheduler.n_generated_tokens = 1000;
    service_status_serving(&s, &stats, now + 4999999); /* too soon */
    assert_string_equal(notify_rig_receive(&r), "");
    service_status_serving(&s, &stats, now + 5000000);
    assert_string_equal(notify_rig_receive(&r), "STATUS=serving tiny on http://127.0.0.1:8000: "
                                                "3 running, 2 waiting, 200 tokens/s");
    stats.scheduler = (scheduler_stats){.n_generated_tokens = 1000};
    stats.n_queued_commands = 0;
    for (uint64_t i = 2; i < 6; i++) /* an idle line is told once */
        service_status_serving(&s, &stats, now + i * 5000000);
    assert_string_equal(notify_rig_receive(&r),
                        "STATUS=serving tiny on http://127.0.0.1:8000: idle");
    assert_string_equal(notify_rig_receive(&r), "");
    service_status_reload_begin(&s);
    uint64_t monotonic;
    assert_int_equal(sscanf(notify_rig_receive(&r), "RELOADING=1\nMONOTONIC_USEC=%ju", &monotonic),
                     1);
    assert_true(monotonic > 0);
    service_status_reload_end(&s);
    assert_string_equal(notify_rig_receive(&r), "READY=1");
    service_status_recovering(&s, "killed by signal 9\nREADY=1");
    assert_string_equal(notify_rig_receive(&r),
                        "STATUS=restarting the worker: killed by signal 9 READY=1");
    service_status_stopping(&s, 30);
    assert_string_equal(notify_rig_receive(&r), "STOPPING=1\nEXTEND_TIMEOUT_USEC=45000000\n"
                                                "STATUS=finishing running requests");
    notify_rig_close(&r);
}

/* The longest names fit, and cannot end a line early. */
static void test_service_status_long_names(void **state)
{
    (void)state;
    notify_rig r;
    service_status s = {0};
    char name[400];
    memset(name, '\n', sizeof(name));
    name[sizeof(name) - 1] = '\0';
    notify_rig_open(&r);
    service_status_ready(&s, name, name);
    const char *got = notify_rig_receive(&r);
    assert_int_equal(strncmp(got, "READY=1\nSTATUS=serving ", 23), 0);
    assert_null(strchr(got + 8, '\n'));
    service_status_recovering(&s, name);
    assert_null(strchr(notify_rig_receive(&r), '\n'));
    notify_rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_service_status_loading),
        cmocka_unit_test(test_service_status_serving),
        cmocka_unit_test(test_service_status_long_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
