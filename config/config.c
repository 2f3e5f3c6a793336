/* Reads the option table from its four sources. Every source ends in set_option, so a value means
 * and fails the same wherever it comes from; only the "where" of the message differs. */
#include "config/config.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <strings.h>
#include <unistd.h>

#include "common/file.h"
#include "common/mem.h"
#include "config/config_table.h"

#define MAX_FILE_BYTES ((size_t)1 << 20)
#define MAX_NAME       64

static int find_option(const char *name)
{
    for (size_t i = 0; i < config_n_options; i++) {
        if (strcmp(config_options[i].name, name) == 0)
            return (int)i;
    }
    return -1;
}

/* Names that users know from peers but that this build has no feature for. */
static const char *const unbuilt_names[] = {
    "tensor_parallel_size", "data_parallel_size",     "speculative_config",
    "chat_template",        "gpu_memory_utilization", "dtype",
    "quantization",         "batch_invariant",
};

/* Insertions, deletions and replacements from a to b; names of the table are shorter than MAX_NAME.
 */
static size_t edit_distance(const char *a, const char *b)
{
    size_t row[MAX_NAME + 1];
    size_t n = strlen(b);
    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = PGD_MIN(replaced, PGD_MIN(row[j], row[j - 1]) + 1);
        }
    }
    return row[n];
}

/* For typing errors and names cut short; NULL when nothing is near. */
static const char *nearest_name(const char *name)
{
    const char *best = NULL;
    size_t best_distance = PGD_MIN(strlen(name) / 2, 3) + 1;
    for (size_t i = 0; i < config_n_options && strlen(name) < MAX_NAME; i++) {
        const char *option = config_options[i].name;
        /* The beginning of a name means it: --api-key means api_key_file. */
        bool is_beginning = strlen(name) >= 4 && strncmp(option, name, strlen(name)) == 0;
        size_t distance = is_beginning ? 0 : edit_distance(name, option);
        if (distance < best_distance) {
            best_distance = distance;
            best = option;
        }
    }
    return best;
}

static pgd_err fail_unknown(const char *name, const char *where, pgd_why *why)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(unbuilt_names); i++) {
        if (strcmp(unbuilt_names[i], name) == 0)
            return pgd_fail(why, PGD_EUNSUPPORTED, "%s: option %s is not built into this version",
                            where, name);
    }
    const char *best = nearest_name(name);
    if (best != NULL)
        return pgd_fail(why, PGD_EINVAL, "%s: unknown option %s (did you mean %s?)", where, name,
                        best);
    return pgd_fail(why, PGD_EINVAL, "%s: unknown option %s; `paged serve --help` lists them",
                    where, name);
}

static bool parse_bytes(double *out, const char *text)
{
    char *end;
    errno = 0;
    double v = strtod(text, &end);
    if (end == text || errno != 0 || !isfinite(v))
        return false;
    static const char suffixes[] = "kmgt";
    const char *s = *end != '\0' ? strchr(suffixes, tolower((unsigned char)*end)) : NULL;
    if (s != NULL) {
        v *= pow(1024.0, (double)(s - suffixes) + 1.0);
        end++;
        if (tolower((unsigned char)*end) == 'i')
            end++;
        if (tolower((unsigned char)*end) == 'b')
            end++;
    }
    *out = v;
    return *end == '\0' && v == floor(v);
}

static bool parse_int(double *out, const char *text)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    *out = (double)v;
    return end != text && *end == '\0' && errno == 0;
}

static bool parse_bool(bool *out, const char *text)
{
    static const char *const yes[] = {"true", "yes", "on", "1"};
    static const char *const no[] = {"false", "no", "off", "0"};
    for (size_t i = 0; i < PGD_ARRAY_LEN(yes); i++) {
        if (strcasecmp(text, yes[i]) == 0 || strcasecmp(text, no[i]) == 0) {
            *out = strcasecmp(text, yes[i]) == 0;
            return true;
        }
    }
    return false;
}

/* Index of text in "a|b|c", or -1. */
static int choice_index(const char *choices, const char *text)
{
    size_t len = strlen(text);
    int idx = 0;
    for (const char *c = choices; c != NULL; idx++) {
        const char *bar = strchr(c, '|');
        size_t n = bar != NULL ? (size_t)(bar - c) : strlen(c);
        if (n == len && memcmp(c, text, n) == 0)
            return idx;
        c = bar != NULL ? bar + 1 : NULL;
    }
    return -1;
}

