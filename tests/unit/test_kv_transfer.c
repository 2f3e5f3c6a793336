/* Transfers beside the steps: contents against a shadow, order in a direction, flushes that wait, what
 * is found wrong in the medium, and each ordering of OC10 that is the worker's, on a device that does
 * everything as late as it may. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/thread.h"
#include "proto/kv_region.h"
#include "tests/unit/lazy_device.h"
#include "worker/kv_transfer.h"

#define N_DEVICE  40 /* blocks, null block included */
#define N_MEDIUM  24
#define N_SLOTS   3
#define MAX_TOLD  8192
#define MAX_BYTES 1152 /* of a shard */

static const size_t PAGE_BYTES[N_SLOTS] = {64, 1024, 8};

typedef struct rig {
    kv_transfer *t;
    copy_device *device;
    lazy_device lazy;
    int fd;
    kv_region region;
    uint8_t *pages[N_SLOTS]; /* [N_DEVICE][PAGE_BYTES] */
    kv_config_msg config;
    uint64_t progress;
    uint64_t step_id;
    pthread_mutex_t mutex;
    pthread_cond_t more;
    int n_told;
    kv_transfer_done told[MAX_TOLD];
    int n_refusals; /* on_done says "not now" this often */
    bool is_over;   /* stop has returned */
    /* What a load has brought, looked at when it is told. */
    block_id watched;
    uint64_t seen;
} rig;

/* --- contents --------------------------------------------------------------------------------- */

/* A block's bytes follow from a number; 0 is a block of zeros. */
static void fill(uint8_t *bytes, size_t n_bytes, uint64_t content, int slot)
{
    for (size_t i = 0; i < n_bytes; i++)
        bytes[i] = content == 0 ? 0 : (uint8_t)(content * 2654435761u + i * 31 + (size_t)slot * 7);
    if (content != 0)
        memcpy(bytes, &content, sizeof content); /* each page has 8 bytes at least */
}

static void put_content(rig *r, block_id block, uint64_t content)
{
    for (int s = 0; s < N_SLOTS; s++)
        fill(r->pages[s] + (size_t)block * PAGE_BYTES[s], PAGE_BYTES[s], content, s);
}

/* The number that the whole block shows; fails on a mixture. */
static uint64_t content_of(const rig *r, block_id block)
{
    uint64_t content;
    uint8_t page[MAX_BYTES];
    memcpy(&content, r->pages[0] + (size_t)block * PAGE_BYTES[0], sizeof content);
    for (int s = 0; s < N_SLOTS; s++) {
        fill(page, PAGE_BYTES[s], content, s);
        if (memcmp(page, r->pages[s] + (size_t)block * PAGE_BYTES[s], PAGE_BYTES[s]) != 0)
            return UINT64_MAX;
    }
    return content;
}

static uint64_t shard_content(const rig *r, int32_t medium)
{
    uint8_t bytes[MAX_BYTES];
    uint64_t content;
    size_t at = 0;
    const uint8_t *shard = kv_region_get_shard(&r->region, medium, 0);
    memcpy(&content, shard, sizeof content);
    for (int s = 0; s < N_SLOTS; at += PAGE_BYTES[s++])
        fill(bytes + at, PAGE_BYTES[s], content, s);
    return memcmp(bytes, shard, at) == 0 ? content : UINT64_MAX;
}

static void put_shard(rig *r, int32_t medium, uint64_t content)
{
    uint8_t *shard = kv_region_get_shard(&r->region, medium, 0);
    for (int s = 0; s < N_SLOTS; shard += PAGE_BYTES[s++])
        fill(shard, PAGE_BYTES[s], content, s);
    kv_region_seal(&r->region, medium, 0, content, kv_region_get_shard(&r->region, medium, 0));
}

/* --- the rig ---------------------------------------------------------------------------------- */

static bool on_done(void *arg, const kv_transfer_done *done)
{
    rig *r = arg;
    pthread_mutex_lock(&r->mutex);
    assert_false(r->is_over);
    bool takes = r->n_refusals == 0;
    if (takes) {
        assert_true(r->n_told < MAX_TOLD);
        r->told[r->n_told++] = *done;
        if (r->watched != 0)
            r->seen = content_of(r, r->watched);
        pthread_cond_broadcast(&r->more);
    } else {
        r->n_refusals--;
    }
    pthread_mutex_unlock(&r->mutex);
    return takes;
}

static void set_config(kv_config_msg *m, int fd, int32_t n_ranks)
{
    *m = (kv_config_msg){
        .n_blocks = N_DEVICE, .offload_blocks = N_MEDIUM, .offload_n_ranks = n_ranks};
    m->layout.n_slots = N_SLOTS;
    for (int s = 0; s < N_SLOTS; s++)
        m->layout.page_bytes[s] = PAGE_BYTES[s];
    snprintf(m->offload_path, sizeof m->offload_path, "/proc/self/fd/%d", fd);
}

