/* Error codes and the explanation that travels with them.
 *
 * A refusal ("no free block") is an ordinary answer, not a pgd_err. A pgd_err is passed up unlogged
 * and logged once where it is handled. Parsers of outside data also fill a pgd_why: "expected X,
 * got Y, at Z".
 * Thread:  any
 */
#ifndef COMMON_ERR_H
#define COMMON_ERR_H

#include "common/base.h"

PGD_BEGIN_C

/* name, message */
#define PGD_ERR_LIST(X)                      \
    X(PGD_EINVAL, -1, "invalid argument")    \
    X(PGD_ENOMEM, -2, "out of memory")       \
    X(PGD_EIO, -3, "input/output error")     \
    X(PGD_ENOENT, -4, "not found")           \
    X(PGD_EFORMAT, -5, "malformed data")     \
    X(PGD_EUNSUPPORTED, -6, "not supported") \
    X(PGD_ERANGE, -7, "out of range")        \
    X(PGD_EPROTO, -8, "protocol error")      \
    X(PGD_ECLOSED, -9, "closed by the peer") \
    X(PGD_EAGAIN, -10, "try again")          \
    X(PGD_ETIMEDOUT, -11, "timed out")       \
    X(PGD_EDEVICE, -12, "device error")      \
    X(PGD_EEXIST, -13, "already exists")     \
    X(PGD_EBUSY, -14, "busy")

typedef enum pgd_err {
    PGD_OK = 0,
#define PGD_ERR_ENUM(name, value, text) name = (value),
    PGD_ERR_LIST(PGD_ERR_ENUM)
#undef PGD_ERR_ENUM
} pgd_err;

/* Storage belongs to the caller; zero-initialise. text is always NUL-terminated. */
typedef struct pgd_why {
    char text[512];
} pgd_why;

/* Returns the fixed message of an error code; static storage. */
const char *pgd_err_text(pgd_err err);

/* Writes the explanation (why may be NULL) and returns err, so that `return pgd_fail(...)` reads
 * well. A longer text is cut. */
pgd_err pgd_fail(pgd_why *why, pgd_err err, const char *fmt, ...) PGD_PRINTF(3, 4);

/* Puts "prefix: " before the text that is already there; returns err. */
pgd_err pgd_fail_prefix(pgd_why *why, pgd_err err, const char *fmt, ...) PGD_PRINTF(3, 4);

/* The explanation, or the code's fixed message when there is none. */
const char *pgd_why_text(const pgd_why *why, pgd_err err);

#define PGD_TRY(expr)                             \
    do {                                          \
        pgd_err pgd_try_err_ = (expr);            \
        if (PGD_UNLIKELY(pgd_try_err_ != PGD_OK)) \
            return pgd_try_err_;                  \
    } while (0)

PGD_END_C
#endif
