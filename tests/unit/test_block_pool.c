/* Free queue and block pool: traces H8, H9, H10 and the order rules BP. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/kv/block_pool.h"
#include "engine/kv/block_queue.h"

static void expect_queue(const block_queue *q, const block_id *ids, int n_ids)
{
    block_id id = -1;
    for (int i = 0; i < n_ids; i++) {
        id = block_queue_next(q, id);
        assert_int_equal(id, ids[i]);
    }
    assert_int_equal(block_queue_next(q, id), -1);
    assert_int_equal(q->n_blocks, n_ids);
}

#define EXPECT_QUEUE(q, ...)                         \
    expect_queue(q, (const block_id[]){__VA_ARGS__}, \
                 (int)PGD_ARRAY_LEN(((const block_id[]){__VA_ARGS__})))

static void test_block_queue_h8_primitives(void **state)
{
    (void)state;
    block_queue q;
    block_queue_link links[7];
    assert_int_equal(block_queue_init(&q, links, sizeof links[0], 6), PGD_OK);
    block_queue_append_n(&q, (const block_id[]){0, 1, 2, 3, 4}, 5);
    assert_int_equal(block_queue_pop(&q), 0);
    block_queue_remove(&q, 2);
    EXPECT_QUEUE(&q, 1, 3, 4);
    block_queue_append(&q, 2);
    EXPECT_QUEUE(&q, 1, 3, 4, 2);
    for (int i = 0; i < 4; i++)
        assert_true(block_queue_pop(&q) >= 0);
    assert_int_equal(block_queue_pop(&q), -1);
    assert_int_equal(q.n_blocks, 0);

    block_queue_append_n(&q, NULL, 0);
    assert_int_equal(block_queue_next(&q, -1), -1);
    block_queue_append_n(&q, (const block_id[]){0}, 1);
    EXPECT_QUEUE(&q, 0);
    block_queue_append_n(&q, (const block_id[]){4, 5}, 2);
    EXPECT_QUEUE(&q, 0, 4, 5);
    block_queue_append_n(&q, (const block_id[]){1, 2, 3}, 3);
    EXPECT_QUEUE(&q, 0, 4, 5, 1, 2, 3);
}

static void test_block_queue_h8_prepend_n(void **state)
{
    (void)state;
    block_queue q;
    block_queue_link links[7];
    assert_int_equal(block_queue_init(&q, links, sizeof links[0], 6), PGD_OK);
    block_queue_append(&q, 0);
    block_queue_prepend_n(&q, (const block_id[]){4, 5}, 2);
    EXPECT_QUEUE(&q, 4, 5, 0);
    block_queue_prepend_n(&q, (const block_id[]){1, 2}, 2);
    EXPECT_QUEUE(&q, 1, 2, 4, 5, 0);
}

static void test_block_queue_h8_pop_n(void **state)
{
    (void)state;
    block_queue q;
    block_queue_link links[7];
    block_id out[6] = {-7, -7, -7, -7, -7, -7};
    assert_int_equal(block_queue_init(&q, links, sizeof links[0], 6), PGD_OK);
    block_queue_append_n(&q, (const block_id[]){1, 3, 5, 4, 0, 2}, 6);
    assert_true(block_queue_pop_n(out, &q, 0));
    assert_int_equal(out[0], -7);
    assert_true(block_queue_pop_n(out, &q, 1));
    assert_int_equal(out[0], 1);
    assert_true(block_queue_pop_n(out, &q, 2));
    assert_memory_equal(out, ((block_id[]){3, 5}), 2 * sizeof *out);
    assert_false(block_queue_pop_n(out, &q, 4));
    EXPECT_QUEUE(&q, 4, 0, 2);
    assert_true(block_queue_pop_n(out, &q, 3));
    assert_memory_equal(out, ((block_id[]){4, 0, 2}), 3 * sizeof *out);
    for (block_id id = 0; id < 6; id++) {
        assert_false(block_queue_contains(&q, id));
        assert_int_equal(links[id].prev, -1);
        assert_int_equal(links[id].next, -1);
    }
    assert_int_equal(block_queue_init(&q, links, sizeof links[0], 0), PGD_EINVAL);
}

static block_hash key_of(char c)
{
    block_hash h;
    memset(h.bytes, c, sizeof h.bytes);
    return h;
}

static void test_block_pool_h9_duplicate_hashes(void **state)
{
    (void)state;
    /* Blocks 1..4 stand for 0..3 of the trace, since 0 is the null block. */
    block_pool *p;
    block_id ids[4];
    block_hash keys[4] = {key_of('a'), key_of('b'), key_of('c'), key_of('a')};
    assert_int_equal(block_pool_create(&p, 5, true), PGD_OK);
    assert_true(block_pool_get_new(ids, p, 4));
    for (int i = 0; i < 4; i++)
        block_pool_publish(p, ids[i], &keys[i], 0);
    assert_int_equal(block_pool_n_copies(p, &keys[0], 0), 2);
    block_pool_check(p);

    block_pool_unpublish(p, &ids[1], 1);
    assert_int_equal(block_pool_lookup(p, &keys[1], 0), -1);
    assert_int_equal(block_pool_n_copies(p, &keys[0], 0), 2);
    assert_int_equal(block_pool_lookup(p, &keys[2], 0), ids[2]);
    block_pool_unpublish(p, &ids[0], 1);
    assert_int_equal(block_pool_lookup(p, &keys[0], 0), ids[3]);
    assert_int_equal(block_pool_n_copies(p, &keys[0], 0), 1);
    block_pool_unpublish(p, &ids[2], 1);
    assert_int_equal(block_pool_lookup(p, &keys[2], 0), -1);
    block_pool_unpublish(p, &ids[3], 1);
    assert_int_equal(block_pool_lookup(p, &keys[0], 0), -1);
    assert_int_equal(block_pool_n_published(p), 0);
    block_pool_check(p);
    block_pool_destroy(p);
}

