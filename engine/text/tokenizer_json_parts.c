/* Normalizer, pre-tokenizer, decoder, post-processor and configuration of a tokenizer.json.
 *
 * Trees of Sequence are flattened to a short list, and the list is compared with the pipelines this
 * build can run exactly. Anything else is refused with its name or its expression in the message,
 * since a tokenizer that is nearly right gives wrong answers without a sign.
 */
#include <string.h>

#include "engine/text/tokenizer_json.h"

#define MAX_PARTS 8

typedef struct part_list {
    const cJSON *items[MAX_PARTS];
    int32_t n_items;
} part_list;

/* The type of a part; "" when it has none. */
static const char *type_of(const cJSON *item)
{
    const char *type = json_string(json_get(item, "type"));
    return type == NULL ? "" : type;
}

static bool is_type(const cJSON *item, const char *type)
{
    return strcmp(type_of(item), type) == 0;
}

static pgd_err refuse(const char *where, const cJSON *item, pgd_why *why)
{
    return pgd_fail(why, PGD_EUNSUPPORTED,
                    "tokenizer.json: %s of type \"%.80s\" is not supported here", where,
                    type_of(item));
}

/* Appends item, or the members of a Sequence (member: the name of its array). depth bounds nesting.
 */
static pgd_err flatten(part_list *list, const cJSON *item, const char *member, const char *where,
                       int32_t depth, pgd_why *why)
{
    if (item == NULL)
        return PGD_OK;
    if (!cJSON_IsObject(item)) {
        return pgd_fail(why, PGD_EFORMAT, "tokenizer.json: expected %s to be an object or null",
                        where);
    }
    if (!is_type(item, "Sequence")) {
        if (list->n_items == MAX_PARTS) {
            return pgd_fail(why, PGD_EUNSUPPORTED, "tokenizer.json: more than %d parts in %s",
                            MAX_PARTS, where);
        }
        list->items[list->n_items++] = item;
        return PGD_OK;
    }
    const cJSON *members = json_get(item, member);
    if (!cJSON_IsArray(members) || depth == 0) {
        return pgd_fail(
            why, PGD_EFORMAT,
            "tokenizer.json: expected an array \"%s\" in a Sequence of %s, nested at most "
            "4 deep",
            member, where);
    }
    const cJSON *m;
    cJSON_ArrayForEach(m, members)
    {
        PGD_TRY(flatten(list, m, member, where, depth - 1, why));
    }
    return PGD_OK;
}

/* --- normalizer ------------------------------------------------------------------------------- */

static pgd_err add_step(tokenizer *t, const cJSON *item, pgd_why *why)
{
    normalizer_kind kind;
    const char *what = NULL;
    const char *with = NULL;
    bool complete = true;
    if (is_type(item, "NFC")) {
        kind = NORMALIZER_NFC;
    } else if (is_type(item, "Prepend")) {
        kind = NORMALIZER_PREPEND;
        with = json_string(json_get(item, "prepend"));
        complete = with != NULL;
    } else if (is_type(item, "Replace")) {
        const cJSON *pattern = json_get(item, "pattern");
        if (json_get(pattern, "Regex") != NULL) {
            return pgd_fail(why, PGD_EUNSUPPORTED,
                            "tokenizer.json: a Replace normalizer with a Regex is not supported");
        }
        kind = NORMALIZER_REPLACE;
        what = json_string(json_get(pattern, "String"));
        with = json_string(json_get(item, "content"));
        complete = what != NULL && what[0] != '\0' && with != NULL;
    } else {
        return refuse("a normalizer", item, why);
    }
    if (!complete) {
        return pgd_fail(why, PGD_EFORMAT, "tokenizer.json: the %s normalizer lacks its strings",
                        type_of(item));
    }
    return normalizer_add(&t->normalizer, kind, what, what == NULL ? 0 : strlen(what), with,
                          with == NULL ? 0 : strlen(with));
}