static pgd_err create(rig *r, int32_t rank, pgd_why *why)
{
    kv_transfer_slot slots[N_SLOTS];
    for (int s = 0; s < N_SLOTS; s++)
        slots[s] = (kv_transfer_slot){r->pages[s], PAGE_BYTES[s]};
    kv_transfer_opts opts = {.device = r->device,
                             .slots = slots,
                             .n_slots = N_SLOTS,
                             .config = &r->config,
                             .rank = rank,
                             .progress = &r->progress,
                             .on_done = on_done,
                             .arg = r};
    return kv_transfer_create(&r->t, &opts, why);
}

/* depth 0: the CPU; else lazy. */
static void rig_init(rig *r, int32_t depth)
{
    static const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES];
    pgd_why why = {{0}};
    memset(r, 0, sizeof *r);
    kv_region_shape shape = {N_MEDIUM, 1, 64 + 1024 + 8};
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->more, NULL);
    for (int s = 0; s < N_SLOTS; s++)
        r->pages[s] = calloc(N_DEVICE, PAGE_BYTES[s]);
    r->fd = memfd_create("region", MFD_CLOEXEC);
    assert_int_equal(kv_region_format(&r->region, r->fd, &shape, fingerprint, &why), PGD_OK);
    if (depth > 0)
        lazy_init(&r->lazy, depth);
    r->device = depth > 0 ? &r->lazy.base : copy_device_get_cpu();
    set_config(&r->config, r->fd, 1);
    if (create(r, 0, &why) != PGD_OK)
        fail_msg("%s", why.text);
}

static void rig_deinit(rig *r)
{
    kv_transfer_stop(r->t);
    r->is_over = true;
    kv_transfer_destroy(r->t);
    assert_int_equal(r->lazy.n_events, 0);
    kv_region_unmap(&r->region);
    close(r->fd);
    for (int s = 0; s < N_SLOTS; s++)
        free(r->pages[s]);
}

static pgd_err step(rig *r, const kv_transfer_msg *msgs, int32_t n_msgs, const block_id *zero,
                    int32_t n_zero, pgd_why *why)
{
    scheduler_output out = {.step_id = ++r->step_id,
                            .n_transfers = n_msgs,
                            .transfers = msgs,
                            .n_blocks_to_zero = n_zero,
                            .blocks_to_zero = zero};
    mem_forbid();
    pgd_err err = kv_transfer_begin_step(r->t, &out, why);
    mem_permit();
    return err;
}

static void must_step(rig *r, const kv_transfer_msg *msgs, int32_t n_msgs)
{
    pgd_why why = {{0}};
    if (step(r, msgs, n_msgs, NULL, 0, &why) != PGD_OK)
        fail_msg("%s", why.text);
}

static void wait_told(rig *r, int n_told)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 20;
    pthread_mutex_lock(&r->mutex);
    while (r->n_told < n_told)
        if (pthread_cond_timedwait(&r->more, &r->mutex, &end) != 0)
            fail_msg("expected %d transfers to end, got %d", n_told, r->n_told);
    pthread_mutex_unlock(&r->mutex);
}

static kv_transfer_msg transfer(kv_transfer_kind kind, uint64_t id, int32_t n_blocks,
                                const block_id *devices, const int32_t *mediums,
                                const uint64_t *tags)
{
    return (kv_transfer_msg){id, kind, n_blocks, devices, mediums, tags};
}

#define ONE(kind, id, device, medium, tag)                                                 \
    ((kv_transfer_msg){id, kind, 1, (const block_id[]){device}, (const int32_t[]){medium}, \
                       (const uint64_t[]){tag}})
#define STORE(id, device, medium, tag) ONE(KV_TRANSFER_STORE, id, device, medium, tag)
#define LOAD(id, device, medium, tag)  ONE(KV_TRANSFER_LOAD, id, device, medium, tag)
#define FLUSH(id)                      ((kv_transfer_msg){.job_id = id, .kind = KV_TRANSFER_FLUSH})

static void open_gate_later(void *arg)
{
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
    lazy_set_gate(arg, false);
}

/* --- what moves -------------------------------------------------------------------------------- */