static pgd_err set_option(config *cfg, int idx, const char *text, config_source source,
                          const char *where, pgd_why *why)
{
    const config_option *o = &config_options[idx];
    char *field = (char *)cfg + o->offset;
    double v = 0;
    switch (o->type) {
    case CONFIG_STRING:
        if (strlen(text) >= o->cap)
            return pgd_fail(why, PGD_ERANGE, "%s: %s: expected at most %zu bytes, got %zu", where,
                            o->name, o->cap - 1, strlen(text));
        memcpy(field, text, strlen(text) + 1);
        break;
    case CONFIG_BOOL:
        if (!parse_bool((bool *)(void *)field, text))
            return pgd_fail(why, PGD_EINVAL, "%s: %s: expected true or false, got \"%s\"", where,
                            o->name, text);
        break;
    case CONFIG_CHOICE: {
        int choice = choice_index(o->choices, text);
        if (choice < 0)
            return pgd_fail(why, PGD_EINVAL, "%s: %s: expected one of %s, got \"%s\"", where,
                            o->name, o->choices, text);
        if (o->cap > 0)
            memcpy(field, text, strlen(text) + 1);
        else
            *(int64_t *)(void *)field = choice;
        break;
    }
    case CONFIG_INT:
    case CONFIG_BYTES:
        if (choice_index(o->choices, text) >= 0) {
            *(int64_t *)(void *)field = 0;
            break;
        }
        if (!(o->type == CONFIG_INT ? parse_int(&v, text) : parse_bytes(&v, text)))
            return pgd_fail(why, PGD_EINVAL, "%s: %s: expected %s, got \"%s\"", where, o->name,
                            o->type == CONFIG_INT ? "an integer"
                                                  : "a size such as 512M or 4G (1024-based)",
                            text);
        if (v < o->min || v > o->max)
            return pgd_fail(why, PGD_ERANGE, "%s: %s: expected %.0f to %.0f, got %s", where,
                            o->name, o->min, o->max, text);
        *(int64_t *)(void *)field = (int64_t)v;
        break;
    case CONFIG_FLOAT: {
        char *end;
        v = strtod(text, &end);
        if (end == text || *end != '\0' || !isfinite(v))
            return pgd_fail(why, PGD_EINVAL, "%s: %s: expected a number, got \"%s\"", where,
                            o->name, text);
        if (v < o->min || v > o->max)
            return pgd_fail(why, PGD_ERANGE, "%s: %s: expected %g to %g, got %s", where, o->name,
                            o->min, o->max, text);
        *(double *)(void *)field = v;
        break;
    }
    }
    cfg->sources[idx] = (uint8_t)source;
    return PGD_OK;
}

void config_init(config *cfg)
{
    memset(cfg, 0, sizeof(*cfg));
    PGD_ASSERT(config_n_options <= CONFIG_MAX_OPTIONS);
    for (size_t i = 0; i < config_n_options; i++) {
        pgd_why why;
        PGD_ASSERT(strlen(config_options[i].name) < MAX_NAME);
        if (set_option(cfg, (int)i, config_options[i].fallback, CONFIG_DEFAULT, "default", &why) !=
            PGD_OK)
            PGD_PANIC("%s", why.text);
    }
}

/* Cuts white space off both ends, in place. */
static char *trim(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    size_t len = strlen(text);
    while (len > 0 && isspace((unsigned char)text[len - 1]))
        text[--len] = '\0';
    return text;
}

/* One line without its end. section: in force, changed by a `[section]` line. */
static pgd_err read_line(config *cfg, char *line, char *section, size_t cap, const char *where,
                         pgd_why *why)
{
    line = trim(line);
    size_t len = strlen(line);
    if (len == 0 || line[0] == '#' || line[0] == ';')
        return PGD_OK;
    char *equals = strchr(line, '=');
    bool is_section = line[0] == '[' && line[len - 1] == ']';
    if (!is_section && (line[0] == '[' || equals == NULL))
        return pgd_fail(why, PGD_EFORMAT, "%s: expected `name = value` or `[section]`", where);
    if (is_section) {
        snprintf(section, cap, "%.*s", (int)(len - 2), line + 1);
        return PGD_OK;
    }
    *equals = '\0';
    const char *name = trim(line);
    int idx = find_option(name);
    if (idx < 0)
        return fail_unknown(name, where, why);
    if (strcmp(section, config_options[idx].section) != 0)
        return pgd_fail(why, PGD_EINVAL, "%s: option %s belongs in section [%s], got [%s]", where,
                        name, config_options[idx].section, section);
    return set_option(cfg, idx, trim(equals + 1), CONFIG_FILE, where, why);
}

