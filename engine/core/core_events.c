/* Two threads on one ring: the core writes, the link reads. The ring is large enough for the events of
 * many steps; when the link falls behind all the same, a snapshot makes it good. */
#include "engine/core/core_events.h"

#include <string.h>

#include <unistd.h>

#include "common/mem.h"

#define RING_BYTES ((size_t)8 << 20)

struct core_events {
    kv_events *ring;
    kv_events_link *link;
    int wake_fd;
};

static void want_pump(void *arg)
{
    const core_events *e = arg;
    uint64_t one = 1;
    ssize_t n = write(e->wake_fd, &one, sizeof one);
    (void)n; /* full means that a wake-up is pending */
}

pgd_err core_events_open(core_events **out, const config *cfg, int wake_fd, pgd_why *why)
{
    *out = NULL;
    if (cfg->kv_events_url[0] == 0)
        return PGD_OK;
    core_events *e = mem_calloc(1, sizeof *e);
    if (e == NULL || kv_events_create(&e->ring, RING_BYTES) != PGD_OK) {
        core_events_close(e);
        return pgd_fail(why, PGD_ENOMEM, "kv_events_url: out of memory");
    }
    e->wake_fd = wake_fd;
    kv_events_link_opts opts = {.events = e->ring,
                                .url = cfg->kv_events_url,
                                .replay_url = cfg->kv_events_replay_url,
                                .topic = cfg->kv_events_topic,
                                .buffer_batches = (int32_t)cfg->kv_events_buffer_batches,
                                .want_pump = want_pump,
                                .arg = e};
    pgd_err err = kv_events_link_open(&e->link, &opts, why);
    if (err != PGD_OK) {
        core_events_close(e);
        return err;
    }
    *out = e;
    return PGD_OK;
}

void core_events_close(core_events *e)
{
    if (e == NULL)
        return;
    kv_events_link_close(e->link);
    kv_events_destroy(e->ring);
    mem_free(e);
}

kv_events *core_events_get_ring(const core_events *e)
{
    return e != NULL ? e->ring : NULL;
}

void core_events_start(core_events *e)
{
    if (e != NULL)
        kv_events_request_snapshot(e->ring);
}

void core_events_turn(core_events *e, scheduler *s)
{
    if (e == NULL)
        return;
    if (s != NULL)
        scheduler_pump_events(s);
    kv_events_link_poke(e->link);
}

void core_events_get_stats(const core_events *e, kv_events_link_stats *out)
{
    memset(out, 0, sizeof *out);
    if (e != NULL)
        kv_events_link_get_stats(e->link, out);
}
