/* Error texts, explanations and the one place that aborts. */
#include "common/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *pgd_err_text(pgd_err err)
{
    switch (err) {
    case PGD_OK:
        return "ok";
#define PGD_ERR_CASE(name, value, text) \
    case name:                          \
        return text;
        PGD_ERR_LIST(PGD_ERR_CASE)
#undef PGD_ERR_CASE
    }
    return "unknown error";
}

pgd_err pgd_fail(pgd_why *why, pgd_err err, const char *fmt, ...)
{
    if (why != NULL) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(why->text, sizeof(why->text), fmt, args);
        va_end(args);
    }
    return err;
}

pgd_err pgd_fail_prefix(pgd_why *why, pgd_err err, const char *fmt, ...)
{
    if (why != NULL) {
        pgd_why old = *why;
        va_list args;
        va_start(args, fmt);
        vsnprintf(why->text, sizeof(why->text), fmt, args);
        va_end(args);
        size_t used = strlen(why->text);
        snprintf(why->text + used, sizeof(why->text) - used, ": %s",
                 old.text[0] != '\0' ? old.text : pgd_err_text(err));
    }
    return err;
}

const char *pgd_why_text(const pgd_why *why, pgd_err err)
{
    return why != NULL && why->text[0] != '\0' ? why->text : pgd_err_text(err);
}

void pgd_panic(const char *file, int line, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    fprintf(stderr, "paged: bug at %s:%d: %s\n", file, line, text);
    abort();
}