/* Lines of any length, the first fault ends it, a value is everything behind the equals sign. A
 * library for the format (inih) was tried: it cuts lines at 200 bytes and has no say in the rest. */
static pgd_err read_file(config *cfg, const char *path, pgd_why *why)
{
    char *text;
    size_t n_bytes;
    char section[64] = "";
    pgd_err err = PGD_OK;
    PGD_TRY(file_read(&text, &n_bytes, path, MAX_FILE_BYTES, why));
    char *line = strncmp(text, "\xEF\xBB\xBF", 3) == 0 ? text + 3 : text; /* a byte order mark */
    for (int number = 1; err == PGD_OK && line != NULL; number++) {
        char where[CONFIG_PATH_BYTES + 32];
        snprintf(where, sizeof(where), "%s:%d", path, number);
        char *end = memchr(line, '\n', (size_t)(text + n_bytes - line));
        if (end != NULL)
            *end = '\0';
        size_t n_line = end != NULL ? (size_t)(end - line) : (size_t)(text + n_bytes - line);
        if (memchr(line, '\0', n_line) != NULL)
            err = pgd_fail(why, PGD_EFORMAT, "%s: expected text, got a NUL byte", where);
        else
            err = read_line(cfg, line, section, sizeof(section), where, why);
        line = end != NULL ? end + 1 : NULL;
    }
    mem_free(text);
    return err;
}

static pgd_err read_environment(config *cfg, pgd_why *why)
{
    for (size_t i = 0; i < config_n_options; i++) {
        char name[80];
        snprintf(name, sizeof(name), "PAGED_%s", config_options[i].name);
        for (char *c = name; *c != '\0'; c++)
            *c = (char)toupper((unsigned char)*c);
        const char *value = getenv(name);
        if (value != NULL) {
            char where[96];
            snprintf(where, sizeof(where), "environment %s", name);
            PGD_TRY(set_option(cfg, (int)i, value, CONFIG_ENV, where, why));
        }
    }
    return PGD_OK;
}

/* 0 = not in the list, 1 = takes no value, 2 = takes one. */
static int find_extra(const char *const *extra, const char *name)
{
    for (size_t i = 0; extra != NULL && extra[i] != NULL; i++) {
        size_t len = strlen(extra[i]);
        bool has_value = len > 0 && extra[i][len - 1] == '=';
        if (has_value)
            len--;
        if (strlen(name) == len && strncmp(extra[i], name, len) == 0)
            return has_value ? 2 : 1;
    }
    return 0;
}

/* Walks argv once for --config (cfg NULL: only the path is wanted) or to apply the flags. */
static pgd_err walk_flags(config *cfg, const char **config_path, int argc, char **argv,
                          const char *const *extra, char **rest, int *n_rest, pgd_why *why)
{
    int n = 0;
    for (int i = 0; i < argc; i++) {
        char *arg = argv[i];
        char name[80];
        if (strcmp(arg, "--") == 0) {
            for (i++; i < argc; i++)
                rest[n++] = argv[i];
            break;
        }
        if (arg[0] != '-' || arg[1] == '\0') {
            rest[n++] = arg;
            continue;
        }
        bool is_long = strncmp(arg, "--", 2) == 0;
        const char *equals = is_long ? strchr(arg, '=') : NULL;
        size_t len = equals != NULL ? (size_t)(equals - arg) : strlen(arg);
        size_t skip = is_long ? 2 : 1;
        if (len - skip >= sizeof(name))
            return pgd_fail(why, PGD_EINVAL, "command line: unknown option %s", arg);
        memcpy(name, arg + skip, len - skip);
        name[len - skip] = '\0';

        int kind = find_extra(extra, name);
        if (kind != 0) {
            rest[n++] = arg;
            if (kind == 2 && equals == NULL) {
                if (i + 1 >= argc)
                    return pgd_fail(why, PGD_EINVAL, "command line: %s expects a value", arg);
                rest[n++] = argv[++i];
            }
            continue;
        }
        if (!is_long)
            return pgd_fail(why, PGD_EINVAL, "command line: unknown option %s; --help lists them",
                            arg);
        for (char *c = name; *c != '\0'; c++) {
            if (*c == '-')
                *c = '_';
        }
        bool is_config = strcmp(name, "config") == 0;
        int idx = find_option(name);
        bool negated = false;
        if (idx < 0 && strncmp(name, "no_", 3) == 0) {
            idx = find_option(name + 3);
            negated = idx >= 0 && config_options[idx].type == CONFIG_BOOL;
            if (!negated)
                idx = -1;
        }
        if (idx < 0 && !is_config)
            return fail_unknown(name, "command line", why);
        const char *value = equals != NULL ? equals + 1 : NULL;
        if (value == NULL && idx >= 0 && config_options[idx].type == CONFIG_BOOL) {
            value = negated ? "false" : "true";
        } else if (negated) {
            return pgd_fail(why, PGD_EINVAL, "command line: --no-... takes no value, got %s", arg);
        } else if (value == NULL) {
            if (i + 1 >= argc)
                return pgd_fail(why, PGD_EINVAL, "command line: %s expects a value", arg);
            value = argv[++i];
        }
        if (is_config)
            *config_path = value;
        else if (cfg != NULL)
            PGD_TRY(set_option(cfg, idx, value, CONFIG_FLAG, "command line", why));
    }
    *n_rest = n;
    return PGD_OK;
}

