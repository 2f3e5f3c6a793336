/* A file is a copy of the medium block, all shards, made at some moment of the write; a read copies it
 * back at some moment of the read. In between the medium's claims tell whether the block was left
 * alone. */
#include "tests/sim/sim_disk.h"

#include <stdlib.h>
#include <string.h>

#define MAX_JOBS     4 /* in each direction */
#define MAX_REMOVALS 512

typedef struct file {
    uint64_t tag; /* 0 = none */
    uint64_t used_at;
    uint64_t *slots; /* [n_ranks, max_block_size] */
} file;

typedef struct job {
    uint64_t number; /* in the order in which they were taken */
    uint64_t cookie;
    uint64_t tag;
    uint64_t copies_at;
    uint64_t ends_at;
    int32_t medium_block;
    bool is_read;
    bool is_removal;
    bool is_copied;
    bool ok;
} job;

struct disk_tier {
    const sim_config *config;
    sim_medium *medium;
    uint64_t now;
    uint64_t rng;
    uint64_t rests_until[2];
    file *files; /* [n_disk_blocks] */
    uint64_t n_taken;
    int32_t n_jobs;
    job jobs[2 * MAX_JOBS + MAX_REMOVALS];
    disk_tier_stats stats;
};

static uint64_t draw(disk_tier *d)
{
    d->rng = hash_u64(d->rng + 0x9e3779b97f4a7c15ull);
    return d->rng >> 11;
}

disk_tier *sim_disk_create(const sim_config *config, sim_medium *medium)
{
    disk_tier *d = calloc(1, sizeof *d);
    size_t n_slots = (size_t)config->n_ranks * (size_t)medium->max_block_size;
    if (d == NULL)
        abort();
    d->config = config;
    d->medium = medium;
    d->rng = hash_u64((uint64_t)config->tier_seed + 0xd15c);
    d->files = calloc((size_t)config->n_disk_blocks, sizeof *d->files);
    if (d->files == NULL)
        abort();
    for (int32_t i = 0; i < config->n_disk_blocks; i++) {
        d->files[i].slots = calloc(n_slots, sizeof *d->files[i].slots);
        if (d->files[i].slots == NULL)
            abort();
    }
    return d;
}

void sim_disk_destroy(disk_tier *d)
{
    if (d == NULL)
        return;
    for (int32_t i = 0; i < d->config->n_disk_blocks; i++)
        free(d->files[i].slots);
    free(d->files);
    free(d);
}

/* --- files ----------------------------------------------------------------------------------------- */

static file *find_file(const disk_tier *d, uint64_t tag)
{
    for (int32_t i = 0; i < d->config->n_disk_blocks; i++) {
        if (d->files[i].tag == tag)
            return &d->files[i];
    }
    return NULL;
}

static file *oldest_file(const disk_tier *d)
{
    file *oldest = &d->files[0];
    for (int32_t i = 1; i < d->config->n_disk_blocks; i++) {
        if (d->files[i].used_at < oldest->used_at)
            oldest = &d->files[i];
    }
    return oldest;
}

bool disk_tier_lookup(const disk_tier *d, const offload_key *key)
{
    return find_file(d, offload_key_tag(key)) != NULL;
}

bool disk_tier_is_stuck(const disk_tier *d, bool is_read)
{
    (void)d, (void)is_read;
    return false;
}

void disk_tier_touch(disk_tier *d, const offload_key *keys, int32_t n_keys)
{
    for (int32_t i = n_keys - 1; i >= 0; i--) {
        file *f = find_file(d, offload_key_tag(&keys[i]));
        if (f != NULL)
            f->used_at = d->now;
    }
}

/* --- jobs ------------------------------------------------------------------------------------------ */

static bool add_job(disk_tier *d, const offload_key *key, int32_t medium_block, uint64_t cookie,
                    bool is_read)
{
    int32_t n_same = 0;
    uint64_t tag = offload_key_tag(key);
    for (int32_t i = 0; i < d->n_jobs; i++) {
        n_same += !d->jobs[i].is_removal && d->jobs[i].is_read == is_read;
        PGD_ASSERTF(!d->jobs[i].is_removal || d->jobs[i].tag != tag,
                    "a %s of a block that is being removed", is_read ? "read" : "write");
    }
    if (n_same == MAX_JOBS || d->now < d->rests_until[is_read])
        return false;
    uint64_t longest = draw(d) % 4 == 0 ? (uint64_t)d->config->tier_delay : 4;
    uint64_t n_moments = draw(d) % (longest + 1);
    d->jobs[d->n_jobs++] = (job){.number = ++d->n_taken,
                                 .cookie = cookie,
                                 .tag = tag,
                                 .copies_at = d->now + draw(d) % (n_moments + 1),
                                 .ends_at = d->now + n_moments,
                                 .medium_block = medium_block,
                                 .is_read = is_read,
                                 .ok = (int32_t)(draw(d) % 100) >= d->config->tier_faults};
    sim_medium_claim(d->medium, is_read ? SIM_USER_DISK_READ : SIM_USER_DISK_WRITE, medium_block,
                     tag);
    return true;
}

