/* `paged bench offload`: conversations that do not fit into the KV cache, without and with tiers
 * behind it; the whole engine without HTTP.
 *
 * Every conversation has its turn before any has its next one, so a prefix comes back when all the
 * others have passed through the device pool, which holds a fraction of them (--pool-share): without a
 * tier each turn computes everything again. A first engine of the given configuration tells how many
 * bytes a token takes. The same conversations are held with each tier, with the answers they had: the
 * tokens of all must be equal, or the figures mean nothing.
 *
 * What a tier costs when nothing hits is measured on prompts that share nothing, by two engines that
 * take turns, so that both see the same neighbours; told is the median over pairs. */
#include "engine/bench/bench_offload.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <ftw.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/mem.h"
#include "engine/bench/bench_offload_report.h"
#include "engine/bench/bench_words.h"
#include "engine/bench/latency_hist.h"
#include "engine/bench/proc_cpu.h"
#include "engine/commands.h"
#include "engine/offline.h"

typedef struct offload_opts {
    int64_t conversations;
    int64_t turns;
    int64_t prefix_len; /* tokens of a first prompt */
    int64_t turn_len;   /* tokens that each later one adds */
    int64_t output_len;
    int64_t concurrency;
    int64_t pool_share; /* all conversations / device pool */
    int64_t pairs;
    int64_t seed;
    bool json;
} offload_opts;

typedef enum tier { TIER_NONE, TIER_HOST, TIER_DISK, N_TIERS } tier;
static_assert((int)N_TIERS == BENCH_OFFLOAD_MAX_TIERS, "a row for each");

static const char *const tier_names[] = {"none", "host", "disk"};

/* One engine and what it did. */
typedef struct contest {
    config cfg;
    offline o;
    bool is_started;
    latency_hist ttft; /* of turns behind the first */
    int64_t n_prompt;  /* tokens of those turns, and of them cached */
    int64_t n_device, n_host, n_disk;
    int64_t n_tokens; /* of all requests so far, prompts and outputs */
    uint64_t wall_us; /* of the conversations; 0 = they were not held */
    double total_tok_s;
    uint64_t text; /* hash of all tokens */
} contest;

typedef struct conversation {
    struct bench *bench;
    token_id *tokens; /* [max_len] */
    int32_t n_tokens;
    int32_t turn;
    bool is_running;
    uint64_t start_us;
} conversation;

typedef struct bench {
    offload_opts opts;
    config cfg; /* as the user has it */
    int64_t max_len;
    contest *now;
    conversation *talks; /* [n_talks] */
    int64_t n_talks;
    int32_t n_running;
    int is_waiting; /* 0 when one has ended since it was set */
    uint64_t last_us;
    char error_text[160];
    bool has_failed;
    contest contests[N_TIERS];
    double *ratios;     /* [pairs] time with the tier / without */
    double *cpu_ratios; /* [pairs] the same of CPU time */
    double *rates[TIER_HOST + 1];
    char dir[CONFIG_PATH_BYTES]; /* "" = none made */
} bench;

/* --- requests --------------------------------------------------------------------------------- */

static token_id draw_token(const bench *b, uint64_t speaker, uint64_t at)
{
    uint64_t vocab = (uint64_t)engine_get_model(b->now->o.engine)->vocab_size;
    return (token_id)(hash_u64(((uint64_t)b->opts.seed << 52) ^ (speaker << 24) ^ at) % vocab);
}

static void say(conversation *talk, uint64_t speaker, int64_t n)
{
    for (int64_t i = 0; i < n; i++, talk->n_tokens++)
        talk->tokens[talk->n_tokens] = draw_token(talk->bench, speaker, (uint64_t)talk->n_tokens);
}

static void note_end(bench *b, conversation *talk, const generation *g)
{
    contest *c = b->now;
    if (g->finish != GENERATION_LENGTH) {
        b->has_failed = true;
        snprintf(b->error_text, sizeof(b->error_text), "%s",
                 g->error_text != NULL ? g->error_text : "it ended before its length");
    }
    c->n_tokens += g->n_prompt_tokens + g->n_output_tokens;
    if (talk->turn > 0) {
        latency_hist_add(&c->ttft, g->first_token_us - talk->start_us);
        c->n_prompt += g->n_prompt_tokens;
        c->n_device += g->n_cached_tokens - g->n_host_tokens - g->n_disk_tokens;
        c->n_host += g->n_host_tokens;
        c->n_disk += g->n_disk_tokens;
    }
    b->last_us = PGD_MAX(b->last_us, g->last_token_us);
    talk->turn++;
    talk->is_running = false;
    b->n_running--;
    b->is_waiting = 0;
}

