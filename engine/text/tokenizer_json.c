/* Tokenizer from tokenizer.json and tokenizer_config.json.
 *
 * tokenizer.json is a description of a pipeline (normalizer, pre_tokenizer, model, post_processor,
 * decoder); each part is recognised or refused by name, never approximated. Vocabulary and merges
 * are read here; the other parts in tokenizer_json_parts.c.
 *
 * Entries come in any order and are sorted by id first, through an array of borrowed strings. An id
 * no entry has is an empty token that nothing finds.
 */
#include "engine/text/tokenizer_json.h"

#include <string.h>

#include "common/file.h"
#include "common/mem.h"

#define MAX_JSON_BYTES   ((size_t)1 << 28)
#define MAX_CONFIG_BYTES ((size_t)1 << 24)
#define ID_SLACK \
    65536 /* ids may leave this many gaps, so that one absurd id does not cost gigabytes */

typedef struct entry {
    const char *text; /* NULL = gap */
    size_t n_bytes;
    unsigned attrs;
    bool indexed;
} entry;

/* json_parse spells U+0000 as C0 80; undone in place, once per string. Returns the length in bytes.
 */
static size_t restore_nuls(char *text)
{
    size_t n = strlen(text);
    if (memmem(text, n, "\xC0\x80", 2) == NULL)
        return n;
    size_t out = 0;
    for (size_t i = 0; i < n; i++) {
        bool is_nul = (uint8_t)text[i] == 0xC0 && (uint8_t)text[i + 1] == 0x80;
        text[out++] = is_nul ? '\0' : text[i];
        i += is_nul ? 1 : 0;
    }
    text[out] = '\0';
    return out;
}

/* The exact bytes of a string item of this file's own tree; NULL if it is none. Call once per item.
 */
static const char *take_string(const cJSON *item, size_t *n_bytes)
{
    if (!cJSON_IsString(item))
        return NULL;
    *n_bytes = restore_nuls(item->valuestring);
    return item->valuestring;
}

static pgd_err fail_type(pgd_why *why, const char *what, const char *expected)
{
    return pgd_fail(why, PGD_EFORMAT, "tokenizer.json: expected %s to be %s", what, expected);
}

static bool read_id(int64_t *out, const cJSON *item)
{
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) || item->valuedouble >= VOCAB_MAX_TOKENS)
        return false;
    *out = (int64_t)item->valuedouble;
    return (double)*out == item->valuedouble;
}

/* Highest id + 1 over vocabulary and added tokens. */
static pgd_err count_ids(int32_t *out, const cJSON *vocab_object, const cJSON *added, pgd_why *why)
{
    int64_t top = -1;
    int64_t n_entries = 0;
    int64_t id;
    const cJSON *item;
    cJSON_ArrayForEach(item, vocab_object)
    {
        if (!read_id(&id, item)) {
            return pgd_fail(why, PGD_EFORMAT,
                            "tokenizer.json: id of \"%.80s\" in model.vocab is not one of 0 to %d",
                            item->string, VOCAB_MAX_TOKENS - 1);
        }
        top = PGD_MAX(top, id);
        n_entries++;
    }
    cJSON_ArrayForEach(item, added)
    {
        if (!cJSON_IsObject(item) || !read_id(&id, json_get(item, "id"))) {
            return pgd_fail(why, PGD_EFORMAT,
                            "tokenizer.json: an entry of added_tokens has no id of 0 to %d",
                            VOCAB_MAX_TOKENS - 1);
        }
        top = PGD_MAX(top, id);
        n_entries++;
    }
    if (top < 0)
        return pgd_fail(why, PGD_EFORMAT, "tokenizer.json: expected at least one token, got none");
    if (top > 2 * n_entries + ID_SLACK) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer.json: expected dense ids, got id %lld with %lld tokens",
                        (long long)top, (long long)n_entries);
    }
    *out = (int32_t)top + 1;
    return PGD_OK;
}

static pgd_err place(entry *entries, int64_t id, const char *text, size_t n_bytes, unsigned attrs,
                     bool indexed, pgd_why *why)
{
    entry *e = &entries[id];
    if (e->text == NULL) {
        *e = (entry){text, n_bytes, attrs, indexed};
        return PGD_OK;
    }
    if (e->n_bytes != n_bytes || memcmp(e->text, text, n_bytes) != 0) {
        return pgd_fail(
            why, PGD_EFORMAT,
            "tokenizer.json: expected one token with id %lld, got \"%.80s\" and \"%.80s\"",
            (long long)id, e->text, text);
    }
    e->attrs |= attrs;
    return PGD_OK;
}