bool disk_tier_write(disk_tier *d, const offload_key *key, int32_t medium_block, uint64_t cookie)
{
    return add_job(d, key, medium_block, cookie, false);
}

bool disk_tier_read(disk_tier *d, const offload_key *key, int32_t medium_block, uint64_t cookie)
{
    return add_job(d, key, medium_block, cookie, true);
}

bool disk_tier_remove(disk_tier *d, const offload_key *key, uint64_t cookie)
{
    int32_t n_same = 0;
    for (int32_t i = 0; i < d->n_jobs; i++)
        n_same += d->jobs[i].is_removal;
    if (n_same == MAX_REMOVALS)
        return false;
    uint64_t n_moments = draw(d) % 8;
    d->jobs[d->n_jobs++] = (job){.number = ++d->n_taken,
                                 .cookie = cookie,
                                 .tag = offload_key_tag(key),
                                 .copies_at = d->now + n_moments,
                                 .ends_at = d->now + n_moments + draw(d) % 2,
                                 .is_removal = true,
                                 .ok = (int32_t)(draw(d) % 100) >= d->config->tier_faults};
    return true;
}

void disk_tier_clear(disk_tier *d)
{
    PGD_ASSERTF(d->n_jobs == 0, "%d jobs are out", d->n_jobs);
    for (int32_t i = 0; i < d->config->n_disk_blocks; i++)
        d->files[i].tag = 0;
}

/* Of the same key, in the queue of writes. */
static bool is_behind_another(const disk_tier *d, const job *j)
{
    for (int32_t i = 0; i < d->n_jobs; i++) {
        const job *other = &d->jobs[i];
        if (!other->is_copied && !other->is_read && !j->is_read && other->tag == j->tag &&
            other->number < j->number)
            return true;
    }
    return false;
}

static void copy(disk_tier *d, job *j)
{
    file *f = find_file(d, j->tag);
    j->is_copied = true;
    if (j->is_removal) {
        if (f != NULL && j->ok)
            f->tag = 0;
        return;
    }
    if (!j->is_read && f == NULL && j->ok) {
        f = oldest_file(d);
        d->stats.n_evicted += f->tag != 0;
        f->tag = j->tag;
        f->used_at = d->now;
        for (int32_t rank = 0; rank < d->config->n_ranks; rank++)
            j->ok = sim_medium_read(f->slots + rank * d->medium->max_block_size, d->medium,
                                    j->medium_block, rank, j->tag) &&
                    j->ok;
        if (!j->ok)
            f->tag = 0;
    }
    if (!j->is_read)
        return;
    j->ok = j->ok && f != NULL;
    for (int32_t rank = 0; rank < d->config->n_ranks; rank++) {
        if (j->ok)
            sim_medium_write(d->medium, j->medium_block, rank, j->tag,
                             f->slots + rank * d->medium->max_block_size);
        else
            sim_medium_tear(d->medium, j->medium_block, rank, draw(d));
    }
}

void sim_disk_tick(disk_tier *d)
{
    d->now++;
    for (int32_t i = 0; i < d->n_jobs; i++) {
        if (!d->jobs[i].is_copied && d->jobs[i].copies_at <= d->now &&
            !is_behind_another(d, &d->jobs[i]))
            copy(d, &d->jobs[i]);
    }
    if (draw(d) % 256 == 0)
        d->files[draw(d) % (uint64_t)d->config->n_disk_blocks].tag = 0;
}

bool disk_tier_next_done(disk_tier *d, disk_tier_done *out)
{
    for (int32_t i = 0; i < d->n_jobs; i++) {
        job *j = &d->jobs[i];
        if (!j->is_copied || j->ends_at > d->now)
            continue;
        *out = (disk_tier_done){.cookie = j->cookie,
                                .n_bytes = j->ok && !j->is_removal ? 1 : 0,
                                .is_read = j->is_read,
                                .is_removal = j->is_removal,
                                .ok = j->ok};
        if (j->is_removal) {
            *j = d->jobs[--d->n_jobs];
            return true;
        }
        for (int32_t rank = 0; rank < d->config->n_ranks; rank++)
            sim_medium_release(d->medium, j->is_read ? SIM_USER_DISK_READ : SIM_USER_DISK_WRITE,
                               j->medium_block, rank);
        if (!j->ok)
            d->rests_until[j->is_read] = d->now + draw(d) % 8;
        d->stats.n_reads += j->ok && j->is_read;
        d->stats.n_writes += j->ok && !j->is_read;
        d->stats.n_failed_reads += !j->ok && j->is_read;
        d->stats.n_failed_writes += !j->ok && !j->is_read;
        *j = d->jobs[--d->n_jobs];
        return true;
    }
    return false;
}

void disk_tier_get_stats(disk_tier_stats *out, const disk_tier *d)
{
    *out = d->stats;
}

bool sim_disk_is_busy(const disk_tier *d)
{
    return d->n_jobs > 0;
}
