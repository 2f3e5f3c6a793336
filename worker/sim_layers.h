/* The KV layers of the simulated worker, from the option sim_kv_layers.
 *
 *   text   entry {"," entry}
 *   entry  kind [":" window] ["*" weight]     kind: full, sliding, chunked; the latter two with a
 *                                             window
 *
 * Each entry is one layer; weight, 1 by default, is how many times SIM_LAYERS_TOKEN_BYTES a token
 * takes in it, so that layers can have pages of unequal size. "full,sliding:64" makes two groups.
 * Thread:  any
 */
#ifndef WORKER_SIM_LAYERS_H
#define WORKER_SIM_LAYERS_H

#include "proto/kv_layout.h"

#define SIM_LAYERS_TOKEN_BYTES 4096
#define SIM_LAYERS_MAX_WEIGHT  1024

/* layers: [PGD_MAX_KV_LAYERS]. "" is "full". PGD_EINVAL with a why */
PGD_MUST_USE pgd_err sim_layers_parse(kv_layer_spec *layers, int32_t *n_layers, const char *text,
                                      pgd_why *why);

#endif
