/* The tiers over the lives of workers, without one: what a worker is told, what stays, what is
 * emptied, what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/eventfd.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/log.h"
#include "common/thread.h"
#include "engine/core/core_offload.h"
#include "proto/kv_region.h"

#define MIB (1 << 20)

typedef struct rig {
    config cfg;
    core_sizes sizes;
    worker_facts facts;
    uint8_t seed[32];
    int wake_fd;
    core_offload *o;
    kv_config_msg kv;
} rig;

static void init(rig *r, int64_t memory_bytes)
{
    pgd_why why = {0};
    memset(r, 0, sizeof *r);
    config_init(&r->cfg);
    snprintf(r->cfg.device, sizeof r->cfg.device, "sim");
    r->cfg.kv_offload_memory = memory_bytes;
    assert_int_equal(core_sizes_init(&r->sizes, &r->cfg, NULL, &why), PGD_OK);
    load_done_msg done = {.n_kv_layers = 2,
                          .kv_layers = {{ATTENTION_FULL, 0, 64}, {ATTENTION_FULL, 0, 64}},
                          .vocab_size = 100,
                          .memory_free_bytes = 64 * MIB};
    r->cfg.num_kv_blocks = 40;
    assert_int_equal(core_sizes_fit_kv(&r->facts.kv, &r->sizes, &r->cfg, &done, &why), PGD_OK);
    r->facts.max_model_len = r->sizes.max_model_len;
    r->facts.vocab_size = 100;
    snprintf(r->facts.numerics, sizeof r->facts.numerics, "sim numerics=1");
    r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_true(r->wake_fd >= 0);
}

static pgd_err create(rig *r, pgd_why *why)
{
    core_offload_opts opts = {
        .cfg = &r->cfg, .sizes = &r->sizes, .hash_seed = r->seed, .wake_fd = r->wake_fd};
    return core_offload_create(&r->o, &opts, why);
}

static void begin_life(rig *r)
{
    pgd_why why = {0};
    memset(&r->kv, 0, sizeof r->kv);
    if (core_offload_begin_life(r->o, &r->kv, &r->facts, &why) != PGD_OK)
        fail_msg("%s", why.text);
}

static void deinit(rig *r)
{
    core_offload_destroy(r->o);
    close(r->wake_fd);
}

static void expect_refusal(rig *r, pgd_err err, const char *told)
{
    pgd_why why = {0};
    assert_int_equal(create(r, &why), err);
    assert_null(r->o);
    if (strstr(why.text, told) == NULL)
        fail_msg("expected \"%s\", got \"%s\"", told, why.text);
}

static void test_core_offload_refuses(void **state)
{
    (void)state;
    rig r;
    pgd_why why = {0};
    init(&r, INT64_C(1) << 50);
    expect_refusal(&r, PGD_ERANGE,
                   "the memory of this machine or the limit of this service, got 1073741824 MB");
    r.cfg.kv_offload_memory = MIB;
    snprintf(r.cfg.worker, sizeof r.cfg.worker, "tcp://10.0.0.1:7000");
    expect_refusal(&r, PGD_EINVAL, "expected a worker on this host");
    snprintf(r.cfg.worker, sizeof r.cfg.worker, "tcp://127.0.0.1:7000");
    assert_int_equal(create(&r, &why), PGD_OK);
    core_offload_destroy(r.o);
    r.cfg.worker[0] = 0;
    r.cfg.kv_offload_memory = 5000; /* a page each of superblock, headers, entries */
    assert_int_equal(create(&r, &why), PGD_OK);
    assert_int_equal(core_offload_begin_life(r.o, &r.kv, &r.facts, &why), PGD_ERANGE);
    assert_non_null(strstr(why.text, "expected room for a block of 2048 bytes, at least 16384 "
                                     "bytes in all, got 5000"));
    deinit(&r);
}