pgd_err tokenizer_json_load_normalizer(tokenizer *t, const cJSON *item, pgd_why *why)
{
    part_list list = {0};
    PGD_TRY(flatten(&list, item, "normalizers", "normalizer", 4, why));
    for (int32_t i = 0; i < list.n_items; i++)
        PGD_TRY(add_step(t, list.items[i], why));
    return PGD_OK;
}

/* --- pre-tokenizer ------------------------------------------------------------------------------
 */

static pgd_err check_mark(const cJSON *item, const char *member, pgd_why *why)
{
    const char *mark = json_string(json_get(item, member));
    if (mark == NULL || strcmp(mark, TOKENIZER_WORD_MARK) != 0) {
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "tokenizer.json: expected %s of %s to be U+2581, got \"%.80s\"", member,
                        type_of(item), mark == NULL ? "" : mark);
    }
    return PGD_OK;
}

/* prepend_scheme, or in older files add_prefix_space. */
static pgd_err read_scheme(metaspace_prepend *out, const cJSON *item, pgd_why *why)
{
    bool prefix = true;
    const char *scheme = json_string(json_get(item, "prepend_scheme"));
    if (scheme == NULL) {
        PGD_TRY(json_get_bool(&prefix, item, "add_prefix_space", why));
        *out = prefix ? METASPACE_ALWAYS : METASPACE_NEVER;
    } else if (strcmp(scheme, "first") == 0) {
        *out = METASPACE_FIRST;
    } else if (strcmp(scheme, "always") == 0) {
        *out = METASPACE_ALWAYS;
    } else if (strcmp(scheme, "never") == 0) {
        *out = METASPACE_NEVER;
    } else {
        return pgd_fail(
            why, PGD_EFORMAT,
            "tokenizer.json: expected prepend_scheme first, always or never, got \"%.80s\"",
            scheme);
    }
    return PGD_OK;
}

static pgd_err load_metaspace(tokenizer *t, const cJSON *item, pgd_why *why)
{
    t->model = TOKENIZER_CHAR_BPE;
    t->has_metaspace = true;
    t->metaspace_split = true;
    PGD_TRY(check_mark(item, "replacement", why));
    PGD_TRY(json_get_bool(&t->metaspace_split, item, "split", why));
    return read_scheme(&t->metaspace_prepend, item, why);
}

/* Split: a known expression whose matches are the pieces and cover the whole text. */
static pgd_err load_split(tokenizer *t, const cJSON *item, pgd_why *why)
{
    bool invert = false;
    const char *regex = json_string(json_get(json_get(item, "pattern"), "Regex"));
    const char *behavior = json_string(json_get(item, "behavior"));
    PGD_TRY(json_get_bool(&invert, item, "invert", why));
    if (regex == NULL || behavior == NULL) {
        return pgd_fail(
            why, PGD_EUNSUPPORTED,
            "tokenizer.json: expected pattern.Regex and behavior in a Split pre-tokenizer");
    }
    bool isolates =
        strcmp(behavior, "Isolated") == 0 || (strcmp(behavior, "Removed") == 0 && invert);
    if (!isolates) {
        return pgd_fail(
            why, PGD_EUNSUPPORTED,
            "tokenizer.json: Split behavior \"%.40s\" is not supported, expected Isolated",
            behavior);
    }
    if (!pretokenizer_from_regex(&t->rule, regex, strlen(regex))) {
        return pgd_fail(
            why, PGD_EUNSUPPORTED,
            "tokenizer.json: the pre-tokenizer's expression is none this build knows: %s", regex);
    }
    return PGD_OK;
}

