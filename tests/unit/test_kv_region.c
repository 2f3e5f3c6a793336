/* The region's file: places do not overlap, what is mapped is what was made, and files that are no
 * region of the expected shape are refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/kv_region.h"

static const kv_region_shape SHAPE = {5, 3, 1000};
static const uint8_t FINGERPRINT[KV_REGION_FINGERPRINT_BYTES] = "what the blocks were made with";

static int make_file(void)
{
    int fd = memfd_create("region", MFD_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

static kv_region make_region(int fd, const kv_region_shape *shape)
{
    kv_region r;
    pgd_why why = {{0}};
    if (kv_region_format(&r, fd, shape, FINGERPRINT, &why) != PGD_OK)
        fail_msg("%s", why.text);
    return r;
}

static void test_kv_region_places(void **state)
{
    (void)state;
    static const kv_region_shape shapes[] = {
        {5, 3, 1000}, {1, 1, 1}, {300, 1, 4096}, {2, 1024, 8}, {257, 2, 4097}};
    for (size_t k = 0; k < PGD_ARRAY_LEN(shapes); k++) {
        const kv_region_shape *s = &shapes[k];
        int fd = make_file();
        kv_region r = make_region(fd, s);
        size_t n_bytes;
        struct stat st;
        assert_true(kv_region_bytes(&n_bytes, s));
        assert_int_equal(fstat(fd, &st), 0);
        assert_int_equal(st.st_size, n_bytes);
        /* Every byte belongs to one thing only: fill them with numbers of their own, then look. */
        for (int32_t b = 0; b < s->n_blocks; b++) {
            memset(kv_region_get_entry(&r, b), b % 250 + 1, sizeof(kv_region_entry));
            assert_int_equal((uintptr_t)kv_region_get_shard(&r, b, 0) % 4096, 0);
            for (int32_t i = 0; i < s->n_ranks; i++) {
                kv_region_get_header(&r, b, i)->tag = (uint64_t)(b * 2000 + i + 1);
                memset(kv_region_get_shard(&r, b, i), (b + i) % 251, (size_t)s->shard_bytes);
            }
        }
        kv_region_unmap(&r);
        assert_null(r.base);
        assert_int_equal(kv_region_map(&r, fd, s, NULL), PGD_OK);
        assert_memory_equal(kv_region_get_fingerprint(&r), FINGERPRINT, sizeof FINGERPRINT);
        for (int32_t b = 0; b < s->n_blocks; b++) {
            const uint8_t *entry = (const uint8_t *)kv_region_get_entry(&r, b);
            for (size_t i = 0; i < sizeof(kv_region_entry); i++)
                assert_int_equal(entry[i], b % 250 + 1);
            for (int32_t i = 0; i < s->n_ranks; i++) {
                const uint8_t *shard = kv_region_get_shard(&r, b, i);
                assert_int_equal(kv_region_get_header(&r, b, i)->tag, b * 2000 + i + 1);
                assert_int_equal(kv_region_get_header(&r, b, i)->checksum, 0);
                assert_true(shard + s->shard_bytes <= r.base + r.n_bytes);
                for (uint64_t at = 0; at < s->shard_bytes; at++)
                    assert_int_equal(shard[at], (b + i) % 251);
            }
        }
        kv_region_unmap(&r);
        close(fd);
    }
}

static void test_kv_region_shapes(void **state)
{
    (void)state;
    static const kv_region_shape bad[] = {
        {0, 1, 64},
        {-1, 1, 64},
        {4, 0, 64},
        {4, 1025, 64},
        {4, 1, 0},
        {4, 1, UINT64_MAX},
        {4, 1, 1ull << 62},
        {INT32_MAX, 1, 1ull << 40},
        {INT32_MAX, 1024, 1ull << 30},
        {1, 1024, 1ull << 54},
    };
    kv_region r;
    size_t n_bytes = 1;
    for (size_t i = 0; i < PGD_ARRAY_LEN(bad); i++) {
        pgd_why why = {{0}};
        int fd = make_file();
        assert_false(kv_region_bytes(&n_bytes, &bad[i]));
        assert_int_equal(n_bytes, 0);
        assert_int_equal(kv_region_format(&r, fd, &bad[i], FINGERPRINT, &why), PGD_EINVAL);
        assert_int_equal(kv_region_map(&r, fd, &bad[i], &why), PGD_EINVAL);
        assert_non_null(strstr(why.text, "expected at least one block"));
        assert_null(r.base);
        close(fd);
    }
    assert_true(kv_region_bytes(&n_bytes, &(kv_region_shape){INT32_MAX, 1, 1u << 20}));
    assert_true(n_bytes > (size_t)INT32_MAX << 20);
}

