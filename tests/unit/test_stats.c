/* The snapshot cell under fire: a reader never sees half of a value. */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <pthread.h>

#include <cmocka.h>

#include "engine/core/stats.h"

typedef struct sample {
    uint64_t first;
    char text[301]; /* no whole number of words */
    uint32_t last;
} sample;

static stats_cell *cell_;
static bool stop_;

static void fill(sample *s, uint64_t i)
{
    memset(s, 0, sizeof *s);
    s->first = i;
    memset(s->text, (int)('a' + i % 26), sizeof s->text);
    s->last = (uint32_t)i;
}

static void *write_all(void *arg)
{
    sample s;
    (void)arg;
    for (uint64_t i = 1; !__atomic_load_n(&stop_, __ATOMIC_RELAXED); i++) {
        fill(&s, i);
        stats_publish(cell_, &s);
    }
    return NULL;
}

static void test_stats_whole(void **state)
{
    (void)state;
    pthread_t t;
    sample got;
    sample want;
    uint64_t highest = 0;
    assert_int_equal(stats_cell_create(&cell_, sizeof(sample)), PGD_OK);
    stats_read(cell_, &got);
    memset(&want, 0, sizeof want);
    assert_memory_equal(&got, &want, sizeof got);
    assert_int_equal(pthread_create(&t, NULL, write_all, NULL), 0);
    for (int i = 0; i < 20000 || highest == 0; i++) {
        stats_read(cell_, &got);
        if (got.first == 0)
            continue;
        fill(&want, got.first);
        assert_memory_equal(&got, &want, sizeof got);
        assert_true(got.first >= highest);
        highest = got.first;
    }
    __atomic_store_n(&stop_, true, __ATOMIC_RELAXED);
    pthread_join(t, NULL);
    stats_cell_destroy(cell_);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_stats_whole)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
