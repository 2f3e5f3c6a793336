/* A worker that an operator started. A life is a connection: it begins with dialing and ends with
 * the connection. Ending it is all that we can do to a worker that hangs; when that one wakes up it
 * finds its connection gone and exits, and whatever it still sends goes nowhere, because each life
 * has a socket of its own. */
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "engine/core/worker_host.h"

#define LAST_WORD_US 100000u /* for NNG to write what was sent last, before the link is closed */

typedef struct worker_attach {
    worker_host host;
    char url[sizeof(((config *)NULL)->worker)];
    const worker_link *link; /* of the present life; borrow */
    uint64_t killed_us;      /* 0 = not */
} worker_attach;

static pgd_err start(worker_host *h, worker_link **link, worker_link_opts *opts, pgd_why *why)
{
    worker_attach *a = (worker_attach *)h;
    a->killed_us = 0;
    a->link = NULL;
    opts->dial = a->url;
    PGD_TRY(worker_link_open(link, opts, why));
    a->link = *link;
    return PGD_OK;
}

static bool poll_link(worker_host *h)
{
    worker_attach *a = (worker_attach *)h;
    bool is_over = a->killed_us != 0 && clock_now_us() - a->killed_us > LAST_WORD_US;
    if (a->link == NULL || worker_link_is_lost(a->link) || is_over)
        a->link = NULL;
    return a->link == NULL;
}

static void kill_link(worker_host *h)
{
    worker_attach *a = (worker_attach *)h;
    if (a->link != NULL && !worker_link_is_up(a->link))
        a->link = NULL;
    if (a->killed_us == 0)
        a->killed_us = clock_now_us();
}

static int get_fds(const worker_host *h, int fds[WORKER_HOST_MAX_FDS])
{
    (void)h;
    (void)fds;
    return 0; /* the link wakes the caller */
}

static int64_t get_pid(const worker_host *h)
{
    (void)h;
    return 0;
}

static const char *get_nothing(const worker_host *h)
{
    (void)h;
    return "";
}

static int get_signal(const worker_host *h)
{
    (void)h;
    return 0;
}

static void destroy(worker_host *h)
{
    explicit_bzero(&h->key, sizeof h->key);
    mem_free(h);
}

static const worker_host_vtbl VTBL = {.start = start,
                                      .poll = poll_link,
                                      .kill = kill_link,
                                      .get_fds = get_fds,
                                      .get_pid = get_pid,
                                      .get_epitaph = get_nothing,
                                      .get_signal = get_signal,
                                      .get_last_words = get_nothing,
                                      .destroy = destroy};

static pgd_err read_settings(worker_attach *a, const config *cfg, pgd_why *why)
{
    pgd_why fault = {0};
    bool has_key = cfg->worker_token_file[0] != 0;
    snprintf(a->url, sizeof a->url, "%s", cfg->worker);
    pgd_err err = attach_check_url(a->url, has_key, &fault);
    if (err != PGD_OK)
        return pgd_fail(why, err, "worker: %s", fault.text);
    return has_key ? attach_read_key(&a->host.key, cfg->worker_token_file, why) : PGD_OK;
}

pgd_err worker_attach_create(worker_host **out, const config *cfg, pgd_why *why)
{
    worker_attach *a = mem_calloc(1, sizeof *a);
    if (a == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    a->host.vtbl = &VTBL;
    a->host.may_be_absent = true;
    a->host.url = a->url;
    a->host.gone_reason = RESTART_CLOSED;
    a->host.gone_early =
        "closed the connection before a word: it serves another engine, or is just starting";
    a->host.gone = "closed the connection";
    pgd_err err = read_settings(a, cfg, why);
    if (err != PGD_OK) {
        destroy(&a->host);
        return err;
    }
    *out = &a->host;
    return PGD_OK;
}
