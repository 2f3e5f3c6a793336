/* Opens one or many safetensors files as one set of tensors.
 *
 * The index is a promise ("tensor T is in shard S"), the shards are the facts: every promise is
 * checked at open, so a missing shard or a shard without its tensor is told by name before anything
 * is computed. A name held by two shards is refused, since which one wins would be luck.
 */
#include "common/model/weight_shards.h"

#include <stdlib.h>
#include <string.h>

#include "common/file.h"
#include "common/json.h"
#include "common/mem.h"

#define INDEX_NAME  "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

enum {
    MAX_SHARDS = 1024,
    MAX_INDEX_BYTES = 16 << 20,
    MAX_PATH_BYTES = 4096,
    MAX_FILE_NAME_BYTES = 255,
};

typedef struct shard {
    char *name;
    safetensors_file *file;
} shard;

struct weight_shards {
    shard shards[MAX_SHARDS];
    int32_t n_shards;
    const safetensors_tensor **tensors; /* [n_tensors], by name */
    int32_t n_tensors;
};

/* A name that stays in the directory: no separator, not hidden, with the right ending. */
static bool is_plain_name(const char *name)
{
    static const char ending[] = ".safetensors";
    size_t n_bytes = strlen(name);
    size_t ending_bytes = sizeof(ending) - 1;
    if (n_bytes <= ending_bytes || n_bytes > MAX_FILE_NAME_BYTES || name[0] == '.' ||
        strcmp(name + n_bytes - ending_bytes, ending) != 0)
        return false;
    for (size_t i = 0; i < n_bytes; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c < 0x20 || c == 0x7f || c == '/' || c == '\\' || c == 0xc0)
            return false;
    }
    return true;
}

static const shard *find_shard(const weight_shards *s, const char *name)
{
    for (int32_t i = 0; i < s->n_shards; i++) {
        if (strcmp(s->shards[i].name, name) == 0)
            return &s->shards[i];
    }
    return NULL;
}