static void test_block_pool_h9_newest_copy_is_found(void **state)
{
    (void)state;
    block_pool *p;
    block_id ids[3];
    block_hash key = key_of('a');
    assert_int_equal(block_pool_create(&p, 4, true), PGD_OK);
    assert_true(block_pool_get_new(ids, p, 3));
    for (int i = 0; i < 3; i++) {
        block_pool_publish(p, ids[i], &key, 0);
        assert_int_equal(block_pool_lookup(p, &key, 0), ids[i]);
    }
    block_pool_unpublish(p, &ids[1], 1);
    assert_int_equal(block_pool_lookup(p, &key, 0), ids[2]);
    block_pool_unpublish(p, &ids[2], 1);
    assert_int_equal(block_pool_lookup(p, &key, 0), ids[0]);
    block_pool_check(p);
    block_pool_destroy(p);
}

static void test_block_pool_h10_group_aware_lookup(void **state)
{
    (void)state;
    block_pool *p;
    block_id ids[5];
    block_id out[2];
    block_hash keys[3] = {key_of('0'), key_of('1'), key_of('2')};
    assert_int_equal(block_pool_create(&p, 6, true), PGD_OK);
    assert_true(block_pool_get_new(ids, p, 5));
    block_pool_publish(p, ids[0], &keys[0], 0);
    block_pool_publish(p, ids[1], &keys[1], 0);
    for (int i = 0; i < 3; i++)
        block_pool_publish(p, ids[2 + i], &keys[i], 1);
    assert_int_equal(block_pool_n_published(p), 5);
    const int32_t only0[] = {0};
    const int32_t only1[] = {1};
    const int32_t both[] = {0, 1};
    const bool hit0[] = {true, true, false};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(block_pool_lookup_groups(out, p, &keys[i], only0, 1), hit0[i]);
        assert_true(block_pool_lookup_groups(out, p, &keys[i], only1, 1));
        assert_int_equal(out[0], ids[2 + i]);
        assert_int_equal(block_pool_lookup_groups(out, p, &keys[i], both, 2), hit0[i]);
        if (hit0[i]) {
            assert_int_equal(out[0], ids[i]);
            assert_int_equal(out[1], ids[2 + i]);
        }
    }
    block_pool_destroy(p);
}