static void test_core_offload_without_tiers(void **state)
{
    (void)state;
    rig r;
    pgd_why why = {0};
    offload_stats stats;
    init(&r, 0);
    assert_int_equal(create(&r, &why), PGD_OK);
    assert_null(r.o);
    assert_null(core_offload_get_connector(r.o));
    assert_true(core_offload_reset(r.o) && core_offload_is_quiet(r.o));
    core_offload_get_stats(&stats, r.o);
    assert_int_equal(stats.host.size_bytes, 0);
    deinit(&r);
}

/* All of the memory that was given is used, and no more. */
static void test_core_offload_fits_the_memory(void **state)
{
    (void)state;
    for (int64_t n_bytes = 16384; n_bytes < 3 * MIB; n_bytes += 12345) {
        rig r;
        pgd_why why = {0};
        kv_region region;
        init(&r, n_bytes);
        assert_int_equal(create(&r, &why), PGD_OK);
        begin_life(&r);
        kv_region_shape shape = {r.kv.offload_blocks, r.kv.offload_n_ranks,
                                 kv_layout_block_bytes(&r.facts.kv.groups.layout)};
        assert_int_equal(kv_region_open(&region, r.kv.offload_path, &shape, &why), PGD_OK);
        assert_true(region.n_bytes <= (size_t)n_bytes);
        assert_true(region.n_bytes + 3 * region.block_stride + (size_t)n_bytes / 64 >
                    (size_t)n_bytes);
        kv_region_unmap(&region);
        deinit(&r);
    }
}

static void test_core_offload_over_lives(void **state)
{
    (void)state;
    rig r;
    pgd_why why = {0};
    char path[CONTROL_PATH_BYTES], dir[] = "/tmp/paged-test-offload-XXXXXX", command[64];
    assert_non_null(mkdtemp(dir));
    for (int32_t has_disk = 0; has_disk < 2; has_disk++) {
        kv_region region;
        offload_stats stats;
        init(&r, MIB);
        if (has_disk) {
            snprintf(r.cfg.kv_offload_dir, sizeof r.cfg.kv_offload_dir, "%s/kv", dir);
            r.cfg.kv_offload_disk = MIB;
        }
        assert_int_equal(create(&r, &why), PGD_OK);
        begin_life(&r);
        strcpy(path, r.kv.offload_path);
        int32_t n_blocks = r.kv.offload_blocks;
        kv_region_shape shape = {n_blocks, 1, kv_layout_block_bytes(&r.facts.kv.groups.layout)};
        assert_int_equal(kv_region_open(&region, path, &shape, &why), PGD_OK);
        uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES];
        memcpy(fingerprint, kv_region_get_fingerprint(&region), sizeof fingerprint);
        assert_non_null(core_offload_get_connector(r.o));
        core_offload_get_stats(&stats, r.o);
        assert_int_equal(stats.host.size_bytes, (uint64_t)n_blocks * region.block_stride);
        assert_int_equal(stats.disk.size_bytes, has_disk ? MIB : 0);
        begin_life(&r); /* the same worker again */
        assert_string_equal(r.kv.offload_path, path);
        assert_int_equal(r.kv.offload_blocks, n_blocks);
        assert_memory_equal(kv_region_get_fingerprint(&region), fingerprint, sizeof fingerprint);
        snprintf(r.facts.numerics, sizeof r.facts.numerics, "sim numerics=2");
        begin_life(&r);
        assert_string_equal(r.kv.offload_path, path);
        assert_memory_not_equal(kv_region_get_fingerprint(&region), fingerprint,
                                sizeof fingerprint);
        kv_region_unmap(&region);
        assert_true(core_offload_is_quiet(r.o) && core_offload_reset(r.o));
        deinit(&r);
        assert_int_equal(access(path, F_OK), -1);
    }
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

static int setup(void **state)
{
    (void)state;
    log_set_level(LOG_ERROR);
    thread_set_role(THREAD_CORE);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_core_offload_refuses),
        cmocka_unit_test(test_core_offload_without_tiers),
        cmocka_unit_test(test_core_offload_fits_the_memory),
        cmocka_unit_test(test_core_offload_over_lives),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
