/* The index of the disk tier: against a shadow, and read while it is written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/thread.h"
#include "engine/offload/disk_index.h"

enum { N_IDS = 60, CAPACITY = 40, OWN_MODEL = 7, OTHER_MODEL = 8 };

/* Odd numbers are blocks of the other model; 0 and 1, 2 and 3, ... have one key. */
static disk_block_id id_of(int32_t number)
{
    disk_block_id id = {.model = number % 2 == 0 ? OWN_MODEL : OTHER_MODEL};
    id.key.hash.bytes[0] = (uint8_t)(number / 2);
    id.key.group_id = number / 2 % 4;
    return id;
}

static int32_t number_of(const disk_block_id *id)
{
    return id->key.hash.bytes[0] * 2 + (id->model == OTHER_MODEL);
}

typedef struct shadow {
    uint64_t stamps[N_IDS]; /* 0 = not there */
    bool seen[N_IDS];
    int32_t n;
} shadow;

static void check_all(disk_index *x, const shadow *s)
{
    int32_t n_own = 0;
    for (int32_t i = 0; i < N_IDS; i++) {
        disk_block_id id = id_of(i);
        assert_int_equal(disk_index_find(x, &id), s->stamps[i] != 0);
        assert_int_equal(disk_index_stamp(x, &id), s->stamps[i]);
        n_own += i % 2 == 0 && s->stamps[i] != 0;
    }
    assert_int_equal(disk_index_n_own(x), n_own);
    assert_int_equal(disk_index_n_foreign(x), s->n - n_own);
}

/* The own model lives: the other's files go first. */
static void check_oldest(disk_index *x, const shadow *s, int32_t n, bool both_live)
{
    static const uint64_t live[] = {OWN_MODEL, OTHER_MODEL};
    disk_index_file files[N_IDS];
    uint64_t last = 0;
    int32_t n_got = disk_index_oldest(files, x, n, live, both_live ? 2 : 1);
    assert_int_equal(n_got, PGD_MIN(n, s->n));
    for (int32_t i = 0; i < n_got; i++) {
        int32_t number = number_of(&files[i].id);
        bool is_late = !both_live && number % 2 == 0;
        uint64_t rank = files[i].stamp_us + (is_late ? 1000000 : 0);
        assert_int_equal(files[i].stamp_us, s->stamps[number]);
        assert_true(rank >= last);
        last = rank;
    }
    for (int32_t i = 0; i < N_IDS; i++) { /* nobody was passed over */
        bool is_late = !both_live && i % 2 == 0;
        bool is_listed = false;
        for (int32_t j = 0; j < n_got; j++)
            is_listed |= number_of(&files[j].id) == i;
        if (s->stamps[i] != 0 && !is_listed)
            assert_true(s->stamps[i] + (is_late ? 1000000 : 0) >= last);
    }
}

static void put(disk_index *x, shadow *s, int32_t number, uint64_t stamp_us)
{
    disk_index_file file = {id_of(number), stamp_us};
    bool has_room = s->stamps[number] != 0 || s->n < CAPACITY;
    assert_int_equal(disk_index_put(x, &file, stamp_us), has_room);
    if (!has_room)
        return;
    s->n += s->stamps[number] == 0;
    s->stamps[number] = PGD_MAX(s->stamps[number], stamp_us);
    s->seen[number] = true;
}

static void forget(shadow *s, int32_t number)
{
    s->n -= s->stamps[number] != 0;
    s->stamps[number] = 0;
}

/* Each own key once. */
static void check_list(const disk_index *x, const shadow *s)
{
    offload_key keys[3];
    bool is_listed[N_IDS] = {false};
    for (int32_t cursor = 0; cursor >= 0;) {
        int32_t n = disk_index_list(keys, x, 3, &cursor);
        for (int32_t i = 0; i < n; i++) {
            disk_block_id id = {.key = keys[i], .model = OWN_MODEL};
            int32_t number = number_of(&id);
            assert_true(number >= 0 && number < N_IDS && !is_listed[number]);
            is_listed[number] = true;
        }
    }
    for (int32_t i = 0; i < N_IDS; i++)
        assert_int_equal(is_listed[i], s->stamps[i] != 0 && id_of(i).model == OWN_MODEL);
}

