/* Strict reading of JSON from outside, on top of cJSON.
 *
 * json_parse refuses what cJSON lets pass: bytes after the value, NaN and Infinity, numbers that
 * overflow a double, nesting deeper than max_depth, invalid UTF-8, more values than max_values. Of duplicate keys the first
 * wins. A string that holds \u0000 is kept whole: cJSON would cut it, so the parser substitutes
 * U+0000 by the two bytes C0 80 and json_string_dup undoes that.
 * Thread:  any; a tree belongs to one thread at a time
 */
#ifndef COMMON_JSON_H
#define COMMON_JSON_H

#include <cjson/cJSON.h>

#include "common/err.h"

#define JSON_MAX_DEPTH 64
/* A cJSON item costs some 80 bytes for as little as two bytes of text: what comes from the network
 * has a limit. */
#define JSON_ANY_VALUES SIZE_MAX

/* *out must be freed with cJSON_Delete. */
PGD_MUST_USE pgd_err json_parse(cJSON **out, const char *text, size_t n_bytes, int max_depth,
                                pgd_why *why);
/* The same with at most max_values values, containers and keys' values alike. */
PGD_MUST_USE pgd_err json_parse_bounded(cJSON **out, const char *text, size_t n_bytes,
                                        int max_depth, size_t max_values, pgd_why *why);
/* Reads a whole file, at most max_bytes. */
PGD_MUST_USE pgd_err json_parse_file(cJSON **out, const char *path, size_t max_bytes, pgd_why *why);

/* Member by exact name, or NULL. A null member counts as absent for the getters below. */
const cJSON *json_get(const cJSON *object, const char *name);
/* Integer without fraction inside [min, max]; absent → *out unchanged, PGD_OK; wrong type or range
 * → PGD_EINVAL / PGD_ERANGE and a why naming the member. */
PGD_MUST_USE pgd_err json_get_i64(int64_t *out, const cJSON *object, const char *name, int64_t min,
                                  int64_t max, pgd_why *why);
PGD_MUST_USE pgd_err json_get_f64(double *out, const cJSON *object, const char *name, pgd_why *why);
PGD_MUST_USE pgd_err json_get_bool(bool *out, const cJSON *object, const char *name, pgd_why *why);
/* The text of a string item, for names and keywords: a U+0000 in it reads as C0 80. Borrow until
 * the tree is deleted; NULL if the item is not a string. */
const char *json_string(const cJSON *item);
/* A copy of the exact bytes, NULs included, and NUL-terminated; free with mem_free. NULL if no
 * string or out of memory. */
char *json_string_dup(const cJSON *item, size_t *n_bytes);

#endif
