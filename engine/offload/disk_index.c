/* Chained hashing over a fixed array of entries. Writers hold the lock; the core thread walks the
 * chains without it, so every word it reads is atomic.
 *
 * An entry leaves its chain by one store to the link before it. A walker that stands on it then
 * strays, into the free entries or another chain: `n_moved` is counted up before a link of an entry
 * changes, and a walker that found nothing and sees the count moved walks again (a few times: a
 * false miss costs a recomputation, and gives no wrong answer). A key is
 * six words, read one by one: a mixture of two keys that equals a third has the odds of a hash
 * collision, and would still be caught by the header of the file.
 *
 * Which files are oldest is found by a walk over all entries, for many at a time: cheaper than a
 * list kept in order when most stamps come from touches by a thread that must not lock. */
#include "engine/offload/disk_index.h"

#include <stdatomic.h>
#include <string.h>

#include <pthread.h>

#include "common/mem.h"

#define NONE        0u /* links are entry numbers from 1: zeroed memory is an empty index */
#define KEY_WORDS   6  /* hash, group, model */
#define MAX_RETRIES 8

typedef struct entry {
    _Atomic uint64_t key[KEY_WORDS];
    _Atomic uint64_t stamp_us; /* 0 = not in use */
    uint64_t saved_us;         /* this and seen_in: guarded by m */
    _Atomic uint32_t next;     /* in its chain, or among the free ones */
    uint32_t seen_in;          /* the last sweep that named it */
} entry;

struct disk_index {
    pthread_mutex_t m;
    uint64_t model;
    uint32_t max_files;
    _Atomic uint32_t n_used_once; /* the entries behind were never used; written under m */
    uint32_t free;                /* guarded by m, as the next one */
    uint32_t sweep;
    uint32_t bucket_mask;
    atomic_int n_own, n_foreign;
    _Atomic uint64_t n_moved;
    _Atomic uint32_t *buckets;
    entry *entries; /* [max_files + 1], the first is not used */
};

typedef struct key_words {
    uint64_t w[KEY_WORDS];
} key_words;

static key_words words_of(const disk_block_id *id)
{
    key_words k;
    memcpy(k.w, id->key.hash.bytes, HASH_SHA256_BYTES);
    k.w[4] = (uint32_t)id->key.group_id;
    k.w[5] = id->model;
    return k;
}

static void id_of(disk_block_id *out, const entry *e)
{
    uint64_t w[KEY_WORDS];
    for (int i = 0; i < KEY_WORDS; i++)
        w[i] = atomic_load_explicit(&e->key[i], memory_order_acquire);
    memcpy(out->key.hash.bytes, w, HASH_SHA256_BYTES);
    out->key.group_id = (int32_t)(uint32_t)w[4];
    out->model = w[5];
}

static _Atomic uint32_t *bucket_of(const disk_index *x, const key_words *k)
{
    return &x->buckets[hash_u64(k->w[0] ^ k->w[5] ^ k->w[4] << 32) & x->bucket_mask];
}

static bool is_key(const entry *e, const key_words *k)
{
    for (int i = 0; i < KEY_WORDS; i++)
        if (atomic_load_explicit(&e->key[i], memory_order_relaxed) != k->w[i])
            return false;
    return true;
}

pgd_err disk_index_create(disk_index **out, int32_t max_files, uint64_t model)
{
    size_t n_buckets = 1;
    if (max_files < 1 || max_files > 1 << 30)
        return PGD_EINVAL;
    while (n_buckets < (size_t)max_files)
        n_buckets *= 2;
    disk_index *x = mem_calloc(1, sizeof(*x));
    if (x == NULL)
        return PGD_ENOMEM;
    pthread_mutex_init(&x->m, NULL);
    x->buckets = mem_calloc(n_buckets, sizeof(*x->buckets));
    x->entries = mem_calloc((size_t)max_files + 1, sizeof(*x->entries));
    if (x->buckets == NULL || x->entries == NULL) {
        disk_index_destroy(x);
        return PGD_ENOMEM;
    }
    x->model = model;
    x->max_files = (uint32_t)max_files;
    x->bucket_mask = (uint32_t)(n_buckets - 1);
    *out = x;
    return PGD_OK;
}