static void expect_refusal(int fd, const kv_region_shape *shape, pgd_err expected, const char *part)
{
    kv_region r;
    pgd_why why = {{0}};
    assert_int_equal(kv_region_map(&r, fd, shape, &why), expected);
    assert_null(r.base);
    if (strstr(why.text, part) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", part, why.text);
}

static void test_kv_region_malformed(void **state)
{
    (void)state;
    int fd = make_file();
    kv_region r = make_region(fd, &SHAPE);
    size_t n_bytes = r.n_bytes;
    uint8_t good[4096];
    memcpy(good, r.base, sizeof good);
    kv_region_unmap(&r);
    /* Each byte of the superblock but the fingerprint counts. */
    for (off_t at = 0; at < 32; at++) {
        uint8_t b = good[at] ^ 0x41;
        assert_int_equal(pwrite(fd, &b, 1, at), 1);
        expect_refusal(fd, &SHAPE, PGD_EFORMAT, "expected");
        assert_int_equal(pwrite(fd, &good[at], 1, at), 1);
    }
    kv_region_shape other = SHAPE;
    other.shard_bytes--; /* a file of the same size */
    expect_refusal(fd, &other, PGD_EFORMAT, "shards of 999 bytes, got 5 of 3 of 1000");
    other = (kv_region_shape){5, 2, 1000};
    expect_refusal(fd, &other, PGD_EFORMAT, "KV region");
    static const int sizes[] = {-1, 1};
    for (size_t i = 0; i < PGD_ARRAY_LEN(sizes); i++) {
        assert_int_equal(ftruncate(fd, (off_t)n_bytes + sizes[i]), 0);
        expect_refusal(fd, &SHAPE, PGD_EFORMAT, "expected a file of");
    }
    for (off_t n = 0; n < 4096; n += 256) {
        assert_int_equal(ftruncate(fd, n), 0);
        expect_refusal(fd, &SHAPE, PGD_EFORMAT, "expected a file of");
    }
    /* Made anew, nothing of what was there shows. */
    r = make_region(fd, &SHAPE);
    assert_int_equal(kv_region_get_entry(&r, 4)->state, 0);
    kv_region_unmap(&r);
    close(fd);
    int pipe_fds[2];
    assert_int_equal(pipe(pipe_fds), 0);
    expect_refusal(pipe_fds[0], &SHAPE, PGD_EFORMAT, "expected a file of");
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    expect_refusal(-1, &SHAPE, PGD_EIO, "Bad file descriptor");
}

static void test_kv_region_open(void **state)
{
    (void)state;
    char path[64];
    kv_region a;
    pgd_why why = {{0}};
    int fd = make_file();
    kv_region b = make_region(fd, &SHAPE);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), fd);
    assert_int_equal(kv_region_open(&a, path, &SHAPE, &why), PGD_OK);
    memset(kv_region_get_shard(&b, 4, 2), 7, 1000); /* the same memory */
    assert_int_equal(((uint8_t *)kv_region_get_shard(&a, 4, 2))[999], 7);
    kv_region_unmap(&a);
    kv_region_unmap(&a);
    kv_region_unmap(&b);
    close(fd);
    assert_int_equal(kv_region_open(&a, path, &SHAPE, &why), PGD_ENOENT);
    assert_int_equal(kv_region_open(&a, "/nowhere/region", &SHAPE, &why), PGD_ENOENT);
    assert_non_null(strstr(why.text, "No such file"));
    assert_int_equal(kv_region_open(&a, "/", &SHAPE, &why), PGD_EIO);
    assert_int_equal(kv_region_open(&a, "/dev/zero", &SHAPE, &why), PGD_EFORMAT);
}

