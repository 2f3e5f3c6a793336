#include "tests/sim/sim_watch.h"

#include <string.h>

#include "engine/offload/offload_connector_internal.h"

static kv_match match(void *arg, request *r, int32_t n_local_tokens)
{
    sim_watch *w = arg;
    kv_match m = w->inner.match(w->inner.arg, r, n_local_tokens);
    if (m.kind == KV_MATCH_ASK_AGAIN) {
        w->n_put_off++;
        w->n_delays++;
        w->was_delayed[r->id] = true;
        w->has_lost_patience = w->has_lost_patience || r->tier.n_waits >= OFFLOAD_MAX_WAITS;
    }
    return m;
}

static void allocated(void *arg, request *r, const block_ids_msg *table, int32_t n_local_tokens,
                      int32_t n_external_tokens)
{
    sim_watch *w = arg;
    if (n_external_tokens > 0) {
        w->load_step[r->id] = w->sched->next_step_id;
        w->was_delayed[r->id] = true;
        w->n_loads++;
        w->n_resumed += r->epoch > 0;
    } else {
        w->n_recomputed += r->epoch > 0;
    }
    w->inner.allocated(w->inner.arg, r, table, n_local_tokens, n_external_tokens);
}

static bool build_step(void *arg, scheduler_output *out)
{
    sim_watch *w = arg;
    return w->inner.build_step(w->inner.arg, out);
}

static pgd_err on_transfers(void *arg, int32_t rank, const kv_transfer_done *done, int32_t n_done)
{
    sim_watch *w = arg;
    return w->inner.on_transfers(w->inner.arg, rank, done, n_done);
}

static void on_step(void *arg, int32_t n_tokens, uint32_t forward_us)
{
    sim_watch *w = arg;
    w->inner.on_step(w->inner.arg, n_tokens, forward_us);
}

static bool next_loaded(void *arg, kv_loaded *out)
{
    sim_watch *w = arg;
    if (!w->inner.next_loaded(w->inner.arg, out))
        return false;
    w->n_failed_loads +=
        out->n_valid_tokens < out->r->num_computed_tokens + out->r->n_external_tokens;
    return true;
}

static bool has_work(void *arg)
{
    sim_watch *w = arg;
    return w->inner.has_work(w->inner.arg);
}

static void forget(void *arg, const request *r)
{
    sim_watch *w = arg;
    w->inner.forget(w->inner.arg, r);
}

static void finished(void *arg, request *r)
{
    sim_watch *w = arg;
    w->inner.finished(w->inner.arg, r);
}

static void reset(void *arg)
{
    sim_watch *w = arg;
    w->inner.reset(w->inner.arg);
}

kv_connector sim_watch_connector(sim_watch *w, const kv_connector *inner)
{
    memset(w, 0, sizeof *w);
    w->inner = *inner;
    return (kv_connector){.arg = w,
                          .match = match,
                          .allocated = allocated,
                          .build_step = build_step,
                          .on_transfers = on_transfers,
                          .on_step = on_step,
                          .next_loaded = next_loaded,
                          .has_work = has_work,
                          .forget = forget,
                          .finished = finished,
                          .reset = reset,
                          .blocks = inner->blocks};
}
