/* A scan before cJSON: depth without recursion, UTF-8, the number grammar, and U+0000 made
 * survivable. The scan checks lexical form only; the structure is cJSON's to judge. */
#include "common/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>

#include "common/file.h"
#include "common/mem.h"
#include "common/utf8.h"

#define MAX_NUMBER_BYTES 512

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Length of the number at text (RFC 8259 grammar), or 0. */
static size_t scan_number(const char *text, size_t n)
{
    size_t i = 0;
    if (i < n && text[i] == '-')
        i++;
    if (i >= n || !is_digit(text[i]))
        return 0;
    if (text[i] == '0')
        i++;
    else
        while (i < n && is_digit(text[i]))
            i++;
    if (i < n && text[i] == '.') {
        size_t frac = ++i;
        while (i < n && is_digit(text[i]))
            i++;
        if (i == frac)
            return 0;
    }
    if (i < n && (text[i] == 'e' || text[i] == 'E')) {
        i++;
        if (i < n && (text[i] == '+' || text[i] == '-'))
            i++;
        size_t digits = i;
        while (i < n && is_digit(text[i]))
            i++;
        if (i == digits)
            return 0;
    }
    return i;
}

/* Checks the string at text[0] == '"'; *n_used includes both quotes. */
static pgd_err scan_string(const char *text, size_t n, size_t at, size_t *n_used, bool *has_nul,
                           pgd_why *why)
{
    size_t i = 1;
    while (i < n && text[i] != '"') {
        unsigned char c = (unsigned char)text[i];
        if (c < 0x20)
            return pgd_fail(why, PGD_EFORMAT,
                            "invalid JSON: control byte 0x%02x inside a string at byte %zu", c,
                            at + i);
        if (c == '\\') {
            if (n - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0)
                *has_nul = true;
            i += 2;
            continue;
        }
        i++;
    }
    if (i >= n)
        return pgd_fail(why, PGD_EFORMAT, "invalid JSON: string from byte %zu does not end", at);
    *n_used = i + 1;
    return PGD_OK;
}

/* A number of n bytes in the grammar's form; only an exponent or many digits can overflow. */
static bool is_finite_number(const char *text, size_t n)
{
    char number[MAX_NUMBER_BYTES + 1]; /* text need not be NUL-terminated */
    if (n < 300 && memchr(text, 'e', n) == NULL && memchr(text, 'E', n) == NULL)
        return true;
    memcpy(number, text, n);
    number[n] = '\0';
    return isfinite(strtod(number, NULL));
}

static pgd_err scan(const char *text, size_t n, int max_depth, size_t max_values, bool *has_nul,
                    pgd_why *why)
{
    size_t bad_at;
    size_t n_values = 1; /* at least as many as there are */
    if (!utf8_is_valid(text, n, &bad_at))
        return pgd_fail(why, PGD_EFORMAT, "invalid JSON: not UTF-8 at byte %zu", bad_at);
    int depth = 0;
    for (size_t i = 0; i < n;) {
        char c = text[i];
        if ((c == ',' || c == '{' || c == '[') && ++n_values > max_values)
            return pgd_fail(why, PGD_ERANGE, "expected at most %zu values, got more, at byte %zu",
                            max_values, i);
        if (c == '"') {
            size_t used = 0;
            PGD_TRY(scan_string(text + i, n - i, i, &used, has_nul, why));
            i += used;
        } else if (c == '{' || c == '[') {
            if (++depth > max_depth)
                return pgd_fail(why, PGD_EFORMAT,
                                "invalid JSON: nested deeper than %d levels at byte %zu", max_depth,
                                i);
            i++;
        } else if (c == '}' || c == ']') {
            depth--;
            i++;
        } else if (c == '-' || is_digit(c)) {
            size_t used = scan_number(text + i, n - i);
            if (used == 0 || (i + used < n && (is_digit(text[i + used]) || text[i + used] == '.')))
                return pgd_fail(why, PGD_EFORMAT, "invalid JSON: bad number at byte %zu", i);
            if (used > MAX_NUMBER_BYTES)
                return pgd_fail(why, PGD_ERANGE, "number at byte %zu has more than %d characters",
                                i, MAX_NUMBER_BYTES);
            if (!is_finite_number(text + i, used))
                return pgd_fail(why, PGD_ERANGE,
                                "number at byte %zu is too large: it must be finite", i);
            i += used;
        } else if ((unsigned char)c < ' ' && !is_space(c)) { /* white space to cJSON */
            return pgd_fail(why, PGD_EFORMAT, "invalid JSON: control byte 0x%02x at byte %zu",
                            (unsigned char)c, i);
        } else {
            i++;
        }
    }
    return PGD_OK;
}

/* In place: each escaped U+0000 becomes the bytes C0 80. cJSON copies them unseen, and they cannot
 * be confused with text, since well-formed UTF-8 never holds them. Returns the new length. */
static size_t replace_nul_escapes(char *text, size_t n)
{
    size_t out = 0;
    for (size_t i = 0; i < n;) {
        if (text[i] == '\\' && n - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0) {
            text[out++] = (char)0xC0;
            text[out++] = (char)0x80;
            i += 6;
        } else if (text[i] == '\\' && n - i >= 2) {
            text[out++] = text[i++];
            text[out++] = text[i++];
        } else {
            text[out++] = text[i++];
        }
    }
    text[out] = '\0';
    return out;
}

/* cJSON says the same of a syntax error and of memory that ran out; this tells them apart. */
static _Thread_local bool memory_ran_out;

