/* Requests whose blocks a KV connector fills (rules SC5a, SC5g, UP6, UP9).
 *
 *   waiting ── has a hit and blocks for it ──► waiting, status WAITING_FOR_REMOTE_KVS
 *      ▲                                         │ all tokens are there: keeps its blocks, which are
 *      ├─────────────────────────────────────────┤ published now
 *      └── gives its blocks back ◄───────────────┘ some are missing: what did come is published, so
 *                                                  that the prefix lookup finds what is of use
 *
 * The second way serves every kind of attention: which blocks a shorter prefix needs, and whether
 * they are among those that came, is the coordinator's to say.
 *
 * A request that finishes while it is loaded is "held": everybody has been told of its end, its blocks
 * and itself stay until the load's. */
#include "common/mem.h"
#include "common/thread.h"
#include "engine/core/scheduler_internal.h"

kv_match scheduler__match(const scheduler *s, request *r, int32_t n_local_tokens)
{
    const kv_connector *c = &s->connector;
    kv_match match = {.kind = KV_MATCH_NONE};
    if (!s->has_connector || r->skip_prefix_lookup || r->skip_external_lookup)
        return match;
    match = c->match(c->arg, r, n_local_tokens);
    if (match.kind != KV_MATCH_HIT)
        return (kv_match){.kind = match.kind};
    PGD_ASSERTF(match.n_tokens > 0 && match.n_tokens < r->n_tokens - n_local_tokens,
                "request %llu of %d tokens: %d to load behind %d", (unsigned long long)r->id,
                r->n_tokens, match.n_tokens, n_local_tokens);
    PGD_ASSERTF(match.n_disk_tokens >= 0 && match.n_disk_tokens <= match.n_tokens,
                "%d of %d tokens from disk", match.n_disk_tokens, match.n_tokens);
    return match;
}

void scheduler__tell_allocated(scheduler *s, request *r, int32_t n_local_tokens,
                               int32_t n_external_tokens)
{
    block_ids_msg table;
    if (!s->has_connector)
        return;
    kv_manager_get_table(&table, s->kv, r);
    s->connector.allocated(s->connector.arg, r, &table, n_local_tokens, n_external_tokens);
}

void scheduler__start_load(scheduler *s, request *r, int32_t n_local_tokens, const kv_match *match)
{
    request_queue_remove(s->waiting, r);
    r->status = REQUEST_WAITING_FOR_REMOTE_KVS;
    r->num_computed_tokens = n_local_tokens;
    r->n_external_tokens = match->n_tokens;
    r->n_disk_tokens = match->n_disk_tokens;
    s->n_loading++;
    list_append(&s->set_aside, &r->queue_node);
    scheduler__tell_allocated(s, r, n_local_tokens, match->n_tokens);
}

bool scheduler__hold(scheduler *s, request *r, request_status was)
{
    if (!s->has_connector)
        return false;
    s->connector.finished(s->connector.arg, r);
    r->is_held = was == REQUEST_WAITING_FOR_REMOTE_KVS;
    if (r->is_held)
        list_append(&s->held, &r->queue_node);
    return r->is_held;
}

void scheduler__forget(scheduler *s, const request *r)
{
    kv_manager_forget(s->kv, r);
    if (s->has_connector)
        s->connector.forget(s->connector.arg, r);
}

pgd_err scheduler_transfers_done(scheduler *s, int32_t rank, const kv_transfer_done *done,
                                 int32_t n_done)
{
    thread_assert(THREAD_CORE);
    if (!s->has_connector)
        return PGD_EPROTO;
    mem_forbid();
    pgd_err err = s->connector.on_transfers(s->connector.arg, rank, done, n_done);
    mem_permit();
    return err;
}

static void let_go(scheduler *s, request *r)
{
    list_remove(&r->queue_node);
    r->is_held = false;
    kv_manager_free(s->kv, r, r->num_computed_tokens);
    scheduler__release_if_done(s, r);
}

static void finish_load(scheduler *s, request *r, int32_t n_valid_tokens)
{
    int32_t n_wanted = r->num_computed_tokens + r->n_external_tokens;
    PGD_ASSERTF(s->n_loading > 0, "request %llu with status %d is not being loaded",
                (unsigned long long)r->id, r->status);
    s->n_loading--;
    if (r->is_held) {
        let_go(s, r);
        return;
    }
    PGD_ASSERTF(r->status == REQUEST_WAITING_FOR_REMOTE_KVS &&
                    n_valid_tokens >= r->num_computed_tokens && n_valid_tokens <= n_wanted,
                "request %llu with status %d: %d tokens loaded behind %d of %d",
                (unsigned long long)r->id, r->status, n_valid_tokens, r->num_computed_tokens,
                n_wanted);
    kv_manager_publish(s->kv, r, n_valid_tokens);
    r->status = r->epoch > 0 ? REQUEST_PREEMPTED : REQUEST_WAITING;
    r->num_computed_tokens = n_valid_tokens;
    if (n_valid_tokens == n_wanted)
        return;
    scheduler__drop_progress(s, r, n_valid_tokens);
    r->skip_external_lookup = true;
}

void scheduler__take_loaded(scheduler *s)
{
    kv_loaded l;
    while (s->has_connector && s->connector.next_loaded(s->connector.arg, &l))
        finish_load(s, l.r, l.n_valid_tokens);
}

void scheduler__reset_connector(scheduler *s)
{
    if (s->has_connector)
        s->connector.reset(s->connector.arg);
    s->n_loading = 0;
    while (!list_is_empty(&s->held))
        let_go(s, LIST_ENTRY(s->held.next, request, queue_node));
    for (request *r = NULL; (r = request_queue_next(s->waiting, r)) != NULL;) {
        if (r->status == REQUEST_WAITING_FOR_REMOTE_KVS)
            r->status = r->epoch > 0 ? REQUEST_PREEMPTED : REQUEST_WAITING;
    }
}
