/* Any bytes as a configuration file. What loads is dumped and loaded again: the dump must give the
 * same configuration, and every value must lie in the range of its option. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>
#include <unistd.h>

#include "config/config_table.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static int write_file(char path[64], const void *data, size_t n_bytes)
{
    int fd = memfd_create("fuzz_config", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, n_bytes) != (ssize_t)n_bytes)
        abort();
    (void)snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

static pgd_err load(config *cfg, char *path, pgd_why *why)
{
    char flag[] = "--config";
    char *argv[] = {flag, path};
    char *rest[2];
    int n_rest;
    return config_load(cfg, 2, argv, NULL, rest, &n_rest, why);
}

static void check_ranges(const config *cfg)
{
    for (size_t i = 0; i < config_n_options; i++) {
        const config_option *o = &config_options[i];
        const char *field = (const char *)cfg + o->offset;
        int64_t v;
        double f;
        switch (o->type) {
        case CONFIG_INT:
        case CONFIG_BYTES:
            memcpy(&v, field, sizeof(v));
            PGD_ASSERTF((double)v >= o->min && (double)v <= o->max, "%s is %lld", o->name,
                        (long long)v);
            break;
        case CONFIG_FLOAT:
            memcpy(&f, field, sizeof(f));
            PGD_ASSERTF(f >= o->min && f <= o->max, "%s is %g", o->name, f);
            break;
        case CONFIG_STRING:
            PGD_ASSERTF(memchr(field, 0, o->cap) != NULL, "%s has no end", o->name);
            break;
        case CONFIG_BOOL:
        case CONFIG_CHOICE:
            break;
        }
    }
}

static void check_same(const config *a, const config *b)
{
    for (size_t i = 0; i < config_n_options; i++) {
        const config_option *o = &config_options[i];
        const char *x = (const char *)a + o->offset;
        const char *y = (const char *)b + o->offset;
        bool is_text = o->type == CONFIG_STRING || (o->type == CONFIG_CHOICE && o->cap > 0);
        size_t n_bytes = o->type == CONFIG_BOOL ? sizeof(bool) : sizeof(int64_t);
        bool is_same = is_text ? strcmp(x, y) == 0 : memcmp(x, y, n_bytes) == 0;
        PGD_ASSERTF(is_same, "%s differs after a dump", o->name);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static config first;
    static config again;
    char path[64];
    char dump_path[64];
    char *text = NULL;
    size_t n_text = 0;
    pgd_why why = {{0}};
    int fd = write_file(path, data, n_bytes);
    pgd_err err = load(&first, path, &why);
    (void)close(fd);
    if (err != PGD_OK) {
        PGD_ASSERT(why.text[0] != '\0');
        return 0;
    }
    check_ranges(&first);
    FILE *out = open_memstream(&text, &n_text);
    if (out == NULL)
        abort();
    config_dump(&first, out, n_bytes % 2 == 0);
    (void)fclose(out);
    fd = write_file(dump_path, text, n_text);
    PGD_ASSERTF(load(&again, dump_path, &why) == PGD_OK, "%s", why.text);
    (void)close(fd);
    free(text);
    check_same(&first, &again);
    return 0;
}