static pgd_err check_cache(const config *cfg, pgd_why *why)
{
    if (cfg->kv_events_url[0] == '\0' && cfg->kv_events_replay_url[0] != '\0')
        return pgd_fail(why, PGD_EINVAL,
                        "kv_events_replay_url: expected kv_events_url too, got none");
    bool has_dir = cfg->kv_offload_dir[0] != '\0';
    if (has_dir != (cfg->kv_offload_disk > 0))
        return pgd_fail(why, PGD_EINVAL, "%s: expected %s too, got none",
                        has_dir ? "kv_offload_dir" : "kv_offload_disk",
                        has_dir ? "kv_offload_disk" : "kv_offload_dir");
    if (cfg->kv_offload_memory == 0 && (has_dir || cfg->kv_offload_persist))
        return pgd_fail(why, PGD_EINVAL, "%s: expected kv_offload_memory too, got none",
                        has_dir ? "kv_offload_dir" : "kv_offload_persist");
    if (cfg->kv_offload_memory > 0 && !cfg->enable_prefix_caching)
        return pgd_fail(why, PGD_EINVAL,
                        "kv_offload_memory: expected enable_prefix_caching too: blocks are found "
                        "by the hashes of their tokens");
    if (cfg->kv_offload_persist && cfg->kv_hash_seed_file[0] == '\0')
        return pgd_fail(why, PGD_EINVAL,
                        "kv_offload_persist: expected kv_hash_seed_file too: what was hashed with "
                        "the secret of one start is not found by the next");
    return PGD_OK;
}

static pgd_err check_together(const config *cfg, pgd_why *why)
{
    if (cfg->block_size % 16 != 0)
        return pgd_fail(why, PGD_ERANGE, "block_size: expected a multiple of 16, got %lld",
                        (long long)cfg->block_size);
    if (cfg->num_kv_blocks == 1)
        return pgd_fail(why, PGD_ERANGE,
                        "num_kv_blocks: expected 0 or at least 2 (one is the null block), got 1");
    if (cfg->kv_cache_memory != 0 && cfg->num_kv_blocks != 0)
        return pgd_fail(why, PGD_EINVAL,
                        "kv_cache_memory and num_kv_blocks both set: give one of them");
    return check_cache(cfg, why);
}

pgd_err config_load(config *cfg, int argc, char **argv, const char *const *extra, char **rest,
                    int *n_rest, pgd_why *why)
{
    const char *path = getenv("PAGED_CONFIG");
    config_init(cfg);
    PGD_TRY(walk_flags(NULL, &path, argc, argv, extra, rest, n_rest, why));
    if (path != NULL && path[0] != '\0')
        PGD_TRY(read_file(cfg, path, why));
    PGD_TRY(read_environment(cfg, why));
    PGD_TRY(walk_flags(cfg, &path, argc, argv, extra, rest, n_rest, why));
    return check_together(cfg, why);
}