static pgd_err collect(entry *entries, const cJSON *vocab_object, const cJSON *added, pgd_why *why)
{
    int64_t id;
    const cJSON *item;
    cJSON_ArrayForEach(item, vocab_object)
    {
        if (read_id(&id, item)) {
            size_t n_bytes = restore_nuls(item->string);
            PGD_TRY(place(entries, id, item->string, n_bytes, TOKEN_MODEL, true, why));
        }
    }
    cJSON_ArrayForEach(item, added)
    {
        size_t n_bytes;
        bool special = false;
        const char *text = take_string(json_get(item, "content"), &n_bytes);
        if (text == NULL)
            return fail_type(why, "content of an added token", "a string");
        PGD_TRY(json_get_bool(&special, item, "special", why));
        if (read_id(&id, json_get(item, "id"))) {
            unsigned attrs = TOKEN_ADDED | (special ? (unsigned)TOKEN_SPECIAL : 0u);
            PGD_TRY(place(entries, id, text, n_bytes, attrs, false, why));
        }
    }
    return PGD_OK;
}

static pgd_err load_tokens(tokenizer *t, const cJSON *vocab_object, const cJSON *added,
                           pgd_why *why)
{
    int32_t n_tokens = 0;
    PGD_TRY(count_ids(&n_tokens, vocab_object, added, why));
    PGD_TRY(tokenizer_reserve(t, n_tokens, 8 * (size_t)n_tokens, why));
    entry *entries = mem_calloc((size_t)n_tokens, sizeof(*entries));
    if (entries == NULL)
        return PGD_ENOMEM;
    pgd_err err = collect(entries, vocab_object, added, why);
    for (token_id id = 0; err == PGD_OK && id < n_tokens; id++) {
        const entry *e = &entries[id];
        err = tokenizer_set_token(t, e->text == NULL ? "" : e->text, e->n_bytes, e->attrs,
                                  e->indexed, why);
    }
    mem_free(entries);
    return err;
}

static pgd_err load_added(tokenizer *t, const cJSON *added, pgd_why *why)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, added)
    {
        int64_t id;
        added_flags flags = {0};
        bool normalized = false;
        if (!read_id(&id, json_get(item, "id")))
            continue; /* refused by count_ids already */
        PGD_TRY(json_get_bool(&flags.special, item, "special", why));
        PGD_TRY(json_get_bool(&flags.lstrip, item, "lstrip", why));
        PGD_TRY(json_get_bool(&flags.rstrip, item, "rstrip", why));
        PGD_TRY(json_get_bool(&flags.single_word, item, "single_word", why));
        PGD_TRY(json_get_bool(&normalized, item, "normalized", why));
        PGD_TRY(tokenizer_add_added(t, (token_id)id, flags, normalized, why));
    }
    return PGD_OK;
}

/* A merge is "left right" or ["left", "right"]. */
static pgd_err load_merge(tokenizer *t, const cJSON *item, uint32_t rank, pgd_why *why)
{
    size_t n_left = 0;
    size_t n_right = 0;
    const char *left = NULL;
    const char *right = NULL;
    if (cJSON_IsString(item)) {
        left = take_string(item, &n_right);
        const char *space = memchr(left, ' ', n_right);
        if (space != NULL && memchr(space + 1, ' ', n_right - (size_t)(space + 1 - left)) == NULL) {
            n_left = (size_t)(space - left);
            right = space + 1;
            n_right -= n_left + 1;
        }
    } else if (cJSON_IsArray(item) && item->child != NULL && item->child->next != NULL &&
               item->child->next->next == NULL) {
        left = take_string(item->child, &n_left);
        right = take_string(item->child->next, &n_right);
    }
    if (left == NULL || right == NULL) {
        return pgd_fail(
            why, PGD_EFORMAT,
            "tokenizer.json: expected \"left right\" or [\"left\", \"right\"] in model.merges[%u]",
            rank);
    }
    return tokenizer_add_merge(t, left, n_left, right, n_right, rank, why);
}

static pgd_err load_merges(tokenizer *t, const cJSON *merges, pgd_why *why)
{
    int n_merges = cJSON_GetArraySize(merges);
    if (!cJSON_IsArray(merges))
        return fail_type(why, "model.merges", "an array");
    if (bpe_rules_reserve(&t->rules, n_merges) != PGD_OK)
        return pgd_fail(why, PGD_ENOMEM, "tokenizer.json: no memory for %d merges", n_merges);
    uint32_t rank = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, merges)
    {
        PGD_TRY(load_merge(t, item, rank++, why));
    }
    return PGD_OK;
}

static pgd_err refuse_affix(const cJSON *model, const char *name, pgd_why *why)
{
    const char *text = json_string(json_get(model, name));
    if (text != NULL && text[0] != '\0') {
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "tokenizer.json: model.%s \"%.80s\" is not supported", name, text);
    }
    return PGD_OK;
}

