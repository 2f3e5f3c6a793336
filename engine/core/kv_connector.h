/* Where KV blocks come from and go to besides the model: the scheduler's side of an offload tier.
 *
 * The scheduler asks for what lies behind a request's local prefix hit, gives blocks to load it
 * into, and lets the connector add its transfers to each step (rules SC5a/b/g, OC1, UP6, UP9):
 *
 *   match ─► allocated ─► build_step (the load goes out)        the request waits, its blocks are
 *                              │                                 nobody else's and not published
 *                on_transfers ─► next_loaded ─► the request may be admitted
 *
 * A request is the connector's borrow from `allocated` on until `finished`, and if it was being
 * loaded then, until next_loaded has told of it, or `reset`. None of the functions may call back into
 * the scheduler or allocate.
 * What is to be stored comes from the block pool: `blocks` hears of every block that is published or
 * handed out again, in the middle of making a step too. What was published before next_loaded
 * answered false has been written when the step that is made now begins; later ones have not. No
 * request waits for its blocks to be stored.
 * Thread:  core
 */
#ifndef ENGINE_CORE_KV_CONNECTOR_H
#define ENGINE_CORE_KV_CONNECTOR_H

#include "engine/core/request.h"
#include "engine/kv/block_pool.h"
#include "proto/control.h"
#include "proto/scheduler_output.h"

typedef enum kv_match_kind {
    KV_MATCH_NONE,
    KV_MATCH_HIT,
    KV_MATCH_ASK_AGAIN /* not to be scheduled now; asked again with the next step, which somebody has
                          to ask for when nothing else is under way */
} kv_match_kind;

typedef struct kv_match {
    kv_match_kind kind;
    int32_t n_tokens; /* HIT: > 0, whole blocks; with the local ones less than r->n_tokens */
    /* HIT: of n_tokens, those that were brought up from disk for r. It is told of them; nothing else
     * depends on it. */
    int32_t n_disk_tokens;
} kv_match;

/* The load of a request has ended. */
typedef struct kv_loaded {
    request *r;
    /* Its leading tokens that are there now: all that were asked for, or up to the first block that
     * could not be loaded. The rest is computed; nobody is asked again. */
    int32_t n_valid_tokens;
} kv_loaded;

typedef struct kv_connector {
    void *arg;
    /* What lies behind the first n_local_tokens of r, which is asked as often as r is tried: what the
     * connector wants to remember until then goes to r->tier. */
    kv_match (*match)(void *arg, request *r, int32_t n_local_tokens);
    /* r has blocks for these tokens now; table: all its blocks, a borrow for the call.
     * n_external_tokens 0: nothing is to be loaded. */
    void (*allocated)(void *arg, request *r, const block_ids_msg *table, int32_t n_local_tokens,
                      int32_t n_external_tokens);
    /* Adds transfers to the message, which must be kept until the next call. True when it must be
     * sent even if nothing else is in it. */
    bool (*build_step)(void *arg, scheduler_output *out);
    /* A rank reports transfers as done. PGD_EPROTO and no change unless they are under way there. */
    pgd_err (*on_transfers)(void *arg, int32_t rank, const kv_transfer_done *done, int32_t n_done);
    /* A step of so many tokens took so long. */
    void (*on_step)(void *arg, int32_t n_tokens, uint32_t forward_us);
    /* False when there is no more. Asked before each step is made. */
    bool (*next_loaded)(void *arg, kv_loaded *out);
    /* There are transfers to be sent, even if no request is left. */
    bool (*has_work)(void *arg);
    /* What was computed of r is not to be trusted, wherever it is by now. */
    void (*forget)(void *arg, const request *r);
    /* r has finished, told once. While it is being loaded its blocks stay until next_loaded. */
    void (*finished)(void *arg, request *r);
    /* The worker is gone, with every transfer: next_loaded tells of nothing that was before. */
    void (*reset)(void *arg);
    block_listener blocks; /* with an arg of its own; published NULL: nobody listens */
} kv_connector;

#endif
