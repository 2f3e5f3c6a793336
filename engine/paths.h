/* Where things lie beside the running binary.
 *
 * Thread:  any
 */
#ifndef ENGINE_PATHS_H
#define ENGINE_PATHS_H

#include "common/err.h"

/* Directory of the running executable, without a trailing slash; false when it cannot be told or
 * does not fit. */
bool paths_exe_dir(char *out, size_t cap);
/* The model that comes with paged: installed (../share/paged/models) or in the source tree. */
bool paths_find_bundled_model(char *out, size_t cap);

#endif
