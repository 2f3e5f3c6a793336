/* Order, removal, and taking a list over, for every length up to a few. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/list.h"

static void expect(const list_node *head, const list_node *nodes, int first, int n_nodes)
{
    const list_node *at = head;
    for (int i = 0; i < n_nodes; i++) {
        assert_ptr_equal(at->next, &nodes[first + i]);
        assert_ptr_equal(at->next->prev, at);
        at = at->next;
    }
    assert_ptr_equal(at->next, head);
    assert_ptr_equal(head->prev, at);
}

static void test_list_keeps_order_and_tells_links(void **state)
{
    (void)state;
    list_node head, nodes[4] = {0};
    list_init(&head);
    for (int i = 0; i < 4; i++) {
        assert_false(list_is_linked(&nodes[i]));
        list_append(&head, &nodes[i]);
    }
    expect(&head, nodes, 0, 4);
    list_remove(&nodes[0]);
    list_remove(&nodes[3]);
    assert_false(list_is_linked(&nodes[3]));
    expect(&head, nodes, 1, 2);
    list_prepend(&head, &nodes[0]);
    expect(&head, nodes, 0, 3);
}

static void test_list_take_all(void **state)
{
    (void)state;
    for (int n = 0; n < 4; n++) {
        list_node from, out, nodes[4] = {0};
        list_init(&from);
        for (int i = 0; i < n; i++)
            list_append(&from, &nodes[i]);
        list_take_all(&out, &from);
        assert_true(list_is_empty(&from));
        expect(&out, nodes, 0, n);
        list_append(&from, &nodes[3]); /* both go on alone */
        expect(&from, nodes, 3, 1);
        expect(&out, nodes, 0, n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_list_keeps_order_and_tells_links),
        cmocka_unit_test(test_list_take_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