static void test_kv_transfer_round_trip(void **state)
{
    (void)state;
    static const int32_t depths[] = {0, 1, 3, COPY_MAX_DEPTH};
    for (size_t k = 0; k < PGD_ARRAY_LEN(depths); k++) {
        static rig r;
        block_id from[20], to[20];
        int32_t mediums[20];
        uint64_t tags[20];
        rig_init(&r, depths[k]);
        for (int32_t i = 0; i < 20; i++) {
            from[i] = 1 + i;
            to[i] = N_DEVICE - 1 - i % 19;
            mediums[i] = (i * 7) % N_MEDIUM;
            tags[i] = (uint64_t)i + 100;
            put_content(&r, from[i], tags[i]);
        }
        kv_transfer_msg m = transfer(KV_TRANSFER_STORE, 1, 20, from, mediums, tags);
        must_step(&r, &m, 1);
        wait_told(&r, 1);
        assert_true(r.told[0].job_id == 1 && r.told[0].n_good == 20);
        assert_int_equal(r.told[0].n_bytes, 20 * 1096);
        for (int32_t i = 0; i < 20; i++)
            assert_int_equal(shard_content(&r, mediums[i]), tags[i]);
        m = transfer(KV_TRANSFER_LOAD, 1, 19, to, mediums, tags); /* the id is free again */
        must_step(&r, &m, 1);
        wait_told(&r, 2);
        assert_int_equal(r.told[1].n_good, 19);
        for (int32_t i = 0; i < 19; i++)
            assert_int_equal(content_of(&r, to[i]), tags[i]);
        assert_int_equal(r.progress, 39);
        rig_deinit(&r);
    }
}

/* Ranks share blocks, each has its shard. */
static void test_kv_transfer_ranks(void **state)
{
    (void)state;
    static rig r[2];
    static const uint8_t fingerprint[KV_REGION_FINGERPRINT_BYTES];
    pgd_why why = {{0}};
    kv_region region;
    kv_region_shape shape = {N_MEDIUM, 2, 64 + 1024 + 8};
    for (int i = 0; i < 2; i++) {
        rig_init(&r[i], 0);
        kv_transfer_destroy(r[i].t);
    }
    assert_int_equal(kv_region_format(&region, r[0].fd, &shape, fingerprint, &why), PGD_OK);
    for (int i = 0; i < 2; i++) {
        set_config(&r[i].config, r[0].fd, 2);
        assert_int_equal(create(&r[i], i, &why), PGD_OK);
        put_content(&r[i], 5, 70 + (uint64_t)i);
        must_step(&r[i], &STORE(1, 5, 3, 11), 1);
        wait_told(&r[i], 1);
    }
    for (int i = 0; i < 2; i++) {
        must_step(&r[i], &LOAD(2, 6, 3, 11), 1);
        wait_told(&r[i], 2);
        assert_int_equal(r[i].told[1].n_good, 1);
        assert_int_equal(content_of(&r[i], 6), 70 + i);
    }
    /* The shard of one is damaged: only its load fails. */
    ((uint8_t *)kv_region_get_shard(&region, 3, 1))[1095] ^= 1;
    for (int i = 0; i < 2; i++) {
        must_step(&r[i], &LOAD(3, 7, 3, 11), 1);
        wait_told(&r[i], 3);
        assert_int_equal(r[i].told[2].n_good, i == 0);
    }
    kv_transfer_stop(r[1].t);
    kv_transfer_destroy(r[1].t);
    r[1].t = NULL;
    assert_int_equal(create(&r[1], 2, &why), PGD_EPROTO);
    assert_non_null(strstr(why.text, "expected shards for rank 2, got 2"));
    kv_region_unmap(&region);
    rig_deinit(&r[0]);
    rig_deinit(&r[1]);
}

/* An older worker may still write into the region that a new engine has taken up: now what is right,
 * now what is not. */
typedef struct old_worker {
    kv_region region;
    int32_t medium;
    uint8_t right[MAX_BYTES];
    bool is_over;
} old_worker;

static void write_on(void *arg)
{
    old_worker *o = arg;
    uint8_t *shard = kv_region_get_shard(&o->region, o->medium, 0);
    while (!__atomic_load_n(&o->is_over, __ATOMIC_RELAXED)) {
        memset(shard, 0xee, 1096);
        (void)clock_now_us(); /* each is there for a moment */
        memcpy(shard, o->right, 1096);
        (void)clock_now_us();
    }
}

static void test_kv_transfer_beside_old_worker(void **state)
{
    (void)state;
    static rig r;
    old_worker old = {.medium = 3};
    pgd_why why = {{0}};
    pthread_t thread;
    int32_t n_bad = 0;
    rig_init(&r, 0);
    assert_int_equal(kv_region_open(&old.region, r.config.offload_path, &r.region.shape, &why),
                     PGD_OK);
    put_shard(&r, old.medium, 77);
    memcpy(old.right, kv_region_get_shard(&r.region, old.medium, 0), 1096);
    assert_int_equal(thread_start(&thread, "old", write_on, &old), PGD_OK);
    put_content(&r, 1, 77);
    for (int i = 0; i < 6000; i++) {
        r.n_told = 0;
        put_content(&r, 2, 0);
        must_step(&r, &STORE(1, 1, old.medium, 7), 1);
        wait_told(&r, 1);
        must_step(&r, &LOAD(2, 2, old.medium, 7), 1);
        wait_told(&r, 2);
        bool is_good = r.told[1].n_good == 1;
        assert_int_equal(content_of(&r, 2), is_good ? 77 : 0);
        n_bad += !is_good;
    }
    __atomic_store_n(&old.is_over, true, __ATOMIC_RELAXED);
    thread_join(thread);
    assert_true(n_bad > 0); /* it did get in between */
    kv_region_unmap(&old.region);
    rig_deinit(&r);
}

