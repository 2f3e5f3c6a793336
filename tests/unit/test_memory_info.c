/* Free memory under cgroup limits, from made-up trees. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/stat.h>

#include <cmocka.h>

#include "common/memory_info.h"

typedef struct tree {
    char root[64];
} tree;

static void put(const tree *t, const char *path, const char *text)
{
    char full[512];
    (void)snprintf(full, sizeof(full), "%s/%s", t->root, path);
    for (char *p = full + strlen(t->root) + 1; (p = strchr(p, '/')); p++) {
        *p = '\0';
        (void)mkdir(full, 0700);
        *p = '/';
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void make(tree *t)
{
    (void)snprintf(t->root, sizeof(t->root), "/tmp/test_memory_info.XXXXXX");
    assert_non_null(mkdtemp(t->root));
    put(t, "proc/meminfo", "MemTotal:       1000 kB\nMemFree: 5 kB\nMemAvailable:    600 kB\n");
}

static void clean(const tree *t)
{
    char command[128];
    (void)snprintf(command, sizeof(command), "rm -rf %s", t->root);
    assert_int_equal(system(command), 0);
}

static void test_memory_info_without_limit(void **state)
{
    (void)state;
    tree t;
    memory_info m;
    make(&t);
    memory_info_read_at(&m, t.root);
    assert_int_equal(m.total_bytes, 1000 * 1024);
    assert_int_equal(m.free_bytes, 600 * 1024);
    put(&t, "proc/self/cgroup", "0::/a/b\n");
    put(&t, "sys/fs/cgroup/a/b/memory.max", "max\n");
    put(&t, "sys/fs/cgroup/a/b/memory.current", "1000\n");
    memory_info_read_at(&m, t.root);
    assert_int_equal(m.free_bytes, 600 * 1024);
    clean(&t);
}

static void test_memory_info_version_2(void **state)
{
    (void)state;
    tree t;
    memory_info m;
    make(&t);
    put(&t, "proc/self/cgroup", "0::/a/b\n");
    put(&t, "sys/fs/cgroup/a/b/memory.max", "500000\n");
    put(&t, "sys/fs/cgroup/a/b/memory.current", "300000\n");
    memory_info_read_at(&m, t.root);
    assert_int_equal(m.total_bytes, 500000);
    assert_int_equal(m.free_bytes, 200000);
    put(&t, "sys/fs/cgroup/a/b/memory.stat", "anon 1\ninactive_file 50000\n");
    memory_info_read_at(&m, t.root);
    assert_int_equal(m.free_bytes, 250000);
    put(&t, "sys/fs/cgroup/a/memory.max",
        "310000\n"); /* an ancestor is tighter, and over its limit */
    put(&t, "sys/fs/cgroup/a/memory.current", "310001\n");
    memory_info_read_at(&m, t.root);
    assert_int_equal(m.total_bytes, 310000);
    assert_int_equal(m.free_bytes, 0);
    clean(&t);
}

static void test_memory_info_root_cgroup(void **state)
{
    (void)state;
    tree t;
    memory_info m;
    make(&t);
    put(&t, "proc/self/cgroup", "0::/\n"); /* as seen inside a container */
    put(&t, "sys/fs/cgroup/memory.max", "400000\n");
    put(&t, "sys/fs/cgroup/memory.current", "100000\n");
    memory_info_read_at(&m, t.root);
    assert_int_equal(m.free_bytes, 300000);
    clean(&t);
}

static void test_memory_info_version_1(void **state)
{
    (void)state;
    tree t;
    memory_info m;
    make(&t);
    put(&t, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/job\nnonsense\n");
    put(&t, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "450000\n");
    put(&t, "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "150000\n");
    put(&t, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put(&t, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n");
    memory_info_read_at(&m, t.root);
    assert_int_equal(m.total_bytes, 450000);
    assert_int_equal(m.free_bytes, 300000);
    clean(&t);
}

static void test_memory_info_of_this_machine(void **state)
{
    (void)state;
    memory_info m;
    memory_info_read(&m);
    assert_true(m.free_bytes > 0 && m.free_bytes <= m.total_bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_info_without_limit),
        cmocka_unit_test(test_memory_info_version_2),
        cmocka_unit_test(test_memory_info_root_cgroup),
        cmocka_unit_test(test_memory_info_version_1),
        cmocka_unit_test(test_memory_info_of_this_machine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