static pgd_err load_byte_level(tokenizer *t, const part_list *list, pgd_why *why)
{
    const cJSON *last = list->items[list->n_items - 1];
    bool use_regex = true;
    t->model = TOKENIZER_BYTE_BPE;
    t->add_prefix_space = true;
    PGD_TRY(json_get_bool(&use_regex, last, "use_regex", why));
    PGD_TRY(json_get_bool(&t->add_prefix_space, last, "add_prefix_space", why));
    t->rule = use_regex ? PRETOKENIZER_GPT2 : PRETOKENIZER_NONE;
    if (list->n_items == 1)
        return PGD_OK;
    const cJSON *first = list->items[0];
    if (list->n_items > 2 || t->add_prefix_space) {
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "tokenizer.json: a pre_tokenizer of %d parts%s is not supported, expected "
                        "one part before ByteLevel",
                        list->n_items, t->add_prefix_space ? " with add_prefix_space" : "");
    }
    if (is_type(first, "Digits") && use_regex) {
        bool individual = false;
        PGD_TRY(json_get_bool(&individual, first, "individual_digits", why));
        if (!individual) {
            return pgd_fail(why, PGD_EUNSUPPORTED,
                            "tokenizer.json: a Digits pre-tokenizer without individual_digits is "
                            "not supported");
        }
        t->rule = PRETOKENIZER_SMOLLM;
        return PGD_OK;
    }
    if (is_type(first, "Split") && !use_regex)
        return load_split(t, first, why);
    return refuse("a pre_tokenizer", first, why);
}

/* A Split at spaces behind a normalizer that leaves none (Gemma): it never splits. */
static bool is_idle_split(const tokenizer *t, const cJSON *item)
{
    const char *what = json_string(json_get(json_get(item, "pattern"), "String"));
    const normalizer *z = &t->normalizer;
    if (!is_type(item, "Split") || what == NULL || strcmp(what, " ") != 0 || z->n_steps == 0)
        return false;
    const normalizer_step *last = &z->steps[z->n_steps - 1];
    return last->kind == NORMALIZER_REPLACE && last->n_what_bytes == 1 && last->what[0] == ' ' &&
           memchr(last->with, ' ', last->n_with_bytes) == NULL;
}

pgd_err tokenizer_json_load_pretokenizer(tokenizer *t, const cJSON *item, pgd_why *why)
{
    part_list list = {0};
    PGD_TRY(flatten(&list, item, "pretokenizers", "pre_tokenizer", 4, why));
    if (list.n_items == 0 || (list.n_items == 1 && is_idle_split(t, list.items[0]))) {
        t->model = TOKENIZER_CHAR_BPE;
        t->rule = PRETOKENIZER_NONE;
        return PGD_OK;
    }
    const cJSON *last = list.items[list.n_items - 1];
    if (is_type(last, "ByteLevel"))
        return load_byte_level(t, &list, why);
    if (is_type(last, "Metaspace") && list.n_items == 1)
        return load_metaspace(t, last, why);
    return refuse("a pre_tokenizer", last, why);
}

/* --- decoder ---------------------------------------------------------------------------------- */

static pgd_err load_decoder_part(tokenizer *t, const cJSON *item, pgd_why *why)
{
    if (is_type(item, "ByteFallback")) {
        t->decodes_bytes = true;
        return PGD_OK;
    }
    if (is_type(item, "Fuse"))
        return PGD_OK;
    if (is_type(item, "Replace")) {
        const char *with = json_string(json_get(item, "content"));
        t->marks_are_spaces = true;
        if (with == NULL || strcmp(with, " ") != 0) {
            return pgd_fail(why, PGD_EUNSUPPORTED,
                            "tokenizer.json: expected the Replace decoder to give a space");
        }
        const cJSON *pattern = json_get(item, "pattern");
        const char *what = json_string(json_get(pattern, "String"));
        if (what == NULL || strcmp(what, TOKENIZER_WORD_MARK) != 0) {
            return pgd_fail(why, PGD_EUNSUPPORTED,
                            "tokenizer.json: expected the Replace decoder to take U+2581");
        }
        return PGD_OK;
    }
    if (is_type(item, "Strip")) {
        const char *what = json_string(json_get(item, "content"));
        int64_t start = 0;
        int64_t stop = 0;
        PGD_TRY(json_get_i64(&start, item, "start", 0, INT32_MAX, why));
        PGD_TRY(json_get_i64(&stop, item, "stop", 0, INT32_MAX, why));
        if (what == NULL || strcmp(what, " ") != 0 || start > 1 || stop != 0) {
            return pgd_fail(why, PGD_EUNSUPPORTED,
                            "tokenizer.json: expected a Strip decoder of one space at the start");
        }
        t->first_space = start == 1 ? FIRST_SPACE_STRIP_ONE : t->first_space;
        return PGD_OK;
    }
    if (is_type(item, "Metaspace")) {
        metaspace_prepend scheme;
        PGD_TRY(check_mark(item, "replacement", why));
        PGD_TRY(read_scheme(&scheme, item, why));
        t->marks_are_spaces = true;
        t->first_space = scheme == METASPACE_NEVER ? FIRST_SPACE_KEEP : FIRST_SPACE_STRIP_ALL;
        return PGD_OK;
    }
    return refuse("a decoder", item, why);
}