static void on_chunk(void *arg, generation *g)
{
    conversation *talk = arg;
    for (int32_t i = 0; i < g->n_tokens; i++) {
        PGD_ASSERT(talk->n_tokens < talk->bench->max_len);
        talk->tokens[talk->n_tokens++] = g->tokens[i].id;
    }
    if (g->finish != GENERATION_RUNNING)
        note_end(talk->bench, talk, g);
}

static bool begin(bench *b, conversation *talk)
{
    generation_opts g = {
        .prompt = talk->tokens,
        .n_prompt_tokens = talk->n_tokens,
        .max_tokens = (int32_t)b->opts.output_len,
        .ignore_eos = true,
        .keep_tokens = true,
        .arrival_us = clock_now_us(),
        .on_chunk = on_chunk,
        .arg = talk,
    };
    generation *gen;
    engine_default_params(b->now->o.engine, &g.params);
    g.params.temperature = 0;
    talk->start_us = g.arrival_us;
    if (engine_generate(b->now->o.engine, &gen, &g) != CORE_REFUSAL_NONE) {
        fputs("paged bench: a request was refused; lower --concurrency or the lengths\n", stderr);
        return false;
    }
    talk->is_running = true;
    b->n_running++;
    return true;
}

/* Until one more request has ended. */
static bool wait_for_one(bench *b)
{
    b->is_waiting = 1;
    if (!offline_wait(&b->now->o, &b->is_waiting)) {
        fputs("paged bench: the worker could not be kept running\n", stderr);
        return false;
    }
    if (b->has_failed)
        fprintf(stderr, "paged bench: a request failed: %s\n", b->error_text);
    return !b->has_failed;
}

static bool wait_for_all(bench *b)
{
    bool ok = true;
    while (ok && b->n_running > 0)
        ok = wait_for_one(b);
    return ok;
}

/* --- measuring -------------------------------------------------------------------------------- */

static bool converse(bench *b, contest *c)
{
    const offload_opts *o = &b->opts;
    b->now = c;
    for (int64_t i = 0; i < o->conversations; i++) {
        b->talks[i].n_tokens = 0;
        b->talks[i].turn = 0;
        say(&b->talks[i], (uint64_t)i, o->prefix_len);
    }
    uint64_t start_us = clock_now_us();
    for (int64_t i = 0; i < o->conversations * o->turns; i++) {
        conversation *talk = &b->talks[i % o->conversations];
        while (b->n_running == o->concurrency || talk->is_running) {
            if (!wait_for_one(b))
                return false;
        }
        if (talk->turn > 0)
            say(talk, (uint64_t)(i % o->conversations), o->turn_len);
        if (!begin(b, talk))
            return false;
    }
    if (!wait_for_all(b))
        return false;
    c->wall_us = b->last_us - start_us;
    c->total_tok_s = (double)c->n_tokens / ((double)c->wall_us * 1e-6);
    for (int64_t i = 0; i < o->conversations; i++)
        c->text = hash_bytes(b->talks[i].tokens, (size_t)b->talks[i].n_tokens * sizeof(token_id),
                             c->text);
    return true;
}

typedef struct effort {
    uint64_t wall_us;
    uint64_t cpu_us; /* of all processes: the other engine is idle */
} effort;

static uint64_t read_cpu_us(void)
{
    proc_cpu cpu = {0};
    (void)proc_cpu_read(&cpu, getpid());
    return cpu.self_us + cpu.children_us;
}

/* Some prompts at once that share nothing with any other. */
static bool run_strangers(bench *b, contest *c, uint64_t *n_strangers, effort *out)
{
    b->now = c;
    uint64_t cpu_us = read_cpu_us();
    uint64_t start_us = clock_now_us();
    for (int64_t i = 0; i < 2 * b->opts.concurrency; i++) {
        conversation *talk = &b->talks[i];
        talk->n_tokens = 0;
        talk->turn = 0;
        say(talk, (1u << 20) + (*n_strangers)++, b->opts.prefix_len);
        if (!begin(b, talk))
            return false;
    }
    if (!wait_for_all(b))
        return false;
    *out = (effort){b->last_us - start_us, read_cpu_us() - cpu_us};
    return true;
}