/* The leading blocks up to the first that is wrong are good; the device never sees a wrong one. */
static void test_kv_transfer_bad_blocks(void **state)
{
    (void)state;
    static const char *const faults[] = {"tag", "payload", "torn header", "checksum",
                                         "other shard"};
    for (int32_t depth = 0; depth < 4; depth += 3) {
        for (size_t k = 0; k < PGD_ARRAY_LEN(faults); k++) {
            for (int32_t bad = 0; bad < 6; bad += 2) {
                static rig r;
                block_id devices[6];
                int32_t mediums[6];
                uint64_t tags[6];
                rig_init(&r, depth);
                for (int32_t i = 0; i < 6; i++) {
                    devices[i] = 10 + i;
                    mediums[i] = i;
                    tags[i] = 50 + (uint64_t)i;
                    put_content(&r, devices[i], 900);
                    put_shard(&r, mediums[i], tags[i]);
                }
                kv_region_header *h = kv_region_get_header(&r.region, bad, 0);
                if (k == 0)
                    tags[bad] = 4;
                else if (k == 1)
                    ((uint8_t *)kv_region_get_shard(&r.region, bad, 0))[700] ^= 0x10;
                else if (k == 2)
                    h->tag = 1, tags[bad] = 1;
                else if (k == 3)
                    h->checksum ^= 1u << 31;
                else
                    memcpy(kv_region_get_shard(&r.region, bad, 0),
                           kv_region_get_shard(&r.region, 9, 0), 1096);
                kv_transfer_msg m = transfer(KV_TRANSFER_LOAD, 1, 6, devices, mediums, tags);
                must_step(&r, &m, 1);
                wait_told(&r, 1);
                if (r.told[0].n_good != bad)
                    fail_msg("%s of block %d: n_good %d", faults[k], bad, r.told[0].n_good);
                assert_int_equal(r.told[0].n_bytes, bad * 1096);
                for (int32_t i = 0; i < 6; i++)
                    assert_int_equal(content_of(&r, devices[i]), i < bad ? tags[i] : 900);
                rig_deinit(&r);
            }
        }
    }
}

/* --- order ------------------------------------------------------------------------------------ */

static void test_kv_transfer_fifo(void **state)
{
    (void)state;
    static rig r;
    rig_init(&r, 2);
    lazy_set_gate(&r.lazy, true);
    for (int32_t i = 0; i < N_MEDIUM; i++)
        put_shard(&r, i, 1);
    for (int32_t i = 0; i < 12; i++) {
        kv_transfer_msg m[2] = {LOAD(100 + (uint64_t)i, 1 + i, i, 1),
                                STORE(200 + (uint64_t)i, 20 + i, 12 + i, 1)};
        must_step(&r, m, 2);
    }
    lazy_set_gate(&r.lazy, false);
    wait_told(&r, 24);
    uint64_t next[2] = {100, 200};
    for (int i = 0; i < 24; i++) {
        int k = r.told[i].job_id >= 200;
        assert_int_equal(r.told[i].job_id, next[k]++);
    }
    rig_deinit(&r);
}

/* RAW: the compute stream has been given the write, not done it. */
static void test_kv_transfer_store_after_compute(void **state)
{
    (void)state;
    static rig r;
    static uint8_t computed[N_SLOTS][1024];
    rig_init(&r, 1);
    put_content(&r, 4, 111);
    for (int s = 0; s < N_SLOTS; s++) {
        fill(computed[s], PAGE_BYTES[s], 222, s);
        assert_int_equal(lazy_copy(r.device, COPY_STREAM_COMPUTE, r.pages[s] + 4 * PAGE_BYTES[s],
                                   computed[s], PAGE_BYTES[s]),
                         PGD_OK);
    }
    must_step(&r, &STORE(1, 4, 0, 222), 1);
    wait_told(&r, 1);
    assert_int_equal(shard_content(&r, 0), 222);
    rig_deinit(&r);
}

