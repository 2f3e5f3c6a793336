/* Fields one by one, each integer in 8 bytes: structs have padding.
 *
 * The worker's fingerprint of a model samples its tensors, which tells models apart but not every
 * change of one; hashing all of it would read the disk for minutes. So the files' sizes and times
 * of change count as well: whatever writes a file changes them. A copy of a model thereby finds an
 * empty tier, which costs no more than computing again.
 *
 * Not all who write keep to that (an image that is built with all times set to one), and a base of
 * rotary positions has as many digits as another: what says how the tensors are to be computed with,
 * a GGUF's header or the JSON files, counts whole. Vocabularies are too large for that and change no
 * number. */
#include "engine/offload/offload_fingerprint.h"

#include <stdlib.h>
#include <string.h>

#include <dirent.h>
#include <sys/stat.h>

#include "common/file.h"
#include "common/mem.h"
#include "common/model/gguf.h"

#define FORMAT         "paged kv fingerprint 3" /* 2: it seeds checksums; 3: files count by bytes */
#define MAX_JSON_BYTES ((size_t)1 << 20)

static void add_int(hash_sha256_ctx *ctx, int64_t v)
{
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)((uint64_t)v >> (8 * i));
    hash_sha256_update(ctx, bytes, sizeof bytes);
}

static void add_bytes(hash_sha256_ctx *ctx, const void *bytes, size_t n)
{
    add_int(ctx, (int64_t)n);
    hash_sha256_update(ctx, bytes, n);
}

static void add_text(hash_sha256_ctx *ctx, const char *text)
{
    add_bytes(ctx, text, strlen(text));
}

static void add_layout(hash_sha256_ctx *ctx, const kv_layout *l)
{
    add_int(ctx, l->n_groups);
    for (int32_t g = 0; g < l->n_groups; g++) {
        add_int(ctx, l->groups[g].kind);
        add_int(ctx, l->groups[g].window);
        add_int(ctx, l->groups[g].block_size);
    }
    add_int(ctx, l->n_layers);
    for (int32_t i = 0; i < l->n_layers; i++) {
        add_int(ctx, l->layers[i].group);
        add_int(ctx, l->layers[i].slot);
    }
    add_int(ctx, l->n_slots);
    for (int32_t i = 0; i < l->n_slots; i++)
        add_int(ctx, (int64_t)l->page_bytes[i]);
}

static void add_stat(hash_sha256_ctx *ctx, const char *name, const struct stat *st)
{
    add_text(ctx, name);
    add_int(ctx, st->st_size);
    add_int(ctx, st->st_mtim.tv_sec);
    add_int(ctx, st->st_mtim.tv_nsec);
}

/* Of one that is no GGUF there is none. */
static void add_header(hash_sha256_ctx *ctx, const char *path)
{
    gguf_file *file;
    size_t n_bytes;
    if (gguf_open(&file, path, NULL) != PGD_OK)
        return;
    const uint8_t *header = gguf_get_header(file, &n_bytes);
    add_bytes(ctx, header, n_bytes);
    gguf_close(file);
}

static void add_json(hash_sha256_ctx *ctx, const char *path)
{
    char *text;
    size_t n_bytes;
    if (file_read(&text, &n_bytes, path, MAX_JSON_BYTES, NULL) != PGD_OK)
        return;
    add_bytes(ctx, text, n_bytes);
    mem_free(text);
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), n_end = strlen(end);
    return n >= n_end && strcmp(name + n - n_end, end) == 0;
}

static int is_model_file(const struct dirent *e)
{
    return ends_with(e->d_name, ".safetensors") || ends_with(e->d_name, ".json");
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static pgd_err add_files(hash_sha256_ctx *ctx, const char *path)
{
    struct stat st;
    struct dirent **entries;
    if (path == NULL || stat(path, &st) != 0)
        return PGD_OK;
    if (!S_ISDIR(st.st_mode)) {
        add_stat(ctx, "", &st);
        add_header(ctx, path);
        return PGD_OK;
    }
    int n = scandir(path, &entries, is_model_file, by_name);
    if (n < 0)
        return PGD_EIO;
    for (int i = 0; i < n; i++) {
        char file[4096];
        if (file_join(file, sizeof file, path, entries[i]->d_name) && stat(file, &st) == 0) {
            add_stat(ctx, entries[i]->d_name, &st);
            if (ends_with(file, ".json"))
                add_json(ctx, file);
        }
        free(entries[i]);
    }
    free(entries);
    return PGD_OK;
}

pgd_err offload_fingerprint_make(uint8_t out[HASH_SHA256_BYTES], const offload_fingerprint_facts *f)
{
    hash_sha256_ctx *ctx;
    PGD_TRY(hash_sha256_create(&ctx));
    hash_sha256_begin(ctx);
    add_text(ctx, FORMAT);
    add_text(ctx, PGD_VERSION_STRING);
    hash_sha256_update(ctx, f->model_fingerprint, HASH_SHA256_BYTES);
    hash_sha256_update(ctx, f->hash_seed, HASH_SHA256_BYTES);
    add_text(ctx, f->numerics);
    add_int(ctx, f->kv_dtype);
    add_int(ctx, f->block_size);
    add_int(ctx, f->vocab_size);
    add_int(ctx, f->n_ranks);
    add_layout(ctx, f->layout);
    pgd_err err = add_files(ctx, f->model_path);
    hash_sha256_end(ctx, out);
    hash_sha256_destroy(ctx);
    return err;
}