static bool compare_strangers(bench *b)
{
    uint64_t n_strangers = 0;
    double n_tokens = (double)(2 * b->opts.concurrency * (b->opts.prefix_len + b->opts.output_len));
    /* The first pair warms up. */
    for (int64_t pair = -1; pair < b->opts.pairs; pair++) {
        effort e[TIER_HOST + 1];
        for (int i = 0; i <= TIER_HOST; i++) {
            tier t = (pair % 2 == 0) == (i == 0) ? TIER_NONE : TIER_HOST;
            if (!run_strangers(b, &b->contests[t], &n_strangers, &e[t]))
                return false;
        }
        if (pair < 0)
            continue;
        b->ratios[pair] = (double)e[TIER_HOST].wall_us / (double)e[TIER_NONE].wall_us;
        b->cpu_ratios[pair] = (double)e[TIER_HOST].cpu_us / PGD_MAX((double)e[TIER_NONE].cpu_us, 1);
        for (int i = 0; i <= TIER_HOST; i++)
            b->rates[i][pair] = n_tokens / ((double)e[i].wall_us * 1e-6);
    }
    return true;
}

/* --- engines ---------------------------------------------------------------------------------- */

static int start(contest *c)
{
    int status = offline_start(&c->o, &c->cfg);
    c->is_started = status == 0;
    return status;
}

static void stop(contest *c)
{
    if (c->is_started)
        offline_stop(&c->o);
    c->is_started = false;
}

static int64_t n_all_tokens(const bench *b)
{
    return b->opts.conversations * b->max_len;
}

/* Sizes the device pool and the tiers by what a token takes. */
static int make_configs(bench *b)
{
    contest *c = &b->contests[TIER_NONE];
    core_stats s;
    for (int t = 0; t < N_TIERS; t++)
        b->contests[t].cfg = b->cfg;
    c->cfg.kv_offload_memory = 0;
    c->cfg.kv_offload_disk = 0;
    c->cfg.kv_offload_dir[0] = '\0';
    int status = start(c);
    if (status != 0)
        return status;
    engine_get_stats(c->o.engine, &s);
    stop(c);
    double token_bytes = (double)s.kv_bytes / (s.n_full_length * s.max_model_len);
    double all_bytes = token_bytes * (double)n_all_tokens(b);
    if (b->cfg.kv_cache_memory == 0 && b->cfg.num_kv_blocks == 0) {
        for (int t = 0; t < N_TIERS; t++)
            b->contests[t].cfg.kv_cache_memory = (int64_t)(all_bytes / (double)b->opts.pool_share);
    }
    config *host = &b->contests[TIER_HOST].cfg;
    if (host->kv_offload_memory == 0 || host->kv_offload_dir[0] != '\0')
        host->kv_offload_memory = (int64_t)(all_bytes * 1.25);
    host->kv_offload_disk = 0;
    host->kv_offload_dir[0] = '\0';
    config *disk = &b->contests[TIER_DISK].cfg;
    snprintf(disk->kv_offload_dir, sizeof(disk->kv_offload_dir), "%s", b->dir);
    return 0;
}

/* --- the whole -------------------------------------------------------------------------------- */

static bench_offload_row make_row(const contest *c, const char *name)
{
    double n_prompt = PGD_MAX((double)c->n_prompt, 1);
    return (bench_offload_row){.tier = name,
                               .ttft_median_ms = latency_hist_quantile(&c->ttft, 0.5) * 1e-3,
                               .ttft_p99_ms = latency_hist_quantile(&c->ttft, 0.99) * 1e-3,
                               .total_tok_s = c->total_tok_s,
                               .device = (double)c->n_device / n_prompt,
                               .host = (double)c->n_host / n_prompt,
                               .disk = (double)c->n_disk / n_prompt};
}