/* WAR: compute of an earlier step still has to read what the load overwrites. */
static void test_kv_transfer_load_after_compute(void **state)
{
    (void)state;
    static rig r;
    uint64_t read_by_compute = 0;
    rig_init(&r, 1);
    put_content(&r, 4, 111);
    put_shard(&r, 2, 222);
    assert_int_equal(lazy_copy(r.device, COPY_STREAM_COMPUTE, &read_by_compute,
                               r.pages[0] + 4 * PAGE_BYTES[0], sizeof read_by_compute),
                     PGD_OK);
    must_step(&r, &LOAD(1, 4, 2, 222), 1);
    wait_told(&r, 1);
    lazy_drain(&r.lazy);
    assert_int_equal(read_by_compute, 111);
    assert_int_equal(content_of(&r, 4), 222);
    rig_deinit(&r);
}

/* Told means done: the content is there when the callback runs. */
static void test_kv_transfer_told_when_done(void **state)
{
    (void)state;
    static rig r;
    rig_init(&r, 3);
    put_shard(&r, 2, 222);
    r.watched = 4;
    must_step(&r, &LOAD(1, 4, 2, 222), 1);
    wait_told(&r, 1);
    assert_int_equal(r.seen, 222);
    r.watched = 0;
    must_step(&r, &STORE(2, 4, 5, 222), 1);
    wait_told(&r, 2);
    assert_true(kv_region_holds(&r.region, 5, 0, 222, kv_region_get_shard(&r.region, 5, 0)));
    assert_int_equal(shard_content(&r, 5), 222);
    rig_deinit(&r);
}

/* WAR on the source: behind the flush the step may write the block at once. */
static void test_kv_transfer_flush_waits(void **state)
{
    (void)state;
    for (int with_step = 0; with_step < 2; with_step++) {
        static rig r;
        pthread_t opener;
        rig_init(&r, 1);
        lazy_set_gate(&r.lazy, true);
        put_content(&r, 4, 111);
        kv_transfer_msg m[3] = {FLUSH(1), STORE(1, 4, 0, 111), STORE(2, 5, 1, 1)};
        if (!with_step)
            must_step(&r, m + 1, 2);
        assert_int_equal(thread_start(&opener, "opener", open_gate_later, &r.lazy), PGD_OK);
        must_step(&r, m, with_step ? 3 : 1); /* the flush comes before its store in the message */
        put_content(&r, 4, 333);
        thread_join(opener);
        wait_told(&r, 2);
        assert_int_equal(shard_content(&r, 0), 111);
        rig_deinit(&r);
    }
}

/* In one message: stored, flushed, loaded over, whatever the order of its entries. */
static void test_kv_transfer_load_follows_store(void **state)
{
    (void)state;
    static rig r;
    rig_init(&r, 1);
    put_content(&r, 4, 111);
    put_shard(&r, 2, 222);
    kv_transfer_msg m[3] = {LOAD(2, 4, 2, 222), FLUSH(1), STORE(1, 4, 0, 111)};
    must_step(&r, m, 3);
    wait_told(&r, 2);
    assert_int_equal(shard_content(&r, 0), 111);
    assert_int_equal(content_of(&r, 4), 222);
    must_step(&r, (const kv_transfer_msg[]){FLUSH(1), FLUSH(77), FLUSH(2)}, 3); /* have ended */
    rig_deinit(&r);
}

/* --- refusals --------------------------------------------------------------------------------- */