void disk_index_destroy(disk_index *x)
{
    if (x == NULL)
        return;
    pthread_mutex_destroy(&x->m);
    mem_free(x->buckets);
    mem_free(x->entries);
    mem_free(x);
}

/* May miss what is there when *has_strayed. */
static uint32_t walk(const disk_index *x, const key_words *k, bool *has_strayed)
{
    uint64_t n_moved = atomic_load_explicit(&x->n_moved, memory_order_acquire);
    uint32_t at = atomic_load_explicit(bucket_of(x, k), memory_order_acquire);
    for (uint32_t n = 0; at != NONE && n < x->max_files; n++) {
        if (is_key(&x->entries[at], k))
            return at;
        at = atomic_load_explicit(&x->entries[at].next, memory_order_acquire);
    }
    *has_strayed = atomic_load_explicit(&x->n_moved, memory_order_acquire) != n_moved;
    return NONE;
}

static uint32_t find(const disk_index *x, const disk_block_id *id)
{
    key_words k = words_of(id);
    bool has_strayed = true;
    uint32_t at = NONE;
    for (int i = 0; at == NONE && has_strayed && i < MAX_RETRIES; i++)
        at = walk(x, &k, &has_strayed);
    return at;
}

bool disk_index_find(const disk_index *x, const disk_block_id *id)
{
    return find(x, id) != NONE;
}

