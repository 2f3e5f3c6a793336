/* Equal facts have equal fingerprints; each fact that KV bytes depend on changes it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/offload/offload_fingerprint.h"
#include "tests/unit/model_builder.h"

typedef struct fixture {
    uint8_t model[32], seed[32];
    kv_layout layout;
    char dir[64];
    offload_fingerprint_facts facts;
    uint8_t last[32];
} fixture;

static bool is_new(fixture *f)
{
    uint8_t now[32];
    assert_int_equal(offload_fingerprint_make(now, &f->facts), PGD_OK);
    bool differs = memcmp(now, f->last, sizeof now) != 0;
    memcpy(f->last, now, sizeof now);
    return differs;
}

static void init(fixture *f)
{
    memset(f, 0, sizeof *f);
    f->layout.n_groups = f->layout.n_layers = 2;
    f->layout.n_slots = 1;
    f->layout.layers[1].group = 1;
    f->layout.groups[0].block_size = f->layout.groups[1].block_size = 16;
    f->layout.page_bytes[0] = 4096;
    strcpy(f->dir, "/tmp/paged-test-fingerprint-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    f->facts = (offload_fingerprint_facts){.model_fingerprint = f->model,
                                           .numerics = "cpu",
                                           .layout = &f->layout,
                                           .hash_seed = f->seed,
                                           .block_size = 16,
                                           .n_ranks = 1};
    assert_true(is_new(f));
    assert_false(is_new(f));
}

static void test_offload_fingerprint_facts(void **state)
{
    (void)state;
    fixture f;
    init(&f);
#define CHANGES(change)        \
    do {                       \
        change;                \
        if (!is_new(&f))       \
            fail_msg(#change); \
    } while (0)
    CHANGES(f.model[31] = 1);
    CHANGES(f.seed[0] = 1);
    CHANGES(f.facts.numerics = "cpu avx2");
    CHANGES(f.facts.kv_dtype = DTYPE_F16);
    CHANGES(f.facts.block_size = 32);
    CHANGES(f.facts.vocab_size = 9);
    CHANGES(f.facts.n_ranks = 2);
    CHANGES(f.layout.groups[1].kind = ATTENTION_SLIDING);
    CHANGES(f.layout.groups[1].window = 64);
    CHANGES(f.layout.groups[0].block_size = 32);
    CHANGES(f.layout.layers[0].slot = 1);
    CHANGES(f.layout.page_bytes[0] = 8192);
#undef CHANGES
    f.layout.page_bytes[1] = 7; /* beyond the slots that there are */
    assert_false(is_new(&f));
    assert_int_equal(rmdir(f.dir), 0);
}

static void set_time(const char *path)
{
    struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    set_time(path);
}

static void test_offload_fingerprint_files(void **state)
{
    (void)state;
    fixture f;
    char file[128], other[128];
    init(&f);
    snprintf(file, sizeof file, "%s/model.safetensors", f.dir);
    snprintf(other, sizeof other, "%s/README.md", f.dir);
    f.facts.model_path = f.dir;
    (void)is_new(&f);
    write_file(file, "abc");
    assert_true(is_new(&f));
    write_file(other, "abc");
    assert_false(is_new(&f));
    write_file(file, "abcd");
    assert_true(is_new(&f));
    struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000, .tv_nsec = 1}};
    assert_int_equal(utimensat(AT_FDCWD, file, times, 0), 0);
    assert_true(is_new(&f));
    f.facts.model_path = file; /* a model of one file */
    assert_true(is_new(&f));
    write_file(file, "ab");
    assert_true(is_new(&f));
    f.facts.model_path = "/nonexistent/model";
    assert_true(is_new(&f));
    unlink(file);
    unlink(other);
    assert_int_equal(rmdir(f.dir), 0);
}

static void write_gguf(const char *path, float rope_base)
{
    builder b;
    builder_begin(&b);
    builder_kv_f32(&b, "llama.rope.freq_base", rope_base);
    builder_end(&b);
    builder_write(path, b.data, b.n_bytes);
    builder_free(&b);
    set_time(path);
}

/* Everything about the files but their bytes is as before. */
static void test_offload_fingerprint_contents(void **state)
{
    (void)state;
    static char large[(1 << 20) + 2];
    fixture f;
    char config[128], tokenizer[128], gguf[128];
    init(&f);
    snprintf(config, sizeof config, "%s/config.json", f.dir);
    snprintf(tokenizer, sizeof tokenizer, "%s/tokenizer.json", f.dir);
    snprintf(gguf, sizeof gguf, "%s/model.gguf", f.dir);
    f.facts.model_path = f.dir;
    write_file(config, "{\"rope_theta\": 10000.0}");
    assert_true(is_new(&f));
    write_file(config, "{\"rope_theta\": 50000.0}");
    assert_true(is_new(&f));
    write_file(config, "{\"rope_theta\": 50000.0}");
    assert_false(is_new(&f));
    memset(large, 'a', sizeof large - 1);
    write_file(tokenizer, large);
    assert_true(is_new(&f));
    large[7] = 'b';
    write_file(tokenizer, large);
    assert_false(is_new(&f));
    f.facts.model_path = gguf;
    write_gguf(gguf, 10000);
    assert_true(is_new(&f));
    write_gguf(gguf, 50000);
    assert_true(is_new(&f));
    write_gguf(gguf, 50000);
    assert_false(is_new(&f));
    unlink(config);
    unlink(tokenizer);
    unlink(gguf);
    assert_int_equal(rmdir(f.dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offload_fingerprint_facts),
        cmocka_unit_test(test_offload_fingerprint_files),
        cmocka_unit_test(test_offload_fingerprint_contents),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