/* Without a decoder the pre-tokenizer is undone. */
static void infer_decoder(tokenizer *t)
{
    if (t->model == TOKENIZER_CHAR_BPE) {
        t->marks_are_spaces = true;
        t->decodes_bytes = true;
        t->first_space = t->has_metaspace && t->metaspace_prepend != METASPACE_NEVER
                             ? FIRST_SPACE_STRIP_ONE
                             : FIRST_SPACE_KEEP;
    }
}

pgd_err tokenizer_json_load_decoder(tokenizer *t, const cJSON *item, pgd_why *why)
{
    part_list list = {0};
    PGD_TRY(flatten(&list, item, "decoders", "decoder", 4, why));
    if (list.n_items == 0) {
        infer_decoder(t);
        return PGD_OK;
    }
    bool byte_level = list.n_items == 1 && is_type(list.items[0], "ByteLevel");
    if (byte_level != (t->model == TOKENIZER_BYTE_BPE)) {
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "tokenizer.json: expected a ByteLevel decoder if and only if the "
                        "pre-tokenizer is ByteLevel, got %.80s",
                        type_of(list.items[0]));
    }
    for (int32_t i = 0; !byte_level && i < list.n_items; i++)
        PGD_TRY(load_decoder_part(t, list.items[i], why));
    return PGD_OK;
}

/* --- post-processor ------------------------------------------------------------------------------
 */

static pgd_err add_affix(tokenizer *t, bool before, token_id id, pgd_why *why)
{
    int32_t *n = before ? &t->n_prefix : &t->n_suffix;
    if (*n == TOKENIZER_MAX_AFFIX) {
        return pgd_fail(why, PGD_EUNSUPPORTED, "tokenizer.json: more than %d tokens around a text",
                        TOKENIZER_MAX_AFFIX);
    }
    (before ? t->prefix : t->suffix)[(*n)++] = id;
    return PGD_OK;
}

static pgd_err add_affix_item(tokenizer *t, bool before, const cJSON *id, const char *name,
                              pgd_why *why)
{
    if (!cJSON_IsNumber(id) || !(id->valuedouble >= 0) || id->valuedouble >= t->texts.n_tokens) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer.json: an id of \"%.80s\" in post_processor is not that of "
                        "one of the %d tokens",
                        name, t->texts.n_tokens);
    }
    return add_affix(t, before, (token_id)id->valuedouble, why);
}

/* One element of a template: the ids of a special token. */
static pgd_err add_template_token(tokenizer *t, const cJSON *template, const cJSON *special,
                                  bool before, pgd_why *why)
{
    const char *name = json_string(json_get(special, "id"));
    const cJSON *ids =
        name == NULL ? NULL : json_get(json_get(json_get(template, "special_tokens"), name), "ids");
    if (!cJSON_IsArray(ids)) {
        return pgd_fail(
            why, PGD_EFORMAT,
            "tokenizer.json: expected ids for \"%.80s\" in post_processor.special_tokens",
            name == NULL ? "" : name);
    }
    const cJSON *id;
    cJSON_ArrayForEach(id, ids)
    {
        PGD_TRY(add_affix_item(t, before, id, name, why));
    }
    return PGD_OK;
}