static void expect_free(const block_pool *p, const block_id *ids, int n_ids)
{
    block_id id = -1;
    for (int i = 0; i < n_ids; i++) {
        id = block_pool_next_free(p, id);
        assert_int_equal(id, ids[i]);
    }
    assert_int_equal(block_pool_next_free(p, id), -1);
}

#define EXPECT_FREE(p, ...)                         \
    expect_free(p, (const block_id[]){__VA_ARGS__}, \
                (int)PGD_ARRAY_LEN(((const block_id[]){__VA_ARGS__})))

static void test_block_pool_null_block(void **state)
{
    (void)state;
    block_pool *p;
    assert_int_equal(block_pool_create(&p, 1, true), PGD_EINVAL);
    assert_null(p);
    assert_int_equal(block_pool_create(&p, 3, true), PGD_OK);
    assert_int_equal(block_pool_n_free(p), 2);
    EXPECT_FREE(p, 1, 2);
    const block_id null_id = BLOCK_POOL_NULL;
    block_pool_touch(p, &null_id, 1);
    block_pool_free(p, &null_id, 1);
    assert_int_equal(block_pool_n_free(p), 2);
    assert_int_equal(block_pool_ref_count(p, BLOCK_POOL_NULL), 0);
    block_id ids[3];
    assert_false(block_pool_get_new(ids, p, 3));
    assert_int_equal(block_pool_n_free(p), 2);
    block_pool_check(p);
    block_pool_destroy(p);
}

static void test_block_pool_free_order(void **state)
{
    (void)state;
    block_pool *p;
    block_id ids[4];
    block_hash keys[4] = {key_of('0'), key_of('1'), key_of('2'), key_of('3')};
    assert_int_equal(block_pool_create(&p, 7, true), PGD_OK);
    assert_true(block_pool_get_new(ids, p, 4));
    block_pool_publish(p, 1, &keys[1], 0);
    block_pool_publish(p, 3, &keys[3], 0);
    block_pool_free(p, (const block_id[]){4, 3, 2, 1}, 4);
    EXPECT_FREE(p, 4, 2, 5, 6, 3, 1);
    assert_int_equal(block_pool_n_free_cached(p), 2);
    /* A hit takes a block out of the middle and keeps its hash. */
    block_pool_touch(p, (const block_id[]){3}, 1);
    EXPECT_FREE(p, 4, 2, 5, 6, 1);
    assert_int_equal(block_pool_n_free_cached(p), 1);
    assert_int_equal(block_pool_lookup(p, &keys[3], 0), 3);
    /* Un-publishing a referenced block keeps the reference, and it is then freed to the front. */
    block_pool_unpublish(p, (const block_id[]){3}, 1);
    assert_int_equal(block_pool_ref_count(p, 3), 1);
    assert_null(block_pool_get_hash(p, 3));
    block_pool_free(p, (const block_id[]){3}, 1);
    EXPECT_FREE(p, 3, 4, 2, 5, 6, 1);
    block_pool_check(p);
    block_pool_destroy(p);
}

static void test_block_pool_free_order_without_caching(void **state)
{
    (void)state;
    block_pool *p;
    block_id ids[3];
    assert_int_equal(block_pool_create(&p, 6, false), PGD_OK);
    assert_true(block_pool_get_new(ids, p, 3));
    block_pool_free(p, (const block_id[]){3, 2, 1}, 3);
    EXPECT_FREE(p, 3, 2, 1, 4, 5);
    block_hash key = key_of('a');
    assert_int_equal(block_pool_lookup(p, &key, 0), -1);
    block_pool_destroy(p);
}