static void refuse(rig *r, const kv_transfer_msg *m, int32_t n, const block_id *zero,
                   const char *part)
{
    pgd_why why = {{0}};
    assert_int_equal(step(r, m, n, zero, zero != NULL, &why), PGD_EPROTO);
    if (strstr(why.text, part) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", part, why.text);
}

static void test_kv_transfer_refuses(void **state)
{
    (void)state;
    static rig r;
    static const block_id twice[3] = {8, 9, 8};
    static const int32_t mediums[3] = {0, 1, 2};
    static const uint64_t tags[3] = {1, 2, 3};
    rig_init(&r, 1);
    lazy_set_gate(&r.lazy, true);
    put_shard(&r, 1, 1);
    must_step(&r, (const kv_transfer_msg[]){STORE(1, 4, 0, 1), LOAD(2, 5, 1, 1)}, 2);
    static const block_id odd_blocks[] = {0, -1, N_DEVICE, INT32_MAX, INT32_MIN};
    static const int32_t odd_mediums[] = {-1, N_MEDIUM, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < PGD_ARRAY_LEN(odd_blocks); i++) {
        refuse(&r, &STORE(3, odd_blocks[i], 2, 1), 1, NULL, "expected a device block 1..39");
        refuse(&r, &LOAD(3, odd_blocks[i], 2, 1), 1, NULL, "expected a device block 1..39");
    }
    for (size_t i = 0; i < PGD_ARRAY_LEN(odd_mediums); i++)
        refuse(&r, &LOAD(3, 6, odd_mediums[i], 1), 1, NULL, "a medium block 0..23");
    refuse(&r, &STORE(1, 6, 2, 1), 1, NULL, "expected a new id");
    refuse(&r, &LOAD(1, 6, 2, 1), 1, NULL, "expected a new id");
    refuse(&r, &STORE(2, 6, 2, 1), 1, NULL, "expected a new id");
    refuse(&r, &LOAD(3, 4, 2, 1), 1, NULL, "no other one moves, got device block 4"); /* stored */
    refuse(&r, &LOAD(3, 5, 2, 1), 1, NULL, "no other one moves");
    refuse(&r, &STORE(3, 5, 2, 1), 1, NULL, "no other one moves");
    kv_transfer_msg m = transfer(KV_TRANSFER_LOAD, 3, 3, twice, mediums, tags);
    refuse(&r, &m, 1, NULL, "no other one moves, got device block 8");
    static const block_id stored[] = {4};
    static const block_id loaded[] = {5};
    refuse(&r, NULL, 0, stored, "blocks to zero");
    refuse(&r, NULL, 0, loaded, "blocks to zero");
    /* What was refused has left nothing behind. */
    must_step(&r, &LOAD(3, 8, 2, 1), 1);
    must_step(&r, &STORE(4, 4, 3, 1), 1); /* a second reader */
    lazy_set_gate(&r.lazy, false);
    wait_told(&r, 4);
    pgd_why why = {{0}};
    assert_int_equal(step(&r, NULL, 0, stored, 1, &why), PGD_OK);
    rig_deinit(&r);
    scheduler_output out = {.n_transfers = 1, .transfers = &m};
    assert_int_equal(kv_transfer_begin_step(NULL, &out, &why), PGD_EPROTO);
    out.n_transfers = 0;
    assert_int_equal(kv_transfer_begin_step(NULL, &out, &why), PGD_OK);
}

static void test_kv_transfer_bounds(void **state)
{
    (void)state;
    static rig r;
    rig_init(&r, 1);
    lazy_set_gate(&r.lazy, true);
    block_id all[N_DEVICE];
    int32_t mediums[N_DEVICE] = {0};
    uint64_t tags[N_DEVICE] = {0};
    for (int32_t i = 0; i < N_DEVICE - 1; i++)
        all[i] = 1 + i;
    kv_transfer_msg m = transfer(KV_TRANSFER_STORE, 1, N_DEVICE - 1, all, mediums, tags);
    must_step(&r, &m, 1);
    must_step(&r, &STORE(2, 1, 0, 0), 1);
    refuse(&r, &STORE(3, 1, 0, 0), 1, NULL, "with 40 blocks in a direction");
    lazy_set_gate(&r.lazy, false);
    wait_told(&r, 2);
    for (uint64_t id = 10; id < 300; id++) { /* rings go round */
        must_step(&r, &m, 1);
        wait_told(&r, (int)(id - 7));
    }
    rig_deinit(&r);
}

static void test_kv_transfer_create_fails(void **state)
{
    (void)state;
    static rig r;
    pgd_why why = {{0}};
    rig_init(&r, 0);
    kv_transfer *first = r.t;
    snprintf(r.config.offload_path, sizeof r.config.offload_path, "/proc/self/fd/9999");
    assert_int_equal(create(&r, 0, &why), PGD_ENOENT);
    assert_null(r.t);
    assert_non_null(strstr(why.text, "/proc/self/fd/9999: KV region: No such file or directory; "
                                     "engine and worker must run on one host"));
    set_config(&r.config, r.fd, 1);
    r.config.offload_blocks++;
    assert_int_equal(create(&r, 0, &why), PGD_EFORMAT);
    r.config.offload_blocks = 0;
    assert_int_equal(create(&r, 0, &why), PGD_EINVAL);
    r.config.offload_path[0] = 0;
    assert_int_equal(create(&r, 0, &why), PGD_OK); /* no tier */
    assert_null(r.t);
    kv_transfer_destroy(NULL);
    kv_transfer_stop(NULL);
    r.t = first;
    rig_deinit(&r);
}

/* --- the end ---------------------------------------------------------------------------------- */

static void test_kv_transfer_stop_under_way(void **state)
{
    (void)state;
    for (int k = 0; k < 20; k++) {
        static rig r;
        rig_init(&r, k % 2 == 0 ? 0 : 4);
        block_id all[N_DEVICE - 1];
        int32_t mediums[N_DEVICE - 1] = {0};
        uint64_t tags[N_DEVICE - 1] = {0};
        for (int32_t i = 0; i < N_DEVICE - 1; i++)
            all[i] = 1 + i;
        kv_transfer_msg m = transfer(k % 4 < 2 ? KV_TRANSFER_STORE : KV_TRANSFER_LOAD, 1,
                                     N_DEVICE - 1, all, mediums, tags);
        r.n_refusals = k % 3 == 0 ? 1000000 : k; /* an engine that takes nothing, or hesitates */
        must_step(&r, &m, 1);
        if (k % 5 == 0)
            sched_yield();
        rig_deinit(&r);
        assert_true(r.n_told <= 1);
    }
}

static void test_kv_transfer_told_again(void **state)
{
    (void)state;
    static rig r;
    rig_init(&r, 0);
    r.n_refusals = 5;
    put_content(&r, 3, 9);
    must_step(&r, &STORE(1, 3, 0, 9), 1);
    must_step(&r, (const kv_transfer_msg[]){FLUSH(1)}, 1); /* does not wait for the telling */
    wait_told(&r, 1);
    assert_int_equal(r.n_told, 1);
    assert_int_equal(r.n_refusals, 0);
    rig_deinit(&r);
}

/* In the middle of the third of four blocks. */
static void test_kv_transfer_device_fails(void **state)
{
    (void)state;
    static const block_id devices[4] = {3, 4, 5, 6};
    static const int32_t mediums[4] = {0, 1, 2, 3};
    static const uint64_t tags[4] = {9, 9, 9, 9};
    for (int k = 0; k < 2; k++) {
        static rig r;
        pgd_why why = {{0}};
        rig_init(&r, 2);
        r.lazy.n_good_copies = 2 * N_SLOTS + 1;
        for (int32_t i = 0; i < 4; i++)
            put_shard(&r, i, 9);
        must_step(&r,
                  &(kv_transfer_msg){1, k == 0 ? KV_TRANSFER_STORE : KV_TRANSFER_LOAD, 4, devices,
                                     mediums, tags},
                  1);
        wait_told(&r, 1);
        assert_int_equal(r.told[0].n_good, k == 0 ? 0 : 2);
        assert_int_equal(r.told[0].n_bytes, 2 * 1096);
        assert_int_equal(step(&r, NULL, 0, NULL, 0, &why), PGD_EDEVICE);
        rig_deinit(&r);
    }
}

/* --- random ----------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x;
}

typedef struct shadow_job {
    kv_transfer_kind kind; /* 0 = none */
    int32_t n_blocks;
    int32_t n_good; /* expected */
    block_id devices[4];
    int32_t mediums[4];
    uint64_t tags[4];
} shadow_job;

