/* A worker as a child process. Each life gets a fresh socket in the runtime directory and a fresh
 * key, which it reads from its stdin. */
#include <stdio.h>
#include <string.h>

#include <sys/random.h>
#include <unistd.h>

#include "common/mem.h"
#include "engine/core/runtime_dir.h"
#include "engine/core/worker_host.h"
#include "engine/supervisor.h"

#define KEY_BYTES ATTACH_MIN_KEY_BYTES

static_assert(WORKER_HOST_MAX_FDS >= SUPERVISOR_MAX_FDS, "room for its descriptors");

typedef struct worker_spawn {
    worker_host host;
    const config *cfg;
    supervisor *sup;
    char path[CONFIG_PATH_BYTES];
    char dir[RUNTIME_DIR_BYTES];
    char device[64];
} worker_spawn;

static pgd_err find_worker(char out[CONFIG_PATH_BYTES], const config *cfg, pgd_why *why)
{
    static const char NAME[] = "paged-worker";
    if (cfg->worker_path[0] != 0) {
        snprintf(out, CONFIG_PATH_BYTES, "%s", cfg->worker_path);
        return PGD_OK;
    }
    ssize_t n = readlink("/proc/self/exe", out, CONFIG_PATH_BYTES - sizeof NAME);
    if (n <= 0)
        return pgd_fail(why, PGD_EIO, "cannot tell where paged-worker is: set worker_path");
    out[n] = 0;
    char *slash = strrchr(out, '/');
    snprintf(slash + 1, sizeof NAME, "%s", NAME);
    return PGD_OK;
}

static pgd_err start(worker_host *h, worker_link **link, worker_link_opts *opts, pgd_why *why)
{
    worker_spawn *s = (worker_spawn *)h;
    char line[256];
    char hex[2 * KEY_BYTES + 1];
    h->key.n_bytes = KEY_BYTES;
    if (getrandom(h->key.data, KEY_BYTES, 0) != KEY_BYTES)
        return pgd_fail(why, PGD_EIO, "no random numbers from the system");
    for (size_t i = 0; i < KEY_BYTES; i++)
        snprintf(hex + 2 * i, 3, "%02x", h->key.data[i]);
    /* Once more for each life: whatever cleans /tmp may have taken it away. */
    PGD_TRY(runtime_dir_prepare(s->dir, s->cfg->runtime_dir, why));
    opts->dir = s->dir;
    PGD_TRY(worker_link_open(link, opts, why));
    snprintf(line, sizeof line, "key=%s engine_pid=%ld\n", hex, (long)getpid());
    const char *argv[] = {
        s->path,    "--connect",   worker_link_get_url(*link),
        "--device", s->device,     "--rank",
        "0",        "--log-level", s->cfg->log_level[0] != 0 ? s->cfg->log_level : "info",
        NULL};
    return supervisor_start(s->sup, s->path, argv, line, why);
}

static bool poll_child(worker_host *h)
{
    return supervisor_poll(((worker_spawn *)h)->sup);
}

static void kill_child(worker_host *h)
{
    supervisor_kill(((worker_spawn *)h)->sup);
}

static int get_fds(const worker_host *h, int fds[WORKER_HOST_MAX_FDS])
{
    return supervisor_get_fds(((const worker_spawn *)h)->sup, fds);
}

static int64_t get_pid(const worker_host *h)
{
    return (int64_t)supervisor_get_pid(((const worker_spawn *)h)->sup);
}

static const char *get_epitaph(const worker_host *h)
{
    return supervisor_get_epitaph(((const worker_spawn *)h)->sup);
}

static int get_signal(const worker_host *h)
{
    return supervisor_get_signal(((const worker_spawn *)h)->sup);
}

static const char *get_last_words(const worker_host *h)
{
    return supervisor_get_last_words(((const worker_spawn *)h)->sup);
}

static void destroy(worker_host *h)
{
    worker_spawn *s = (worker_spawn *)h;
    supervisor_destroy(s->sup);
    explicit_bzero(&h->key, sizeof h->key);
    mem_free(s);
}

static const worker_host_vtbl VTBL = {.start = start,
                                      .poll = poll_child,
                                      .kill = kill_child,
                                      .get_fds = get_fds,
                                      .get_pid = get_pid,
                                      .get_epitaph = get_epitaph,
                                      .get_signal = get_signal,
                                      .get_last_words = get_last_words,
                                      .destroy = destroy};

pgd_err worker_spawn_create(worker_host **out, const config *cfg, const char *device, pgd_why *why)
{
    worker_spawn *s = mem_calloc(1, sizeof *s);
    if (s == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    s->host = (worker_host){.vtbl = &VTBL,
                            .url = "",
                            .gone_reason = RESTART_EXIT,
                            .gone_early = "died",
                            .gone = "died"};
    s->cfg = cfg;
    snprintf(s->device, sizeof s->device, "%s", device);
    pgd_err err = find_worker(s->path, cfg, why);
    if (err == PGD_OK)
        err = runtime_dir_prepare(s->dir, cfg->runtime_dir, why);
    if (err == PGD_OK && (err = supervisor_create(&s->sup)) != PGD_OK)
        (void)pgd_fail(why, err, "out of memory");
    if (err != PGD_OK) {
        destroy(&s->host);
        return err;
    }
    runtime_dir_sweep(s->dir);
    *out = &s->host;
    return PGD_OK;
}
