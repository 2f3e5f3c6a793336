/* Random operations beside a plain array. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/hash.h"
#include "common/hash_map.h"

#define N_KEYS 500

static void run_random(size_t max_entries, uint64_t key_step)
{
    hash_map *m;
    bool has[N_KEYS] = {false};
    uintptr_t want[N_KEYS] = {0};
    size_t n = 0;
    assert_int_equal(hash_map_create(&m, max_entries), PGD_OK);
    for (uint64_t i = 0; i < 200000; i++) {
        uint64_t h = hash_u64(i + 17);
        size_t k = h % N_KEYS;
        uint64_t key = k * key_step;
        uintptr_t value = 0;
        switch ((h >> 32) % 3) {
        case 0:
            assert_true(hash_map_put(m, key, (uintptr_t)i));
            n += has[k] ? 0 : 1;
            has[k] = true;
            want[k] = (uintptr_t)i;
            break;
        case 1:
            assert_int_equal(hash_map_remove(m, key), has[k]);
            n -= has[k] ? 1 : 0;
            has[k] = false;
            break;
        default:
            assert_int_equal(hash_map_get(m, key, &value), has[k]);
            if (has[k])
                assert_int_equal(value, want[k]);
        }
        assert_int_equal(hash_map_n_entries(m), n);
    }
    size_t pos = 0, seen = 0;
    uint64_t key;
    uintptr_t value;
    while (hash_map_next(m, &pos, &key, &value)) {
        assert_true(has[key / key_step] && want[key / key_step] == value);
        seen++;
    }
    assert_int_equal(seen, n);
    hash_map_reset(m);
    assert_int_equal(hash_map_n_entries(m), 0);
    assert_false(hash_map_get(m, 0, NULL));
    hash_map_destroy(m);
}

static void test_hash_map_random(void **state)
{
    (void)state;
    run_random(0, 1);
    run_random(N_KEYS, 1);
    run_random(N_KEYS, (uint64_t)1 << 40);
}

static void test_hash_map_fixed_table_refuses(void **state)
{
    (void)state;
    hash_map *m;
    uint64_t n = 0;
    assert_int_equal(hash_map_create(&m, 10), PGD_OK);
    while (hash_map_put(m, n, 0))
        n++;
    assert_true(n >= 10 && n < 64);
    assert_true(hash_map_put(m, 3, 5)); /* replacing needs no room */
    assert_true(hash_map_remove(m, 3));
    assert_true(hash_map_put(m, n, 0));
    hash_map_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hash_map_random),
        cmocka_unit_test(test_hash_map_fixed_table_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
