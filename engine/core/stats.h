/* One value written by one thread and read as a whole by any: a sequence lock without locks.
 *
 * Readers never delay the writer; a reader that meets a write tries again.
 * Owns:    its copy of the value
 * Thread:  publish: one; read: any
 */
#ifndef ENGINE_CORE_STATS_H
#define ENGINE_CORE_STATS_H

#include "common/err.h"

typedef struct stats_cell stats_cell;

/* n_bytes is fixed for the life of the cell; the value starts as zeros. */
PGD_MUST_USE pgd_err stats_cell_create(stats_cell **out, size_t n_bytes);
void stats_cell_destroy(stats_cell *c);
void stats_publish(stats_cell *c, const void *value);
void stats_read(const stats_cell *c, void *value);

#endif
