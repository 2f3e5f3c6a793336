/* The option table: every source, every kind of mistake, and paged.conf equal to the dump. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <unistd.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/mem.h"
#include "config/config.h"
#include "config/config_table.h"

static pgd_err load(config *cfg, pgd_why *why, int argc, char **argv)
{
    char *rest[16];
    int n_rest;
    memset(why, 0, sizeof(*why));
    return config_load(cfg, argc, argv, NULL, rest, &n_rest, why);
}

static void write_temp(char *path, const char *text)
{
    strcpy(path, "/tmp/paged-test-config-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
}

static void test_config_precedence(void **state)
{
    (void)state;
    config cfg;
    pgd_why why;
    char path[64];
    write_temp(path, "# comment\n[scheduler]\nmax_num_seqs = 3\nmax_num_batched_tokens = "
                     "77\n[server]\nport = 81\n");
    char *argv[] = {(char *)"--config", path, (char *)"--max-num-seqs=5"};
    setenv("PAGED_MAX_NUM_SEQS", "4", 1);
    setenv("PAGED_PORT", "82", 1);
    assert_int_equal(load(&cfg, &why, 3, argv), PGD_OK);
    unsetenv("PAGED_MAX_NUM_SEQS");
    unsetenv("PAGED_PORT");
    assert_int_equal(cfg.max_num_seqs, 5);
    assert_int_equal(cfg.port, 82);
    assert_int_equal(cfg.max_num_batched_tokens, 77);
    assert_int_equal(cfg.block_size, 16);
    unlink(path);
}

static void test_config_cache_options_need_each_other(void **state)
{
    (void)state;
    static const struct {
        const char *flags[6];
        const char *told; /* NULL = good */
    } rows[] = {
        {{"--kv-offload-memory=1G", "--kv-offload-policy=arc"}, NULL},
        {{"--kv-offload-memory=1G", "--kv-offload-dir=/x", "--kv-offload-disk=2G"}, NULL},
        {{"--kv-offload-memory=1G", "--kv-offload-persist", "--kv-hash-seed-file=/x"}, NULL},
        {{"--kv-offload-memory=1G", "--kv-offload-dir=/x"},
         "kv_offload_dir: expected kv_offload_disk too"},
        {{"--kv-offload-memory=1G", "--kv-offload-disk=1G"},
         "kv_offload_disk: expected kv_offload_dir too"},
        {{"--kv-offload-dir=/x", "--kv-offload-disk=1G"},
         "kv_offload_dir: expected kv_offload_memory too"},
        {{"--kv-offload-persist", "--kv-hash-seed-file=/x"},
         "kv_offload_persist: expected kv_offload_memory too"},
        {{"--kv-offload-memory=1G", "--kv-offload-persist"},
         "kv_offload_persist: expected kv_hash_seed_file too"},
        {{"--kv-offload-memory=1G", "--no-enable-prefix-caching"},
         "kv_offload_memory: expected enable_prefix_caching too"},
        {{"--kv-offload-memory=1G", "--kv-offload-policy=fifo"}, "expected one of lru|arc"},
        {{"--kv-events-replay-url=ipc:///x"}, "kv_events_replay_url: expected kv_events_url too"},
        {{"--kv-events-url=ipc:///y", "--kv-events-replay-url=ipc:///x"}, NULL},
        {{"--kv-offload-memory=65T"}, "kv_offload_memory: expected 0 to"},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        config cfg;
        pgd_why why;
        char *argv[6];
        int argc = 0;
        for (; rows[i].flags[argc] != NULL; argc++)
            argv[argc] = (char *)rows[i].flags[argc];
        pgd_err err = load(&cfg, &why, argc, argv);
        if (rows[i].told == NULL)
            assert_int_equal(err, PGD_OK);
        else if (err == PGD_OK || strstr(why.text, rows[i].told) == NULL)
            fail_msg("expected \"%s\", got \"%s\"", rows[i].told, why.text);
    }
}

static void test_config_file_faults_name_the_line(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        const char *told;
    } rows[] = {
        {"[server]\nport = 99999\n", ":2: port: expected 0 to 65535"},
        {"[server]\n\nprot = 1\n", ":3: unknown option prot (did you mean port?)"},
        {"[server]\napi_key = sk-1\n", ":2: unknown option api_key (did you mean api_key_file?)"},
        {"[server]\nzzzz = 1\n", ":2: unknown option zzzz; "},
        {"[scheduler]\nport = 1\n", ":2: option port belongs in section [server]"},
        {"[cache]\nenable_prefix_caching = maybe\n",
         ":2: enable_prefix_caching: expected true or false"},
        {"[cache]\nkv_cache_memory = 12Q\n", ":2: kv_cache_memory: expected a size"},
        {"[scheduler]\nscheduling_policy = lifo\n",
         ":2: scheduling_policy: expected one of fcfs|priority"},
        {"[server]\nport\n", ":2: expected `name = value`"},
        {"[cache]\ngpu_memory_utilization = 1\n", ":2: option gpu_memory_utilization is not built"},
        /* the first fault is told, whatever follows */
        {"[server]\nprot = 1\nport = 90\n", ":2: unknown option prot"},
        {"[server]\nport = abc\n[model]\nmodle = x\n", ":2: port: expected an integer"},
        {"[server\nport = 1\n", ":1: expected `name = value` or `[section]`"},
        {"port = 1\n", ":1: option port belongs in section [server]"},
        {"[model]\nmodel = /a\n  further\n", ":3: expected `name = value`"},
        {"[server]\nport = 1 ; note\n", ":2: port: expected an integer, got \"1 ; note\""},
        {"[server]\nport =\n", ":2: port: expected an integer, got \"\""},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        config cfg;
        pgd_why why;
        char path[64];
        write_temp(path, rows[i].text);
        char *argv[] = {(char *)"--config", path};
        assert_int_not_equal(load(&cfg, &why, 2, argv), PGD_OK);
        if (strstr(why.text, rows[i].told) == NULL)
            fail_msg("expected %s in: %s", rows[i].told, why.text);
        assert_non_null(strstr(why.text, path));
        unlink(path);
    }
}