#define MAX_JOBS 64 /* ids are reused, in turn */

typedef struct shadow {
    rig *r;
    uint64_t x;
    uint64_t content[N_DEVICE];                    /* of blocks that no load is writing */
    bool is_stored[N_DEVICE], is_loaded[N_DEVICE]; /* under way */
    uint64_t held[N_MEDIUM];                       /* content = tag; 0 = nothing right */
    int users[N_MEDIUM];                           /* under way */
    bool is_written[N_MEDIUM];
    shadow_job jobs[MAX_JOBS];
    uint64_t next_content;
    int n_heard;
} shadow;

static void end_shadow(shadow *s, uint64_t id, int32_t n_good)
{
    shadow_job *j = &s->jobs[id];
    assert_true(j->kind != 0);
    assert_int_equal(n_good, j->n_good);
    for (int32_t i = 0; i < j->n_blocks; i++) {
        s->users[j->mediums[i]]--;
        if (j->kind == KV_TRANSFER_STORE) {
            s->is_stored[j->devices[i]] = false;
            s->is_written[j->mediums[i]] = false;
            s->held[j->mediums[i]] = j->tags[i];
            assert_int_equal(shard_content(s->r, j->mediums[i]), j->tags[i]);
        } else {
            s->is_loaded[j->devices[i]] = false;
            if (i < n_good)
                s->content[j->devices[i]] = j->tags[i];
            assert_int_equal(content_of(s->r, j->devices[i]), s->content[j->devices[i]]);
        }
    }
    j->kind = 0;
}

static int n_unheard(const shadow *s)
{
    int n = 0;
    for (int i = 0; i < MAX_JOBS; i++)
        n += s->jobs[i].kind != 0;
    return n;
}

/* What has ended; of those that are still out at least n_wait. */
static void hear(shadow *s, int n_wait)
{
    static kv_transfer_done told[MAX_TOLD];
    wait_told(s->r, s->n_heard + PGD_MIN(n_wait, n_unheard(s)));
    pthread_mutex_lock(&s->r->mutex);
    int n = s->r->n_told;
    memcpy(told, s->r->told, (size_t)n * sizeof told[0]);
    pthread_mutex_unlock(&s->r->mutex);
    while (s->n_heard < n) {
        const kv_transfer_done *d = &told[s->n_heard++];
        end_shadow(s, d->job_id, d->n_good);
    }
}