static void *alloc_noted(size_t n_bytes)
{
    void *p = malloc(n_bytes);
    memory_ran_out = memory_ran_out || p == NULL;
    return p;
}

static void set_hooks(void)
{
    cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = alloc_noted, .free_fn = free});
}

pgd_err json_parse_bounded(cJSON **out, const char *text, size_t n_bytes, int max_depth,
                           size_t max_values, pgd_why *why)
{
    bool has_nul = false;
    char *copy = NULL;
    *out = NULL;
    PGD_TRY(scan(text, n_bytes, max_depth, max_values, &has_nul, why));
    if (has_nul) {
        copy = mem_strndup(text, n_bytes);
        if (copy == NULL)
            return pgd_fail(why, PGD_ENOMEM, "out of memory parsing JSON");
        n_bytes = replace_nul_escapes(copy, n_bytes);
        text = copy;
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, set_hooks);
    memory_ran_out = false;
    const char *end = text;
    pgd_err err = PGD_OK;
    cJSON *tree = cJSON_ParseWithLengthOpts(text, n_bytes, &end, false);
    if (tree == NULL && memory_ran_out) {
        err = pgd_fail(why, PGD_ENOMEM, "out of memory parsing JSON of %zu bytes", n_bytes);
    } else if (tree == NULL) {
        err = pgd_fail(why, PGD_EFORMAT, "invalid JSON: syntax error at byte %zu of %zu",
                       (size_t)(end - text), n_bytes);
    } else {
        size_t at = (size_t)(end - text);
        while (at < n_bytes && is_space(text[at]))
            at++;
        if (at < n_bytes) {
            cJSON_Delete(tree);
            err = pgd_fail(why, PGD_EFORMAT, "invalid JSON: more text after the value at byte %zu",
                           at);
        } else {
            *out = tree;
        }
    }
    mem_free(copy);
    return err;
}

pgd_err json_parse(cJSON **out, const char *text, size_t n_bytes, int max_depth, pgd_why *why)
{
    return json_parse_bounded(out, text, n_bytes, max_depth, JSON_ANY_VALUES, why);
}

pgd_err json_parse_file(cJSON **out, const char *path, size_t max_bytes, pgd_why *why)
{
    char *text;
    size_t n_bytes;
    PGD_TRY(file_read(&text, &n_bytes, path, max_bytes, why));
    pgd_err err = json_parse(out, text, n_bytes, JSON_MAX_DEPTH, why);
    mem_free(text);
    if (err != PGD_OK)
        return pgd_fail_prefix(why, err, "%s", path);
    return PGD_OK;
}

const cJSON *json_get(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return item != NULL && !cJSON_IsNull(item) ? item : NULL;
}

static const char *type_name(const cJSON *item)
{
    if (cJSON_IsString(item))
        return "a string";
    if (cJSON_IsNumber(item))
        return "a number";
    if (cJSON_IsBool(item))
        return "a boolean";
    if (cJSON_IsArray(item))
        return "an array";
    return cJSON_IsObject(item) ? "an object" : "null";
}

pgd_err json_get_i64(int64_t *out, const cJSON *object, const char *name, int64_t min, int64_t max,
                     pgd_why *why)
{
    const cJSON *item = json_get(object, name);
    if (item == NULL)
        return PGD_OK;
    if (!cJSON_IsNumber(item))
        return pgd_fail(why, PGD_EINVAL, "%s: expected an integer, got %s", name, type_name(item));
    double v = item->valuedouble;
    if (v != floor(v))
        return pgd_fail(why, PGD_EINVAL, "%s: expected an integer, got %g", name, v);
    /* 2^63 itself is a double but no int64_t. */
    if (v < (double)min || v > (double)max || v >= 9223372036854775808.0)
        return pgd_fail(why, PGD_ERANGE, "%s: expected %lld to %lld, got %.16g", name,
                        (long long)min, (long long)max, v);
    *out = (int64_t)v;
    return PGD_OK;
}

pgd_err json_get_f64(double *out, const cJSON *object, const char *name, pgd_why *why)
{
    const cJSON *item = json_get(object, name);
    if (item == NULL)
        return PGD_OK;
    if (!cJSON_IsNumber(item))
        return pgd_fail(why, PGD_EINVAL, "%s: expected a number, got %s", name, type_name(item));
    *out = item->valuedouble;
    return PGD_OK;
}

pgd_err json_get_bool(bool *out, const cJSON *object, const char *name, pgd_why *why)
{
    const cJSON *item = json_get(object, name);
    if (item == NULL)
        return PGD_OK;
    if (!cJSON_IsBool(item))
        return pgd_fail(why, PGD_EINVAL, "%s: expected true or false, got %s", name,
                        type_name(item));
    *out = cJSON_IsTrue(item);
    return PGD_OK;
}

const char *json_string(const cJSON *item)
{
    return item != NULL && cJSON_IsString(item) ? item->valuestring : NULL;
}

char *json_string_dup(const cJSON *item, size_t *n_bytes)
{
    const char *s = json_string(item);
    char *copy = s != NULL ? mem_strdup(s) : NULL;
    *n_bytes = 0;
    if (copy == NULL)
        return NULL;
    size_t out = 0;
    for (size_t i = 0; s[i] != '\0'; i++) {
        if ((unsigned char)s[i] == 0xC0 && (unsigned char)s[i + 1] == 0x80) {
            copy[out++] = '\0';
            i++;
        } else {
            copy[out++] = s[i];
        }
    }
    copy[out] = '\0';
    *n_bytes = out;
    return copy;
}