static void report(bench *b)
{
    const offload_opts *o = &b->opts;
    engine *e = b->contests[TIER_NONE].o.engine;
    core_stats s;
    engine_get_stats(e, &s);
    bench_offload_report r = {.model = engine_model_name(e),
                              .device = s.device_name,
                              .conversations = o->conversations,
                              .turns = o->turns,
                              .concurrency = o->concurrency,
                              .prefix_len = o->prefix_len,
                              .turn_len = o->turn_len,
                              .output_len = o->output_len,
                              .all_tokens = n_all_tokens(b),
                              .pool_tokens = s.n_full_length * s.max_model_len,
                              .pairs = o->pairs};
    for (int t = 0; t < N_TIERS; t++) {
        if (b->contests[t].wall_us > 0)
            r.rows[r.n_rows++] = make_row(&b->contests[t], tier_names[t]);
    }
    if (o->pairs > 0) {
        r.no_hit_none_tok_s = bench_median(b->rates[TIER_NONE], o->pairs);
        r.no_hit_host_tok_s = bench_median(b->rates[TIER_HOST], o->pairs);
        r.overhead = bench_median(b->ratios, o->pairs) - 1;
        r.cpu_overhead = bench_median(b->cpu_ratios, o->pairs) - 1;
    }
    if (o->json)
        bench_offload_report_json(&r);
    else
        bench_offload_report_text(&r);
}

static int run_all(bench *b)
{
    const contest *none = &b->contests[TIER_NONE];
    contest *disk = &b->contests[TIER_DISK];
    int status = make_configs(b);
    for (tier t = TIER_NONE; t <= TIER_HOST && status == 0; t++) {
        status = start(&b->contests[t]);
        if (status == 0 && !converse(b, &b->contests[t]))
            status = EXIT_STATUS_WORKER;
    }
    if (status == 0 && b->opts.pairs > 0 && !compare_strangers(b))
        status = EXIT_STATUS_WORKER;
    if (status == 0 && b->dir[0] != '\0') {
        status = start(disk);
        if (status == 0 && !converse(b, disk))
            status = EXIT_STATUS_WORKER;
    }
    for (int t = 0; t < N_TIERS && status == 0; t++) {
        if (b->contests[t].wall_us > 0 && b->contests[t].text != none->text) {
            fprintf(stderr, "paged bench: with tier %s the answers are others\n", tier_names[t]);
            status = EXIT_STATUS_SYSTEM;
        }
    }
    if (status == 0)
        report(b);
    return status;
}

/* --- the command ------------------------------------------------------------------------------ */

void bench_offload_help(FILE *out)
{
    fputs(
        "usage: paged bench offload --model PATH [options]\n\n"
        "Conversations that exceed the KV cache, without a tier behind it and with a host tier "
        "that holds all of them,\nor --kv-offload-memory. With --kv-offload-dir also with the "
        "host and disk tier of the options, in a directory of\nits own there, which is removed "
        "again.\n\n"
        "  --conversations N         Default 32.\n"
        "  --turns N                 Of each conversation, at least 2. Default 3.\n"
        "  --prefix-len N            Tokens of a first prompt. Default 1024.\n"
        "  --turn-len N              Tokens that each turn adds. Default 32.\n"
        "  --output-len N            Tokens to generate each turn. Default 32.\n"
        "  --concurrency N           Requests at a time. Default 2.\n"
        "  --pool-share N            How many times the conversations exceed the KV cache, unless "
        "--kv-cache-memory is given. Default 12.\n"
        "  --pairs N                 Runs of prompts that hit nothing, with and without the host "
        "tier. Default 9.\n"
        "  --seed N                  Same seed, same prompts. Default 1.\n"
        "  --json                    One JSON object instead of text.\n",
        out);
}

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

static pgd_err create_arrays(bench *b)
{
    const offload_opts *o = &b->opts;
    b->max_len = o->prefix_len + (o->turns - 1) * (o->turn_len + o->output_len) + o->output_len;
    b->n_talks = PGD_MAX(o->conversations, 2 * o->concurrency);
    b->talks = mem_calloc((size_t)b->n_talks, sizeof(*b->talks));
    b->ratios = mem_calloc((size_t)o->pairs + 1, sizeof(double));
    b->cpu_ratios = mem_calloc((size_t)o->pairs + 1, sizeof(double));
    for (int t = 0; t <= TIER_HOST; t++)
        b->rates[t] = mem_calloc((size_t)o->pairs + 1, sizeof(double));
    if (b->talks == NULL || b->ratios == NULL || b->cpu_ratios == NULL || b->rates[0] == NULL ||
        b->rates[1] == NULL)
        return PGD_ENOMEM;
    for (int64_t i = 0; i < b->n_talks; i++) {
        b->talks[i].bench = b;
        b->talks[i].tokens = mem_calloc((size_t)b->max_len, sizeof(token_id));
        if (b->talks[i].tokens == NULL)
            return PGD_ENOMEM;
    }
    for (int t = 0; t < N_TIERS; t++) {
        if (latency_hist_init(&b->contests[t].ttft) != PGD_OK)
            return PGD_ENOMEM;
    }
    return PGD_OK;
}