static pgd_err load_model(tokenizer *t, const cJSON *model, const cJSON *added, pgd_why *why)
{
    const char *type = json_string(json_get(model, "type"));
    if (!cJSON_IsObject(model))
        return fail_type(why, "model", "an object");
    if (type != NULL ? strcmp(type, "BPE") != 0 : json_get(model, "merges") == NULL) {
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "tokenizer.json: model type \"%.80s\" is not supported, expected BPE",
                        type == NULL ? "" : type);
    }
    double dropout = 0;
    PGD_TRY(json_get_f64(&dropout, model, "dropout", why));
    if (dropout != 0) {
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "tokenizer.json: model.dropout %g is not supported, expected null",
                        dropout);
    }
    PGD_TRY(refuse_affix(model, "continuing_subword_prefix", why));
    PGD_TRY(refuse_affix(model, "end_of_word_suffix", why));
    PGD_TRY(json_get_bool(&t->ignore_merges, model, "ignore_merges", why));
    PGD_TRY(json_get_bool(&t->byte_fallback, model, "byte_fallback", why));
    PGD_TRY(json_get_bool(&t->fuse_unk, model, "fuse_unk", why));
    const cJSON *vocab_object = json_get(model, "vocab");
    if (!cJSON_IsObject(vocab_object))
        return fail_type(why, "model.vocab", "an object");
    if (added != NULL && !cJSON_IsArray(added))
        return fail_type(why, "added_tokens", "an array");
    PGD_TRY(load_tokens(t, vocab_object, added, why));
    PGD_TRY(load_merges(t, json_get(model, "merges"), why));
    const char *unk = json_string(json_get(model, "unk_token"));
    if (unk != NULL) {
        t->unk_id = vocab_find(&t->texts, unk, strlen(unk));
        if (t->unk_id < 0) {
            return pgd_fail(why, PGD_EFORMAT,
                            "tokenizer.json: model.unk_token \"%.80s\" is not in the vocabulary",
                            unk);
        }
    }
    return PGD_OK;
}

static pgd_err load_root(tokenizer *t, const cJSON *root, const cJSON *config, pgd_why *why)
{
    const cJSON *added = json_get(root, "added_tokens");
    bool has_affixes = false;
    if (!cJSON_IsObject(root))
        return fail_type(why, "the file", "an object");
    PGD_TRY(tokenizer_json_load_normalizer(t, json_get(root, "normalizer"), why));
    PGD_TRY(tokenizer_json_load_pretokenizer(t, json_get(root, "pre_tokenizer"), why));
    PGD_TRY(tokenizer_json_load_decoder(t, json_get(root, "decoder"), why));
    PGD_TRY(load_model(t, json_get(root, "model"), added, why));
    PGD_TRY(load_added(t, added, why));
    PGD_TRY(
        tokenizer_json_load_post_processor(t, json_get(root, "post_processor"), &has_affixes, why));
    if (config != NULL)
        PGD_TRY(tokenizer_json_load_config(t, config, !has_affixes, why));
    return tokenizer_finish(t, why);
}

pgd_err tokenizer_from_json(tokenizer **out, const char *json, size_t n_json, const char *config,
                            size_t n_config, pgd_why *why)
{
    cJSON *root = NULL;
    cJSON *config_root = NULL;
    tokenizer *t = NULL;
    pgd_err err = json_parse(&root, json, n_json, JSON_MAX_DEPTH, why);
    if (err != PGD_OK)
        return pgd_fail_prefix(why, err, "tokenizer.json");
    if (config != NULL) {
        err = json_parse(&config_root, config, n_config, JSON_MAX_DEPTH, why);
        if (err != PGD_OK)
            err = pgd_fail_prefix(why, err, "tokenizer_config.json");
    }
    if (err == PGD_OK)
        err = tokenizer_alloc(&t);
    if (err == PGD_OK)
        err = load_root(t, root, config_root, why);
    cJSON_Delete(root);
    cJSON_Delete(config_root);
    if (err != PGD_OK) {
        tokenizer_destroy(t);
        return err;
    }
    *out = t;
    return PGD_OK;
}

pgd_err tokenizer_create_from_dir(tokenizer **out, const char *dir, pgd_why *why)
{
    char path[4096];
    char *json = NULL;
    char *config = NULL;
    size_t n_json = 0;
    size_t n_config = 0;
    if (!file_join(path, sizeof(path), dir, "tokenizer.json"))
        return pgd_fail(why, PGD_ERANGE, "tokenizer: the path of the model directory is too long");
    PGD_TRY(file_read(&json, &n_json, path, MAX_JSON_BYTES, why));
    pgd_err err = PGD_OK;
    if (file_join(path, sizeof(path), dir, "tokenizer_config.json") && file_exists(path))
        err = file_read(&config, &n_config, path, MAX_CONFIG_BYTES, why);
    if (err == PGD_OK) {
        err = tokenizer_from_json(out, json, n_json, config, n_config, why);
        if (err != PGD_OK)
            err = pgd_fail_prefix(why, err, "%s", dir);
    }
    mem_free(json);
    mem_free(config);
    return err;
}