/* A shard is what it says only with the tag, the very bytes, and a header of both. */
static void test_kv_region_holds(void **state)
{
    (void)state;
    int fd = make_file();
    kv_region r = make_region(fd, &SHAPE);
    uint8_t *shard = kv_region_get_shard(&r, 2, 1);
    uint8_t copy[1000];
    /* A region that was just made holds nothing, whatever is asked for. */
    assert_false(kv_region_holds(&r, 2, 1, 0, shard));
    assert_false(kv_region_holds(&r, 2, 1, 99, shard));
    for (size_t i = 0; i < sizeof copy; i++)
        copy[i] = shard[i] = (uint8_t)(i * 7);
    kv_region_seal(&r, 2, 1, 99, kv_region_get_shard(&r, 2, 1));
    assert_true(kv_region_holds(&r, 2, 1, 99, copy));
    assert_false(kv_region_holds(&r, 2, 1, 98, copy));
    assert_false(kv_region_holds(&r, 2, 0, 99, copy));
    assert_false(kv_region_holds(&r, 1, 1, 99, copy));
    for (size_t bit = 0; bit < 8 * sizeof copy; bit += 97) {
        copy[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_false(kv_region_holds(&r, 2, 1, 99, copy));
        copy[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    /* A torn header: either half of another one. */
    kv_region_header *h = kv_region_get_header(&r, 2, 1);
    kv_region_header old = *h;
    h->tag = 98;
    assert_false(kv_region_holds(&r, 2, 1, 98, copy));
    *h = (kv_region_header){99, kv_region_checksum(&r, copy, 98)};
    assert_false(kv_region_holds(&r, 2, 1, 99, copy));
    *h = old;
    assert_true(kv_region_holds(&r, 2, 1, 99, copy));
    kv_region_unmap(&r);
    close(fd);
}

/* Files outlive builds: checksums are the same on every machine and with every level of vectors. */
static void test_kv_region_checksums(void **state)
{
    (void)state;
    static const uint8_t zero[KV_REGION_FINGERPRINT_BYTES];
    uint8_t bytes[1000];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(i * 7);
    int fd = make_file();
    kv_region r = make_region(fd, &SHAPE);
    kv_region_set_fingerprint(&r, zero);
    assert_int_equal(kv_region_checksum(&r, bytes, 99), 0x2101a5e4a2054734u);
    kv_region_unmap(&r);
    close(fd);
}

static void fill(const kv_region *r, int32_t block, uint8_t byte, uint8_t payload[1000])
{
    memset(payload, byte, 1000);
    memcpy(kv_region_get_shard(r, block, 0), payload, 1000);
    kv_region_seal(r, block, 0, 99, payload);
}

/* The tag names a content, not the model that it was computed with: what a worker of another
 * fingerprint has written, before or while nobody expects it any more, is not it. */
static void test_kv_region_fingerprint(void **state)
{
    (void)state;
    int fd = make_file();
    uint8_t payload[1000];
    kv_region r = make_region(fd, &SHAPE), late, again;
    uint8_t other[KV_REGION_FINGERPRINT_BYTES] = {1, 2, 3};
    assert_int_equal(kv_region_map(&late, fd, &SHAPE, NULL), PGD_OK);
    fill(&late, 2, 5, payload);
    assert_true(kv_region_holds(&r, 2, 0, 99, payload));
    kv_region_set_fingerprint(&r, other);
    assert_false(kv_region_holds(&r, 2, 0, 99, payload));
    fill(&late, 3, 6, payload);
    assert_false(kv_region_holds(&r, 3, 0, 99, payload));
    fill(&r, 3, 6, payload);
    assert_true(kv_region_holds(&r, 3, 0, 99, payload));
    assert_int_equal(kv_region_map(&again, fd, &SHAPE, NULL), PGD_OK);
    assert_memory_equal(kv_region_get_fingerprint(&again), other, sizeof other);
    assert_true(kv_region_holds(&again, 3, 0, 99, payload));
    kv_region_unmap(&again);
    kv_region_unmap(&late);
    kv_region_unmap(&r);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_region_places),    cmocka_unit_test(test_kv_region_shapes),
        cmocka_unit_test(test_kv_region_malformed), cmocka_unit_test(test_kv_region_open),
        cmocka_unit_test(test_kv_region_holds),     cmocka_unit_test(test_kv_region_fingerprint),
        cmocka_unit_test(test_kv_region_checksums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
