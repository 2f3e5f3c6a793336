/* A directory of its own for a test of model files, and what a refusal must look like.
 *
 * The file's name can be chosen: define MODEL_DIR_FILE before the include.
 */
#ifndef TESTS_UNIT_MODEL_DIR_H
#define TESTS_UNIT_MODEL_DIR_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/err.h"
#include "tests/unit/model_builder.h"

#ifndef MODEL_DIR_FILE
#    define MODEL_DIR_FILE "m.gguf"
#endif

static char dir[64];
static char path[96]; /* of MODEL_DIR_FILE in dir */

static inline int make_model_dir(void **state)
{
    (void)state;
    (void)snprintf(path, sizeof(path), "%s/" MODEL_DIR_FILE, builder_make_dir(dir));
    return 0;
}

static inline int remove_model_dir(void **state)
{
    (void)state;
    builder_remove_dir(dir);
    return 0;
}

/* What was tried failed with this error, and the message holds the text. */
static inline void check_refusal(pgd_err err, pgd_err wanted_err, const pgd_why *why,
                                 const char *wanted)
{
    if (err == PGD_OK)
        fail_msg("accepted, expected a refusal with \"%s\"", wanted);
    if (err != wanted_err || strstr(why->text, wanted) == NULL)
        fail_msg("got %d \"%s\", expected %d \"%s\"", (int)err, why->text, (int)wanted_err, wanted);
}

#endif