static void format_value(char *out, size_t cap, const config *cfg, const config_option *o)
{
    const char *field = (const char *)cfg + o->offset;
    int64_t v;
    double f;
    switch (o->type) {
    case CONFIG_STRING:
        snprintf(out, cap, "%s", field);
        break;
    case CONFIG_BOOL:
        snprintf(out, cap, "%s", *(const bool *)(const void *)field ? "true" : "false");
        break;
    case CONFIG_FLOAT:
        memcpy(&f, field, sizeof(f));
        snprintf(out, cap, "%.17g", f);
        break;
    case CONFIG_CHOICE:
        if (o->cap > 0) {
            snprintf(out, cap, "%s", field);
        } else {
            memcpy(&v, field, sizeof(v));
            const char *c = o->choices;
            for (; v > 0; v--)
                c = strchr(c, '|') + 1;
            snprintf(out, cap, "%.*s", (int)strcspn(c, "|"), c);
        }
        break;
    case CONFIG_INT:
        memcpy(&v, field, sizeof(v));
        snprintf(out, cap, "%lld", (long long)v);
        break;
    case CONFIG_BYTES: {
        memcpy(&v, field, sizeof(v));
        int shift = 0;
        while (v != 0 && v % 1024 == 0 && shift < 4) {
            v /= 1024;
            shift++;
        }
        snprintf(out, cap, "%lld%.*s", (long long)v, shift > 0 ? 1 : 0,
                 shift > 0 ? &"KMGT"[shift - 1] : "");
        break;
    }
    }
}

/* Wraps text at 100 columns, each line behind prefix. */
static void print_wrapped(FILE *out, const char *prefix, const char *text)
{
    size_t width = 96 - strlen(prefix);
    while (*text != '\0') {
        size_t n = strlen(text);
        if (n > width) {
            n = width;
            while (n > 0 && text[n] != ' ')
                n--;
            if (n == 0)
                n = width;
        }
        fprintf(out, "%s%.*s\n", prefix, (int)n, text);
        text += n;
        while (*text == ' ')
            text++;
    }
}

static void print_range(FILE *out, const char *prefix, const config_option *o)
{
    switch (o->type) {
    case CONFIG_INT:
        fprintf(out, "%s%s%s%.0f to %.0f\n", prefix, o->unit, o->unit[0] != '\0' ? ", " : "",
                o->min, o->max);
        break;
    case CONFIG_BYTES:
        fprintf(out, "%sbytes, suffixes K, M, G, T\n", prefix);
        break;
    case CONFIG_FLOAT:
        fprintf(out, "%s%s, %g to %g\n", prefix, o->unit, o->min, o->max);
        break;
    case CONFIG_CHOICE:
        fprintf(out, "%s%s\n", prefix, o->choices);
        break;
    case CONFIG_BOOL:
        fprintf(out, "%strue|false\n", prefix);
        break;
    case CONFIG_STRING:
        break;
    }
}

void config_dump(const config *cfg, FILE *out, bool with_sources)
{
    static const char *const source_names[] = {"default", "file", "environment", "command line"};
    fputs("# paged configuration. Sizes: K, M, G, T are powers of 1024.\n"
          "# Each option is also a flag (--max-num-seqs) and an environment variable "
          "(PAGED_MAX_NUM_SEQS);\n"
          "# precedence: default < this file < environment < command line.\n",
          out);
    const char *section = "";
    for (size_t i = 0; i < config_n_options; i++) {
        const config_option *o = &config_options[i];
        char value[CONFIG_PATH_BYTES];
        if (strcmp(section, o->section) != 0) {
            section = o->section;
            fprintf(out, "\n[%s]\n", section);
        }
        fputc('\n', out);
        print_wrapped(out, "# ", o->help);
        print_range(out, "# ", o);
        if (with_sources && cfg->sources[i] != CONFIG_DEFAULT)
            fprintf(out, "# from: %s\n", source_names[cfg->sources[i]]);
        format_value(value, sizeof(value), cfg, o);
        fprintf(out, "%s =%s%s\n", o->name, value[0] != '\0' ? " " : "", value);
    }
}

void config_help(FILE *out)
{
    fputs("  --config FILE\n        Configuration file (also PAGED_CONFIG); `paged config --dump` "
          "writes one.\n",
          out);
    for (size_t i = 0; i < config_n_options; i++) {
        const config_option *o = &config_options[i];
        char name[80];
        snprintf(name, sizeof(name), "%s", o->name);
        for (char *c = name; *c != '\0'; c++) {
            if (*c == '_')
                *c = '-';
        }
        if (o->type == CONFIG_BOOL)
            fprintf(out, "  --[no-]%s (default %s)\n", name, o->fallback);
        else if (o->fallback[0] != '\0')
            fprintf(out, "  --%s VALUE (default %s)\n", name, o->fallback);
        else
            fprintf(out, "  --%s VALUE\n", name);
        print_wrapped(out, "        ", o->help);
        print_range(out, "        ", o);
    }
}