/* Byte order mark, CRLF, indentation, no newline at the end, and lines longer than any line buffer.
 */
static void test_config_file_form(void **state)
{
    (void)state;
    config cfg;
    pgd_why why;
    char path[64], text[1500], model[901];
    memset(model, 'a', sizeof(model) - 1);
    model[0] = '/';
    model[sizeof(model) - 1] = '\0';
    snprintf(text, sizeof(text),
             "\xEF\xBB\xBF; %0300d\r\n\r\n  [model]\r\n\tmodel=%s\r\n[server]\r\nuds = /x = y;z #1",
             0, model);
    write_temp(path, text);
    char *argv[] = {(char *)"--config", path};
    if (load(&cfg, &why, 2, argv) != PGD_OK)
        fail_msg("%s", why.text);
    assert_string_equal(cfg.model, model);
    assert_string_equal(cfg.uds, "/x = y;z #1");
    unlink(path);
    char dir[] = "/tmp";
    char *bad[] = {(char *)"--config", dir};
    assert_int_not_equal(load(&cfg, &why, 2, bad), PGD_OK);
    assert_non_null(strstr(why.text, dir));
}

static void test_config_flags(void **state)
{
    (void)state;
    config cfg;
    pgd_why why;
    char *good[] = {
        (char *)"--no-enable-prefix-caching", (char *)"--kv-cache-memory", (char *)"1.5G",
        (char *)"--scheduling-policy",        (char *)"priority",          (char *)"--device=sim"};
    assert_int_equal(load(&cfg, &why, 6, good), PGD_OK);
    assert_false(cfg.enable_prefix_caching);
    assert_int_equal(cfg.kv_cache_memory, 1610612736);
    assert_int_equal(cfg.scheduling_policy, CONFIG_POLICY_PRIORITY);
    assert_string_equal(cfg.device, "sim");
    /* Words for 0, of the option that has them. */
    char *automatic[] = {(char *)"--max-model-len=77", (char *)"--max-model-len", (char *)"-1"};
    assert_int_equal(load(&cfg, &why, 3, automatic), PGD_OK);
    assert_int_equal(cfg.max_model_len, 0);
    automatic[2] = (char *)"auto";
    assert_int_equal(load(&cfg, &why, 3, automatic), PGD_OK);
    assert_int_equal(cfg.max_model_len, 0);
    assert_int_equal(load(&cfg, &why, 1, automatic), PGD_OK);
    assert_int_equal(cfg.max_model_len, 77);
    static const char *const bad[] = {"--portt=1",
                                      "--max-model-len=-2",
                                      "--max-model-len=aut",
                                      "--max-num-seqs=auto",
                                      "--port",
                                      "--port=",
                                      "--port=1x",
                                      "--block-size=24",
                                      "--port=-1",
                                      "--no-port",
                                      "-x",
                                      "--tensor-parallel-size=2",
                                      "--device=tpu",
                                      "--num-kv-blocks=1",
                                      "--no-enable-prefix-caching=1"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++) {
        char *argv[] = {(char *)(uintptr_t)bad[i]};
        if (load(&cfg, &why, 1, argv) == PGD_OK)
            fail_msg("%s was taken", bad[i]);
        assert_true(why.text[0] != '\0');
    }
}

static void test_config_dump_round_trip(void **state)
{
    (void)state;
    config a, b;
    pgd_why why;
    char *argv[] = {(char *)"--port=9", (char *)"--kv-cache-memory=3M",
                    (char *)"--kv-watermark=0.125", (char *)"--host=::1",
                    (char *)"--model=/x y.gguf"};
    char path[] = "/tmp/paged-test-dump-XXXXXX";
    assert_int_equal(load(&a, &why, 5, argv), PGD_OK);
    FILE *out = fdopen(mkstemp(path), "w");
    config_dump(&a, out, true);
    fclose(out);
    char *again[] = {(char *)"--config", path};
    if (load(&b, &why, 2, again) != PGD_OK)
        fail_msg("%s", why.text);
    assert_memory_equal(&a, &b, offsetof(config, sources));
    unlink(path);
}

static void test_config_shipped_file_is_the_dump(void **state)
{
    (void)state;
    config cfg;
    char *shipped, *dumped = NULL;
    size_t n_shipped, n_dumped = 0;
    pgd_why why;
    assert_int_equal(file_read(&shipped, &n_shipped, "config/paged.conf", 1 << 20, &why), PGD_OK);
    FILE *out = open_memstream(&dumped, &n_dumped);
    config_init(&cfg);
    config_dump(&cfg, out, false);
    fclose(out);
    assert_string_equal(shipped, dumped);
    mem_free(shipped);
    free(dumped);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config_precedence),
        cmocka_unit_test(test_config_cache_options_need_each_other),
        cmocka_unit_test(test_config_file_faults_name_the_line),
        cmocka_unit_test(test_config_file_form),
        cmocka_unit_test(test_config_flags),
        cmocka_unit_test(test_config_dump_round_trip),
        cmocka_unit_test(test_config_shipped_file_is_the_dump),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