static pgd_err load_template(tokenizer *t, const cJSON *template, pgd_why *why)
{
    const cJSON *single = json_get(template, "single");
    bool before = true;
    if (!cJSON_IsArray(single)) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer.json: expected an array \"single\" in post_processor");
    }
    const cJSON *element;
    cJSON_ArrayForEach(element, single)
    {
        const cJSON *special = json_get(element, "SpecialToken");
        if (special != NULL) {
            PGD_TRY(add_template_token(t, template, special, before, why));
        } else if (json_get(element, "Sequence") != NULL && before) {
            before = false;
        } else {
            return pgd_fail(
                why, PGD_EFORMAT,
                "tokenizer.json: expected SpecialToken or one Sequence in post_processor.single");
        }
    }
    return PGD_OK;
}

/* "cls" in front and "sep" behind, each a pair of text and id. */
static pgd_err load_roberta(tokenizer *t, const cJSON *item, pgd_why *why)
{
    static const char *const names[] = {"cls", "sep"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(names); i++) {
        const cJSON *pair = json_get(item, names[i]);
        if (!cJSON_IsArray(pair) || cJSON_GetArraySize(pair) != 2) {
            return pgd_fail(why, PGD_EFORMAT,
                            "tokenizer.json: expected a text and an id at \"%s\" in "
                            "post_processor",
                            names[i]);
        }
        PGD_TRY(add_affix_item(t, i == 0, pair->child->next, names[i], why));
    }
    return PGD_OK;
}

pgd_err tokenizer_json_load_post_processor(tokenizer *t, const cJSON *item, bool *has_affixes,
                                           pgd_why *why)
{
    part_list list = {0};
    *has_affixes = false;
    PGD_TRY(flatten(&list, item, "processors", "post_processor", 4, why));
    for (int32_t i = 0; i < list.n_items; i++) {
        if (is_type(list.items[i], "TemplateProcessing")) {
            *has_affixes = true;
            PGD_TRY(load_template(t, list.items[i], why));
        } else if (is_type(list.items[i], "RobertaProcessing")) {
            *has_affixes = true;
            PGD_TRY(load_roberta(t, list.items[i], why));
        } else if (!is_type(list.items[i], "ByteLevel")) {
            return refuse("a post_processor", list.items[i], why);
        }
    }
    return PGD_OK;
}

/* --- tokenizer_config.json -------------------------------------------------------------------- */

/* "bos_token": a string, an object with "content", or null. */
static pgd_err find_named(token_id *out, const tokenizer *t, const cJSON *config, const char *name,
                          pgd_why *why)
{
    const cJSON *item = json_get(config, name);
    if (item == NULL || cJSON_IsNull(item))
        return PGD_OK;
    const char *text = json_string(cJSON_IsObject(item) ? json_get(item, "content") : item);
    if (text == NULL) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer_config.json: expected %s to be a string or to have content",
                        name);
    }
    token_id id = tokenizer_find(t, text, strlen(text));
    if (id < 0) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer_config.json: %s \"%.80s\" is not in the vocabulary", name, text);
    }
    *out = id;
    return PGD_OK;
}

pgd_err tokenizer_json_load_config(tokenizer *t, const cJSON *config, bool takes_affixes,
                                   pgd_why *why)
{
    bool add_bos = false;
    bool add_eos = false;
    if (!cJSON_IsObject(config)) {
        return pgd_fail(why, PGD_EFORMAT,
                        "tokenizer_config.json: expected the file to be an object");
    }
    PGD_TRY(find_named(&t->bos_id, t, config, "bos_token", why));
    PGD_TRY(find_named(&t->eos_id, t, config, "eos_token", why));
    PGD_TRY(json_get_bool(&add_bos, config, "add_bos_token", why));
    PGD_TRY(json_get_bool(&add_eos, config, "add_eos_token", why));
    if (takes_affixes && add_bos && t->bos_id >= 0)
        PGD_TRY(add_affix(t, true, t->bos_id, why));
    if (takes_affixes && add_eos && t->eos_id >= 0)
        PGD_TRY(add_affix(t, false, t->eos_id, why));
    return PGD_OK;
}
