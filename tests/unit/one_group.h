/* The layout of a model whose layers all keep their KV alike: what an engine without hybrid groups
 * answers to load_done. */
#ifndef TESTS_UNIT_ONE_GROUP_H
#define TESTS_UNIT_ONE_GROUP_H

#include <stdlib.h>

#include "engine/kv/kv_groups.h"
#include "proto/control.h"

static inline kv_layout one_group(const load_done_msg *done, int32_t block_size)
{
    static kv_groups groups;
    const kv_groups_opts opts = {.block_size = block_size};
    if (kv_groups_init(&groups, done->kv_layers, done->n_kv_layers, &opts, NULL) != PGD_OK)
        abort();
    return groups.layout;
}

static inline kv_config_msg one_group_config(const load_done_msg *done, int32_t block_size,
                                             int32_t n_blocks)
{
    return (kv_config_msg){.n_blocks = n_blocks, .layout = one_group(done, block_size)};
}

#endif