static void free_arrays(bench *b)
{
    for (int64_t i = 0; b->talks != NULL && i < b->n_talks; i++)
        mem_free(b->talks[i].tokens);
    for (int t = 0; t < N_TIERS; t++)
        latency_hist_deinit(&b->contests[t].ttft);
    for (int t = 0; t <= TIER_HOST; t++)
        mem_free(b->rates[t]);
    mem_free(b->ratios);
    mem_free(b->cpu_ratios);
    mem_free(b->talks);
}

/* Whether the device pool has room for what runs at a time: in whole blocks, and one that nobody gets. */
static bool check_pool(const bench *b)
{
    int64_t n_wanted = b->opts.concurrency * (b->max_len + 2 * b->cfg.block_size);
    int64_t n_pool = n_all_tokens(b) / b->opts.pool_share;
    if (b->cfg.kv_cache_memory != 0 || b->cfg.num_kv_blocks != 0 || n_pool >= n_wanted)
        return true;
    fprintf(stderr,
            "paged bench: 1/%" PRId64 " of the conversations: expected at least the %" PRId64
            " tokens that run at a time, got %" PRId64 "; give more --conversations or less "
            "--concurrency\n",
            b->opts.pool_share, n_wanted, n_pool);
    return false;
}

static int run(bench *b)
{
    if (create_arrays(b) != PGD_OK) {
        fputs("paged bench: out of memory\n", stderr);
        return EXIT_STATUS_SYSTEM;
    }
    if (!check_pool(b))
        return EXIT_STATUS_USAGE;
    b->cfg.max_model_len = b->max_len + 1;
    b->cfg.kv_offload_persist = false;
    b->cfg.max_queued_requests = PGD_MAX(b->cfg.max_queued_requests, 2 * b->opts.concurrency);
    if (b->cfg.kv_offload_dir[0] != '\0') {
        int n = snprintf(b->dir, sizeof(b->dir), "%s/paged-bench-XXXXXX", b->cfg.kv_offload_dir);
        if (n >= (int)sizeof(b->dir) || mkdtemp(b->dir) == NULL) {
            fprintf(stderr, "paged bench: cannot make a directory in %s\n", b->cfg.kv_offload_dir);
            b->dir[0] = '\0';
            return EXIT_STATUS_SYSTEM;
        }
    }
    return run_all(b);
}

int bench_offload_main(int argc, char **argv)
{
    static const char *const extra[] = {
        "conversations=", "turns=", "prefix-len=", "turn-len=", "output-len=", "concurrency=",
        "pool-share=",    "pairs=", "seed=",       "json",      NULL};
    static const bench_word rows[] = {
        {"--conversations", offsetof(offload_opts, conversations), 1, 100000},
        {"--turns", offsetof(offload_opts, turns), 2, 1000},
        {"--prefix-len", offsetof(offload_opts, prefix_len), 1, 1 << 22},
        {"--turn-len", offsetof(offload_opts, turn_len), 1, 1 << 20},
        {"--output-len", offsetof(offload_opts, output_len), 1, 1 << 20},
        {"--concurrency", offsetof(offload_opts, concurrency), 1, 4096},
        {"--pool-share", offsetof(offload_opts, pool_share), 1, 10000},
        {"--pairs", offsetof(offload_opts, pairs), 0, 1000},
        {"--seed", offsetof(offload_opts, seed), 0, 4095},
    };
    bench b = {.opts = {.conversations = 32,
                        .turns = 3,
                        .prefix_len = 1024,
                        .turn_len = 32,
                        .output_len = 32,
                        .concurrency = 2,
                        .pool_share = 12,
                        .pairs = 9,
                        .seed = 1}};
    char *words[200];
    int n_words = 0;
    if (argc > (int)PGD_ARRAY_LEN(words) ||
        !command_load_config(&b.cfg, argc, argv, extra, words, &n_words) ||
        !bench_words_parse(&b.opts, &b.opts.json, rows, PGD_ARRAY_LEN(rows), words, n_words))
        return EXIT_STATUS_USAGE;
    command_quiet_log(&b.cfg);
    int status = run(&b);
    for (int t = 0; t < N_TIERS; t++)
        stop(&b.contests[t]);
    if (b.dir[0] != '\0')
        (void)nftw(b.dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    free_arrays(&b);
    return status;
}
