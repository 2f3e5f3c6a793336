/* `paged inspect FILE`: what a model file holds, and whether this build can run it.
 *
 * Thread:  any
 */
#ifndef ENGINE_INSPECT_H
#define ENGINE_INSPECT_H

#include <stdio.h>

#include "common/err.h"

enum {
    INSPECT_RUNNABLE = 0,    /* exit status: this build can run it */
    INSPECT_UNREADABLE = 1,  /* missing, damaged, or no model at all */
    INSPECT_NOT_RUNNABLE = 2 /* sound, but this build cannot run it */
};

/* path: a .gguf file, a Hugging Face directory, or one .safetensors file. Writes a table for people
 * to out; the last line is "this build can run it: yes" or "this build can run it: no: REASON".
 * Control characters from the file come out as '?'. */
int inspect_run(const char *path, FILE *out);

#endif
