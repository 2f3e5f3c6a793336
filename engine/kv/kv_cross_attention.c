/* Cross attention of encoder-decoder models (rule SM7): the blocks hold the encoder's tokens, are
 * all taken with the request's first allocation, and go with the request. They are never cached. */
#include "engine/kv/kv_group_ops.h"

const kv_group_ops kv_cross_attention_ops = {.name = "cross", .is_of_encoder = true};