static void test_disk_index_shadow(void **state)
{
    (void)state;
    disk_index *x;
    shadow s = {{0}};
    uint64_t rnd = 3, version;
    assert_int_equal(disk_index_create(&x, 0, OWN_MODEL), PGD_EINVAL);
    assert_int_equal(disk_index_create(&x, CAPACITY, OWN_MODEL), PGD_OK);
    for (int op = 0; op < 20000; op++) {
        rnd = hash_u64(rnd + 1);
        int32_t number = (int32_t)(rnd % N_IDS);
        disk_block_id id = id_of(number);
        uint64_t stamp_us = 1 + (rnd >> 20) % 5000;
        switch (rnd >> 40 & 7) {
        case 0:
        case 1:
            assert_int_equal(disk_index_remove(x, &id), s.stamps[number] != 0);
            forget(&s, number);
            break;
        case 2:
            disk_index_touch(x, &id, stamp_us);
            if (s.stamps[number] != 0)
                s.stamps[number] = PGD_MAX(s.stamps[number], stamp_us);
            break;
        case 3:
            check_oldest(x, &s, 1 + (int32_t)(rnd >> 50) % N_IDS, (rnd >> 45 & 1) != 0);
            break;
        default:
            put(x, &s, number, stamp_us);
        }
        if (op % 500 == 0) {
            memset(s.seen, 0, sizeof(s.seen));
            disk_index_begin_sweep(x);
            for (int32_t i = 0; i < 20; i++)
                put(x, &s, (int32_t)(hash_u64(rnd + (uint64_t)i) % N_IDS), 1);
            disk_index_end_sweep(x);
            for (int32_t i = 0; i < N_IDS; i++)
                if (!s.seen[i])
                    forget(&s, i);
        }
        check_all(x, &s);
        if (op % 20 == 0) {
            check_list(x, &s);
            /* Every change of the set changes the version. */
            version = disk_index_version(x);
            bool was_there = s.stamps[number] != 0;
            (void)disk_index_remove(x, &id);
            forget(&s, number);
            assert_int_equal(disk_index_version(x) != version, was_there);
            version = disk_index_version(x);
            bool has_room = s.n < CAPACITY;
            put(x, &s, number, stamp_us);
            assert_int_equal(disk_index_version(x) != version, has_room);
            version = disk_index_version(x);
            put(x, &s, number, stamp_us);
            assert_true(disk_index_version(x) == version);
        }
    }
    disk_index_reset(x);
    memset(&s, 0, sizeof(s));
    check_all(x, &s);
    check_list(x, &s);
    disk_index_destroy(x);
}

static void test_disk_index_unsaved(void **state)
{
    (void)state;
    disk_index *x;
    shadow s = {{0}};
    disk_index_file files[CAPACITY];
    int32_t pos = 0;
    int32_t n = 0;
    assert_int_equal(disk_index_create(&x, CAPACITY, OWN_MODEL), PGD_OK);
    for (int32_t i = 0; i < 10; i++)
        put(x, &s, i, 100);
    for (int32_t i = 0; i < 10; i++) {
        disk_block_id id = id_of(i);
        disk_index_touch(x, &id, i < 6 ? 151 : 150);
    }
    for (int32_t i = 0; i < 3; i++) { /* a few at a time, each once */
        int32_t n_got = disk_index_unsaved(files, x, 4, 50, &pos);
        for (int32_t j = 0; j < n_got; j++) {
            assert_true(number_of(&files[j].id) < 6);
            assert_int_equal(files[j].stamp_us, 151);
        }
        n += n_got;
    }
    assert_int_equal(n, 6);
    disk_index_destroy(x);
}

typedef struct churn {
    disk_index *x;
    atomic_bool stop;
} churn;

/* All but the first four come and go, and their entries are used for others. */
static void run_churn(void *arg)
{
    churn *c = arg;
    uint64_t rnd = 1;
    while (!atomic_load(&c->stop)) {
        rnd = hash_u64(rnd + 1);
        disk_index_file file = {id_of(4 + (int32_t)(rnd % (N_IDS - 4))), 5};
        if ((rnd >> 32 & 1) != 0)
            (void)disk_index_put(c->x, &file, 5);
        else
            (void)disk_index_remove(c->x, &file.id);
    }
}

static void test_disk_index_read_while_written(void **state)
{
    (void)state;
    churn c = {.stop = false};
    pthread_t thread;
    int n_missed = 0, n_listed = 0, n_lists = 0, n_own_old = 0;
    for (int32_t i = 0; i < 4; i++)
        n_own_old += id_of(i).model == OWN_MODEL;
    assert_int_equal(disk_index_create(&c.x, CAPACITY, OWN_MODEL), PGD_OK);
    for (int32_t i = 0; i < 4; i++)
        assert_true(disk_index_put(c.x, &(disk_index_file){id_of(i), 9}, 9));
    assert_int_equal(thread_start(&thread, "churn", run_churn, &c), PGD_OK);
    for (int op = 0; op < 400000; op++) {
        disk_block_id id = id_of(op & 3);
        n_missed += !disk_index_find(c.x, &id);
        id = id_of(N_IDS + op % 20); /* never there */
        assert_false(disk_index_find(c.x, &id));
        disk_index_touch(c.x, &id, 10);
        if (op % 64 != 0)
            continue;
        offload_key keys[CAPACITY];
        int32_t n_old = 0;
        for (int32_t cursor = 0; cursor >= 0;) {
            int32_t n = disk_index_list(keys, c.x, CAPACITY, &cursor);
            for (int32_t i = 0; i < n; i++) {
                int32_t number = number_of(&(disk_block_id){.key = keys[i], .model = OWN_MODEL});
                assert_true(number >= 0 && number < N_IDS); /* no mixture of two */
                n_old += number < 4;
            }
        }
        n_listed += n_old;
        n_lists++;
    }
    assert_int_equal(n_listed, n_lists * n_own_old);
    atomic_store(&c.stop, true);
    thread_join(thread);
    assert_int_equal(n_missed, 0);
    for (int32_t i = 0; i < 4; i++) {
        disk_block_id id = id_of(i);
        assert_true(disk_index_find(c.x, &id));
    }
    disk_index_destroy(c.x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_disk_index_shadow),
                                       cmocka_unit_test(test_disk_index_unsaved),
                                       cmocka_unit_test(test_disk_index_read_while_written)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