static shadow_job *new_job(shadow *s, kv_transfer_kind kind, uint64_t *id)
{
    for (*id = 0; *id < MAX_JOBS; (*id)++) {
        if (s->jobs[*id].kind == 0) {
            s->jobs[*id] = (shadow_job){.kind = kind};
            return &s->jobs[*id];
        }
    }
    return NULL;
}

static void add_block(shadow *s, shadow_job *j, block_id b, int32_t m)
{
    bool is_store = j->kind == KV_TRANSFER_STORE;
    if (s->is_stored[b] || s->is_loaded[b] || s->is_written[m] || (is_store && s->users[m] > 0))
        return;
    j->devices[j->n_blocks] = b;
    j->mediums[j->n_blocks] = m;
    j->tags[j->n_blocks] = is_store ? s->content[b] : s->held[m];
    if (is_store ? s->content[b] == 0 : s->held[m] == 0)
        return;
    if (!is_store && next_random(&s->x) % 10 == 0)
        j->tags[j->n_blocks] += 1000000; /* not what it holds */
    else if (j->n_good == j->n_blocks)
        j->n_good++;
    (is_store ? s->is_stored : s->is_loaded)[b] = true;
    s->is_written[m] = is_store;
    s->users[m]++;
    j->n_blocks++;
}

/* A step: a store and a load of up to 4 blocks, and blocks that compute writes, some of which a flush
 * must make free first. */
static void random_step(shadow *s)
{
    kv_transfer_msg m[MAX_JOBS];
    int32_t n = 0;
    block_id written[3];
    for (int k = 0; k < 2; k++) {
        uint64_t id;
        shadow_job *j = new_job(s, k == 0 ? KV_TRANSFER_STORE : KV_TRANSFER_LOAD, &id);
        for (int i = 0; j != NULL && i < 4; i++)
            add_block(s, j, 1 + (block_id)(next_random(&s->x) % (N_DEVICE - 1)),
                      (int32_t)(next_random(&s->x) % N_MEDIUM));
        if (j != NULL && j->n_blocks > 0)
            m[n++] = transfer(j->kind, id, j->n_blocks, j->devices, j->mediums, j->tags);
        else if (j != NULL)
            j->kind = 0;
    }
    int n_written = 0;
    for (int i = 0; i < 3; i++) {
        block_id b = 1 + (block_id)(next_random(&s->x) % (N_DEVICE - 1));
        if (s->is_loaded[b])
            continue;
        for (uint64_t id = 0; s->is_stored[b] && id < MAX_JOBS; id++) {
            shadow_job *j = &s->jobs[id];
            for (int32_t q = 0; j->kind == KV_TRANSFER_STORE && q < j->n_blocks; q++)
                if (j->devices[q] == b)
                    m[n++] = FLUSH(id);
        }
        written[n_written++] = b;
    }
    must_step(s->r, m, n);
    for (int i = 0; i < n_written; i++) {
        s->content[written[i]] = ++s->next_content;
        put_content(s->r, written[i], s->next_content);
    }
}

static void test_kv_transfer_random(void **state)
{
    (void)state;
    static rig r;
    static shadow s;
    for (int32_t depth = 0; depth <= 4; depth += 2) {
        memset(&s, 0, sizeof s);
        rig_init(&r, depth);
        s.r = &r;
        s.x = 88172645463325252u + (uint64_t)depth;
        /* By transfers, not by steps: how many a step can add depends on how fast others end. */
        for (int i = 0; s.n_heard < 1200; i++) {
            random_step(&s);
            hear(&s, i % 16 == 15);
        }
        hear(&s, MAX_JOBS);
        assert_int_equal(n_unheard(&s), 0);
        for (block_id b = 1; b < N_DEVICE; b++)
            assert_int_equal(content_of(&r, b), s.content[b]);
        rig_deinit(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_transfer_round_trip),
        cmocka_unit_test(test_kv_transfer_ranks),
        cmocka_unit_test(test_kv_transfer_beside_old_worker),
        cmocka_unit_test(test_kv_transfer_bad_blocks),
        cmocka_unit_test(test_kv_transfer_fifo),
        cmocka_unit_test(test_kv_transfer_store_after_compute),
        cmocka_unit_test(test_kv_transfer_load_after_compute),
        cmocka_unit_test(test_kv_transfer_told_when_done),
        cmocka_unit_test(test_kv_transfer_flush_waits),
        cmocka_unit_test(test_kv_transfer_load_follows_store),
        cmocka_unit_test(test_kv_transfer_refuses),
        cmocka_unit_test(test_kv_transfer_bounds),
        cmocka_unit_test(test_kv_transfer_create_fails),
        cmocka_unit_test(test_kv_transfer_stop_under_way),
        cmocka_unit_test(test_kv_transfer_told_again),
        cmocka_unit_test(test_kv_transfer_device_fails),
        cmocka_unit_test(test_kv_transfer_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