static pgd_err add_shard(weight_shards *s, const char *dir, const char *name, pgd_why *why)
{
    char path[MAX_PATH_BYTES];
    if (s->n_shards == MAX_SHARDS)
        return pgd_fail(why, PGD_EFORMAT, "expected at most %d shards, got more, at %s/" INDEX_NAME,
                        MAX_SHARDS, dir);
    if (!file_join(path, sizeof(path), dir, name))
        return pgd_fail(why, PGD_EINVAL,
                        "expected a path of less than %d bytes, got a longer one: %s/%s",
                        MAX_PATH_BYTES, dir, name);
    shard *sh = &s->shards[s->n_shards];
    sh->name = mem_strdup(name);
    if (sh->name == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the shards of %s", dir);
    s->n_shards++;
    return safetensors_open(&sh->file, path, why);
}

/* Opens every shard that the index names, then holds the index to what it says. */
static pgd_err read_index(weight_shards *s, const char *dir, const cJSON *index, pgd_why *why)
{
    const cJSON *weight_map = json_get(index, "weight_map");
    if (!cJSON_IsObject(weight_map) || weight_map->child == NULL)
        return pgd_fail(why, PGD_EFORMAT,
                        "expected a filled object \"weight_map\", got none, at %s/" INDEX_NAME,
                        dir);
    const cJSON *entry;
    cJSON_ArrayForEach(entry, weight_map)
    {
        const char *name = json_string(entry);
        if (name == NULL || !is_plain_name(name))
            return pgd_fail(
                why, PGD_EFORMAT,
                "expected a file name in the model's directory ending in .safetensors, got "
                "\"%.100s\" for tensor \"%.100s\", at %s/" INDEX_NAME,
                name != NULL ? name : "another JSON value", entry->string, dir);
        const shard *sh = find_shard(s, name);
        if (sh == NULL) {
            pgd_err err = add_shard(s, dir, name, why);
            if (err != PGD_OK)
                return pgd_fail_prefix(why, err, "shard of tensor \"%.100s\"", entry->string);
            sh = &s->shards[s->n_shards - 1];
        }
        if (safetensors_get_tensor(sh->file, entry->string) == NULL)
            return pgd_fail(
                why, PGD_EFORMAT,
                "expected tensor \"%.100s\" in shard %.100s as the index says, got a shard without "
                "it, at %s/" INDEX_NAME,
                entry->string, name, dir);
    }
    return PGD_OK;
}

static pgd_err open_files(weight_shards *s, const char *dir, pgd_why *why)
{
    char path[MAX_PATH_BYTES];
    if (!file_join(path, sizeof(path), dir, INDEX_NAME))
        return pgd_fail(why, PGD_EINVAL,
                        "expected a path of less than %d bytes, got a longer one: %s",
                        MAX_PATH_BYTES, dir);
    if (file_exists(path)) {
        cJSON *index = NULL;
        PGD_TRY(json_parse_file(&index, path, MAX_INDEX_BYTES, why));
        pgd_err err = read_index(s, dir, index, why);
        cJSON_Delete(index);
        return err;
    }
    if (!file_join(path, sizeof(path), dir, SINGLE_NAME) || !file_exists(path))
        return pgd_fail(why, PGD_ENOENT,
                        "expected " SINGLE_NAME " or " INDEX_NAME
                        ", got neither, in %s; weights in other formats are not read, convert them",
                        dir);
    return add_shard(s, dir, SINGLE_NAME, why);
}

static int order_names(const void *a, const void *b)
{
    return strcmp((*(const safetensors_tensor *const *)a)->name,
                  (*(const safetensors_tensor *const *)b)->name);
}

static pgd_err collect_tensors(weight_shards *s, const char *dir, pgd_why *why)
{
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_shards; i++)
        n += safetensors_n_tensors(s->shards[i].file);
    s->tensors = mem_calloc((size_t)n, sizeof(*s->tensors));
    if (s->tensors == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the tensors of %s", dir);
    for (int32_t i = 0; i < s->n_shards; i++) {
        for (int32_t j = 0; j < safetensors_n_tensors(s->shards[i].file); j++)
            s->tensors[s->n_tensors++] = safetensors_get_tensor_at(s->shards[i].file, j);
    }
    if (n > 1)
        qsort(s->tensors, (size_t)n, sizeof(*s->tensors), order_names);
    for (int32_t i = 1; i < n; i++) {
        if (strcmp(s->tensors[i - 1]->name, s->tensors[i]->name) == 0)
            return pgd_fail(why, PGD_EFORMAT,
                            "expected each tensor in one shard, got \"%s\" in two, in %s",
                            s->tensors[i]->name, dir);
    }
    return PGD_OK;
}

pgd_err weight_shards_open(weight_shards **out, const char *dir, pgd_why *why)
{
    *out = NULL;
    weight_shards *s = mem_calloc(1, sizeof(*s));
    if (s == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory for the shards of %s", dir);
    pgd_err err = open_files(s, dir, why);
    if (err == PGD_OK)
        err = collect_tensors(s, dir, why);
    if (err != PGD_OK) {
        weight_shards_close(s);
        return err;
    }
    *out = s;
    return PGD_OK;
}

void weight_shards_close(weight_shards *shards)
{
    if (shards == NULL)
        return;
    mem_free(shards->tensors);
    for (int32_t i = 0; i < shards->n_shards; i++) {
        safetensors_close(shards->shards[i].file);
        mem_free(shards->shards[i].name);
    }
    mem_free(shards);
}

int32_t weight_shards_n_files(const weight_shards *shards)
{
    return shards->n_shards;
}

int32_t weight_shards_n_tensors(const weight_shards *shards)
{
    return shards->n_tensors;
}

const safetensors_tensor *weight_shards_get_tensor_at(const weight_shards *shards, int32_t idx)
{
    return shards->tensors[idx];
}