static void raise(entry *e, uint64_t stamp_us)
{
    uint64_t old = atomic_load_explicit(&e->stamp_us, memory_order_relaxed);
    while (old != 0 && old < stamp_us &&
           !atomic_compare_exchange_weak_explicit(&e->stamp_us, &old, stamp_us,
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
}

void disk_index_touch(disk_index *x, const disk_block_id *id, uint64_t stamp_us)
{
    uint32_t at = find(x, id);
    if (at != NONE)
        raise(&x->entries[at], stamp_us);
}

/* False: it is not in use. An entry that is given to another file meanwhile is read again; n_moved
 * counts up before its key changes. */
static bool read_entry(disk_block_id *out, const disk_index *x, const entry *e)
{
    uint64_t n_moved = atomic_load_explicit(&x->n_moved, memory_order_acquire);
    for (int i = 0;; i++) {
        if (atomic_load_explicit(&e->stamp_us, memory_order_acquire) == 0)
            return false;
        id_of(out, e);
        uint64_t now = atomic_load_explicit(&x->n_moved, memory_order_acquire);
        if (now == n_moved || i == MAX_RETRIES)
            return true;
        n_moved = now;
    }
}

int32_t disk_index_list(offload_key *out, const disk_index *x, int32_t max_keys, int32_t *cursor)
{
    int32_t n_used = (int32_t)atomic_load_explicit(&x->n_used_once, memory_order_acquire);
    int32_t end = PGD_MIN(*cursor + max_keys, n_used);
    int32_t n_keys = 0;
    for (int32_t i = *cursor; i < end; i++) {
        disk_block_id id;
        if (read_entry(&id, x, &x->entries[i + 1]) && id.model == x->model)
            out[n_keys++] = id.key;
    }
    *cursor = end < n_used ? end : -1;
    return n_keys;
}

uint64_t disk_index_version(const disk_index *x)
{
    uint64_t n_used = atomic_load_explicit(&x->n_used_once, memory_order_acquire);
    return (n_used << 32) + atomic_load_explicit(&x->n_moved, memory_order_acquire);
}

/* NONE when there is none. */
static uint32_t take_entry(disk_index *x)
{
    uint32_t at = x->free;
    if (at != NONE) {
        x->free = atomic_load_explicit(&x->entries[at].next, memory_order_relaxed);
        atomic_fetch_add_explicit(&x->n_moved, 1, memory_order_release);
    } else if (x->n_used_once < x->max_files) {
        at = ++x->n_used_once;
    }
    return at;
}

static void count(disk_index *x, uint64_t model, int by)
{
    atomic_fetch_add_explicit(model == x->model ? &x->n_own : &x->n_foreign, by,
                              memory_order_relaxed);
}

bool disk_index_put(disk_index *x, const disk_index_file *file, uint64_t saved_us)
{
    key_words k = words_of(&file->id);
    uint64_t stamp_us = PGD_MAX(file->stamp_us, 1);
    pthread_mutex_lock(&x->m);
    uint32_t at = find(x, &file->id);
    if (at != NONE) {
        raise(&x->entries[at], stamp_us);
    } else if ((at = take_entry(x)) != NONE) {
        entry *e = &x->entries[at];
        _Atomic uint32_t *bucket = bucket_of(x, &k);
        /* Released one by one, so that who sees any of the new words sees n_moved moved. */
        for (int i = 0; i < KEY_WORDS; i++)
            atomic_store_explicit(&e->key[i], k.w[i], memory_order_release);
        atomic_store_explicit(&e->stamp_us, stamp_us, memory_order_release);
        e->saved_us = saved_us;
        atomic_store_explicit(&e->next, atomic_load_explicit(bucket, memory_order_relaxed),
                              memory_order_release);
        atomic_store_explicit(bucket, at, memory_order_release);
        count(x, file->id.model, 1);
    }
    if (at != NONE)
        x->entries[at].seen_in = x->sweep;
    pthread_mutex_unlock(&x->m);
    return at != NONE;
}

/* The link that leads to it, in the chain of its bucket; NULL when it is not there. */
static _Atomic uint32_t *link_to(disk_index *x, const key_words *k)
{
    _Atomic uint32_t *link = bucket_of(x, k);
    for (;;) {
        uint32_t at = atomic_load_explicit(link, memory_order_relaxed);
        if (at == NONE)
            return NULL;
        if (is_key(&x->entries[at], k))
            return link;
        link = &x->entries[at].next;
    }
}

static bool remove_locked(disk_index *x, const disk_block_id *id)
{
    key_words k = words_of(id);
    _Atomic uint32_t *link = link_to(x, &k);
    if (link == NULL)
        return false;
    uint32_t at = atomic_load_explicit(link, memory_order_relaxed);
    entry *e = &x->entries[at];
    atomic_store_explicit(link, atomic_load_explicit(&e->next, memory_order_relaxed),
                          memory_order_release);
    atomic_store_explicit(&e->stamp_us, 0, memory_order_relaxed);
    /* Its link now leads to the next free one: a walker strays, and must know. */
    atomic_fetch_add_explicit(&x->n_moved, 1, memory_order_release);
    atomic_store_explicit(&e->next, x->free, memory_order_release);
    x->free = at;
    count(x, id->model, -1);
    return true;
}

bool disk_index_remove(disk_index *x, const disk_block_id *id)
{
    pthread_mutex_lock(&x->m);
    bool is_there = remove_locked(x, id);
    pthread_mutex_unlock(&x->m);
    return is_there;
}

uint64_t disk_index_stamp(disk_index *x, const disk_block_id *id)
{
    pthread_mutex_lock(&x->m);
    uint32_t at = find(x, id);
    uint64_t stamp_us =
        at != NONE ? atomic_load_explicit(&x->entries[at].stamp_us, memory_order_relaxed) : 0;
    pthread_mutex_unlock(&x->m);
    return stamp_us;
}

static bool is_used(const entry *e)
{
    return atomic_load_explicit(&e->stamp_us, memory_order_relaxed) != 0;
}

void disk_index_begin_sweep(disk_index *x)
{
    pthread_mutex_lock(&x->m);
    x->sweep++;
    pthread_mutex_unlock(&x->m);
}

void disk_index_end_sweep(disk_index *x)
{
    pthread_mutex_lock(&x->m);
    for (uint32_t i = 1; i <= x->n_used_once; i++) {
        entry *e = &x->entries[i];
        if (is_used(e) && e->seen_in != x->sweep) {
            disk_block_id id;
            id_of(&id, e);
            (void)remove_locked(x, &id);
        }
    }
    pthread_mutex_unlock(&x->m);
}

void disk_index_reset(disk_index *x)
{
    disk_index_begin_sweep(x);
    disk_index_end_sweep(x);
}

/* Living models, whose files go later than all others. */
typedef struct live_set {
    const uint64_t *models;
    int32_t n;
} live_set;

static bool is_live(const live_set *live, uint64_t model)
{
    for (int32_t i = 0; i < live->n; i++)
        if (live->models[i] == model)
            return true;
    return false;
}

static bool goes_before(const disk_index_file *a, const disk_index_file *b, const live_set *live)
{
    bool a_is_live = is_live(live, a->id.model);
    if (a_is_live != is_live(live, b->id.model))
        return !a_is_live;
    return a->stamp_us < b->stamp_us;
}

/* Lets heap[at] sink until each parent goes after its children. */
static void sink(disk_index_file *heap, int32_t n, int32_t at, const live_set *live)
{
    for (int32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && goes_before(&heap[child], &heap[child + 1], live))
            child++;
        if (!goes_before(&heap[at], &heap[child], live))
            return;
        disk_index_file file = heap[at];
        heap[at] = heap[child];
        heap[child] = file;
    }
}

/* The heap's root, which goes last of all in it, makes room for one that goes earlier. */
static int32_t offer(disk_index_file *heap, int32_t n_heap, int32_t n, const disk_index_file *file,
                     const live_set *live)
{
    if (n_heap < n) {
        heap[n_heap++] = *file;
        if (n_heap == n)
            for (int32_t i = n / 2 - 1; i >= 0; i--)
                sink(heap, n, i, live);
    } else if (goes_before(file, &heap[0], live)) {
        heap[0] = *file;
        sink(heap, n, 0, live);
    }
    return n_heap;
}

static void sort(disk_index_file *heap, int32_t n, const live_set *live)
{
    for (int32_t i = n / 2 - 1; i >= 0; i--)
        sink(heap, n, i, live);
    for (int32_t end = n - 1; end > 0; end--) {
        disk_index_file last = heap[0];
        heap[0] = heap[end];
        heap[end] = last;
        sink(heap, end, 0, live);
    }
}

static void file_of(disk_index_file *out, const entry *e)
{
    id_of(&out->id, e);
    out->stamp_us = atomic_load_explicit(&e->stamp_us, memory_order_relaxed);
}

int32_t disk_index_oldest(disk_index_file *out, disk_index *x, int32_t n, const uint64_t *live,
                          int32_t n_live)
{
    live_set set = {live, n_live};
    int32_t n_out = 0;
    pthread_mutex_lock(&x->m);
    for (uint32_t i = 1; i <= x->n_used_once; i++) {
        disk_index_file file;
        if (!is_used(&x->entries[i]))
            continue;
        file_of(&file, &x->entries[i]);
        n_out = offer(out, n_out, n, &file, &set);
    }
    pthread_mutex_unlock(&x->m);
    sort(out, n_out, &set);
    return n_out;
}

int32_t disk_index_unsaved(disk_index_file *out, disk_index *x, int32_t n, uint64_t by_us,
                           int32_t *pos)
{
    int32_t n_out = 0;
    pthread_mutex_lock(&x->m);
    uint32_t at = (uint32_t)*pos;
    for (uint32_t i = 0; i < x->n_used_once && n_out < n; i++) {
        at = at < x->n_used_once ? at + 1 : 1;
        entry *e = &x->entries[at];
        file_of(&out[n_out], e);
        if (out[n_out].stamp_us > e->saved_us + by_us) {
            e->saved_us = out[n_out].stamp_us;
            n_out++;
        }
    }
    *pos = (int32_t)at;
    pthread_mutex_unlock(&x->m);
    return n_out;
}

int32_t disk_index_n_own(const disk_index *x)
{
    return atomic_load_explicit(&x->n_own, memory_order_relaxed);
}

int32_t disk_index_n_foreign(const disk_index *x)
{
    return atomic_load_explicit(&x->n_foreign, memory_order_relaxed);
}