static void test_block_pool_shared_block_is_freed_once(void **state)
{
    (void)state;
    block_pool *p;
    block_id id;
    assert_int_equal(block_pool_create(&p, 2, true), PGD_OK);
    assert_true(block_pool_get_new(&id, p, 1));
    block_pool_touch(p, &id, 1);
    assert_int_equal(block_pool_ref_count(p, id), 2);
    block_pool_free(p, &id, 1);
    assert_int_equal(block_pool_n_free(p), 0);
    block_pool_free(p, &id, 1);
    assert_int_equal(block_pool_n_free(p), 1);
    block_pool_check(p);
    block_pool_destroy(p);
}

static void test_block_pool_forgets_all(void **state)
{
    (void)state;
    block_pool *p;
    block_id ids[2];
    block_hash key = key_of('a');
    assert_int_equal(block_pool_create(&p, 4, true), PGD_OK);
    assert_true(block_pool_get_new(ids, p, 2));
    block_pool_publish(p, ids[0], &key, 0);
    block_pool_publish(p, ids[1], &key, 1);
    block_pool_free(p, &ids[0], 1);
    block_pool_forget_cache(p);
    assert_int_equal(block_pool_lookup(p, &key, 0), -1);
    assert_int_equal(block_pool_lookup(p, &key, 1), -1);
    assert_int_equal(block_pool_n_free_cached(p), 0);
    assert_int_equal(block_pool_n_published(p), 0);
    assert_int_equal(block_pool_ref_count(p, ids[1]), 1);
    block_pool_check(p);
    block_pool_free(p, &ids[1], 1);
    block_pool_check(p);
    block_pool_destroy(p);
}

typedef struct heard {
    char text[64];
} heard;

static void note(heard *h, char what, block_id id)
{
    size_t n = strlen(h->text);
    h->text[n] = what;
    h->text[n + 1] = (char)('0' + id);
}

static void on_published(void *arg, block_id id, const block_hash *hash, int32_t group_id)
{
    assert_int_equal(hash->bytes[0], 'a');
    assert_int_equal(group_id, 3);
    note(arg, 'p', id);
}

static void on_unpublished(void *arg, block_id id)
{
    note(arg, 'u', id);
}

static void on_reused(void *arg, block_id id)
{
    note(arg, 'r', id);
}

/* Once per change: a block that is published again is no news, one that is handed out again was right
 * until then. */
static void test_block_pool_tells_what_becomes_of_blocks(void **state)
{
    (void)state;
    block_pool *p;
    block_id ids[3];
    heard h = {0};
    block_hash key = key_of('a');
    const block_listener listener = {&h, on_published, on_unpublished, on_reused};
    assert_int_equal(block_pool_create(&p, 4, true), PGD_OK);
    block_pool_set_listener(p, &listener);
    assert_true(block_pool_get_new(ids, p, 3));
    assert_false(block_pool_get_new(ids, p, 1));
    block_pool_publish(p, 1, &key, 3);
    block_pool_publish(p, 1, &key, 3);
    block_pool_publish(p, 2, &key, 3);
    block_pool_unpublish(p, (const block_id[]){2, 3}, 2);
    block_pool_free(p, &ids[0], 1);
    assert_true(block_pool_get_new(ids, p, 1));
    block_pool_publish(p, 1, &key, 3);
    block_pool_forget_cache(p);
    assert_string_equal(h.text, "r1r2r3p1p2u2r1p1u1");
    block_pool_destroy(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_queue_h8_primitives),
        cmocka_unit_test(test_block_queue_h8_prepend_n),
        cmocka_unit_test(test_block_queue_h8_pop_n),
        cmocka_unit_test(test_block_pool_h9_duplicate_hashes),
        cmocka_unit_test(test_block_pool_h9_newest_copy_is_found),
        cmocka_unit_test(test_block_pool_h10_group_aware_lookup),
        cmocka_unit_test(test_block_pool_null_block),
        cmocka_unit_test(test_block_pool_free_order),
        cmocka_unit_test(test_block_pool_free_order_without_caching),
        cmocka_unit_test(test_block_pool_shared_block_is_freed_once),
        cmocka_unit_test(test_block_pool_forgets_all),
        cmocka_unit_test(test_block_pool_tells_what_becomes_of_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
