/* Wiring: model file, tokenizer, core loop, and the table of live generations. The core thread
 * wakes the loop through one uv_async (wake-ups coalesce). Events are applied, which is cheap, far
 * ahead of the chunks that are delivered, which is not: a generation that has to wait for a later
 * turn gathers the tokens that come meanwhile, so that under load chunks grow and delays do not. */
#include "engine/engine.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include <sys/random.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/hash_map.h"
#include "common/log.h"
#include "common/mem.h"
#include "engine/hash_seed.h"
#include "engine/kv/block_hash.h"
#include "engine/paths.h"
#include "engine/sd_notify.h"

/* In one turn of the loop: */
#define MAX_TURN_VALUES 4096 /* tokens and logprobs applied, and as many delivered */
#define MAX_TURN_CHUNKS 256  /* delivered */

struct engine {
    uv_loop_t *loop;
    config cfg;
    model_file *model;
    tokenizer *tok;
    core_loop *core;
    uv_async_t wake;
    bool wake_open;
    hash_map *generations; /* id → generation */
    list_node dirty;
    uint64_t next_id;
    uint8_t hash_seed[HASH_SHA256_BYTES];
    uint8_t fingerprint[HASH_SHA256_BYTES]; /* of the model, for a worker that we do not start */
    block_hasher *hasher;
    int32_t max_source; /* engine_max_source */
    char model_path[CONFIG_PATH_BYTES];
    char model_name[256];
    engine_metrics metrics;
    void (*on_state)(void *arg, core_state state);
    void *on_state_arg;
    engine_cache_reset_fn on_cache_reset; /* NULL: none is under way */
    void *on_cache_reset_arg;
};

/* --- events ----------------------------------------------------------------------------------- */

/* A client that left may find its request finished already: it counts as what it was. */
static generation_finish counted_finish(const generation *g, const core_event *event)
{
    if (!g->is_cancelled)
        return g->finish;
    switch (event->status) {
    case REQUEST_FINISHED_STOPPED:
        return GENERATION_STOP;
    case REQUEST_FINISHED_LENGTH_CAPPED:
        return GENERATION_LENGTH;
    case REQUEST_FINISHED_ERROR:
        return GENERATION_ERROR;
    default:
        return GENERATION_ABORT;
    }
}

static void mark_dirty(engine *e, generation *g)
{
    if (!g->is_dirty && !g->is_held) {
        g->is_dirty = true;
        list_append(&e->dirty, &g->dirty_node);
    }
}

static void tell_cache_reset(engine *e, core_reset outcome)
{
    engine_cache_reset_fn fn = e->on_cache_reset;
    e->on_cache_reset = NULL;
    if (fn != NULL)
        fn(e->on_cache_reset_arg, outcome);
}

static void apply_event(engine *e, const core_event *event)
{
    uintptr_t value;
    if (event->kind == CORE_EVENT_STATE) {
        if (e->on_state != NULL)
            e->on_state(e->on_state_arg, event->state);
        return;
    }
    if (event->kind == CORE_EVENT_CACHE_RESET) {
        tell_cache_reset(e, event->reset);
        return;
    }
    if (!hash_map_get(e->generations, event->request_id, &value)) {
        mem_free(event->prompt_logprobs);
        return; /* told its end already */
    }
    generation *g = (generation *)value;
    bool ended = event->kind == CORE_EVENT_FINISHED;
    if (g->is_cancelled) {
        mem_free(event->prompt_logprobs);
    } else {
        if (!ended)
            engine_metrics_note_token(&e->metrics, g, event);
        bool by_stop_string = generation_apply(g, event);
        if (by_stop_string && !ended) {
            core_loop_end_at_stop(e->core, g->id);
            ended = true; /* its later events find no entry */
        }
        mark_dirty(e, g);
    }
    if (ended) {
        engine_metrics_note_end(&e->metrics, g, event, counted_finish(g, event));
        hash_map_remove(e->generations, event->request_id);
        if (g->is_cancelled)
            generation_destroy(g);
    }
}

static void deliver(engine *e, int max_chunks, int max_values)
{
    int n_values = 0;
    for (int n = 0; n < max_chunks && n_values < max_values && !list_is_empty(&e->dirty); n++) {
        list_node *node = e->dirty.next;
        generation *g = LIST_ENTRY(node, generation, dirty_node);
        list_remove(node);
        g->is_dirty = false;
        if (g->text.failed && g->finish == GENERATION_RUNNING) {
            engine_cancel(e, g);
            g->finish = GENERATION_ERROR;
        }
        bool ended = g->finish != GENERATION_RUNNING;
        g->is_delivering = true;
        if (ended || g->text.n_bytes > 0 || g->n_tokens > 0)
            g->on_chunk(g->arg, g);
        g->is_delivering = false;
        if (g->is_held)
            continue;
        if (g->n_tokens > 0)
            n_values += g->n_tokens * (1 + g->tokens[0].n_logprobs);
        strbuf_reset(&g->text);
        g->n_tokens = 0;
        if (ended && !hash_map_get(e->generations, g->id, NULL))
            generation_destroy(g);
    }
}

static void on_wake(uv_async_t *async)
{
    engine *e = async->data;
    core_event event;
    int n_values = 0;
    while (n_values < MAX_TURN_VALUES && core_loop_poll(e->core, &event)) {
        apply_event(e, &event);
        n_values += 1 + event.n_logprobs;
    }
    deliver(e, MAX_TURN_CHUNKS, MAX_TURN_VALUES);
    bool is_done = n_values < MAX_TURN_VALUES && list_is_empty(&e->dirty);
    if (!is_done && e->wake_open && !uv_is_closing((uv_handle_t *)&e->wake))
        uv_async_send(&e->wake);
}

static void wake_loop(void *arg)
{
    engine *e = arg;
    uv_async_send(&e->wake);
}

/* --- life ------------------------------------------------------------------------------------- */

static void derive_name(char *out, size_t cap, const char *path)
{
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/')
        len--;
    size_t start = len;
    while (start > 0 && path[start - 1] != '/')
        start--;
    snprintf(out, cap, "%.*s", (int)(len - start), path + start);
    size_t n = strlen(out);
    if (n > 5 && strcmp(out + n - 5, ".gguf") == 0)
        out[n - 5] = '\0';
}

/* "auto" never falls back silently: who has a GPU expects it to be used. */
static pgd_err check_device(const config *cfg, pgd_why *why)
{
    if (strcmp(cfg->device, "auto") == 0 && file_exists("/dev/nvidia0"))
        return pgd_fail(
            why, PGD_EUNSUPPORTED,
            "device: this machine has an NVIDIA GPU (/dev/nvidia0), but this build has no "
            "CUDA worker; say --device cpu to run on the CPU");
    return PGD_OK;
}

/* What a decoder's tokens are worth depends on the encoder's input, which no block hash knows. */
static void adapt_to_encoder(engine *e)
{
    const encdec_config *encoder = &engine_get_model(e)->encdec;
    e->max_source = encoder->max_source;
    if (e->max_source == 0)
        return;
    if (e->cfg.enable_prefix_caching)
        log_info("engine", "prefix caching is off: the model has an encoder");
    e->cfg.enable_prefix_caching = false;
    if (e->cfg.kv_offload_memory > 0)
        log_warn("engine", "no kv_offload_memory: without prefix caching it has nothing to hold");
    e->cfg.kv_offload_memory = 0;
    if (encoder->ignored[0] != '\0')
        log_info("engine", "generation_config: left out here: %s", encoder->ignored);
}

/* A value out of range in a model's file is no fault of usage. */
static pgd_err read_model(engine *e, bool is_sim, pgd_why *why)
{
    pgd_err err = model_file_open(&e->model, e->model_path, why);
    if (err == PGD_OK && !is_sim)
        err = model_file_check_runnable(e->model, why);
    if (err == PGD_OK)
        err = tokenizer_create(&e->tok, e->model, why);
    return err == PGD_EINVAL || err == PGD_ERANGE ? PGD_EFORMAT : err;
}

pgd_err engine_create(engine **out, uv_loop_t *loop, const config *cfg, pgd_why *why)
{
    engine *e = mem_calloc(1, sizeof(*e));
    if (e == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    pgd_err err = PGD_ENOMEM;
    e->loop = loop;
    e->cfg = *cfg;
    list_init(&e->dirty);
    engine_metrics_init(&e->metrics);

    bool is_sim = strcmp(cfg->device, "sim") == 0;
    snprintf(e->model_path, sizeof(e->model_path), "%s", cfg->model);
    if (e->model_path[0] == '\0' &&
        !(is_sim && paths_find_bundled_model(e->model_path, sizeof(e->model_path)))) {
        err = pgd_fail(why, PGD_EINVAL,
                       "no model: give --model PATH (a GGUF file or a Hugging Face directory); "
                       "scripts/fetch_model prints the path of a small one");
        goto fail;
    }
    err = check_device(cfg, why);
    if (err != PGD_OK)
        goto fail;
    err = read_model(e, is_sim, why);
    if (err == PGD_OK)
        err = hash_seed_load(e->hash_seed, cfg->kv_hash_seed_file, why);
    bool is_apart = cfg->worker[0] != 0 && !is_sim; /* perhaps on another host */
    if (err == PGD_OK && is_apart)
        err = model_file_fingerprint(e->model, e->fingerprint);
    if (err != PGD_OK)
        goto fail;
    if (is_sim)
        e->cfg.sim_vocab_size =
            model_file_get_config(e->model)->vocab_size; /* so that its tokens have text */
    else
        adapt_to_encoder(e);
    if (model_file_get_config(e->model)->is_text_part)
        log_info("engine", "images are not supported: only the text part of the model is served");
    if (cfg->served_model_name[0] != '\0')
        snprintf(e->model_name, sizeof(e->model_name), "%s", cfg->served_model_name);
    else
        derive_name(e->model_name, sizeof(e->model_name), e->model_path);

    err = hash_map_create(&e->generations, 0);
    if (err == PGD_OK && e->cfg.enable_prefix_caching)
        err = block_hasher_create(&e->hasher, e->hash_seed);
    if (err != PGD_OK)
        goto fail;
    uint64_t watchdog_us = sd_notify_watchdog_us();
    core_loop_opts opts = {
        .cfg = &e->cfg,
        .model = is_sim ? NULL : model_file_get_config(e->model),
        .model_path = e->model_path,
        .model_fingerprint = is_apart ? e->fingerprint : NULL,
        .hash_seed = e->hash_seed,
        .wake = wake_loop,
        .wake_arg = e,
        .beat = watchdog_us > 0 ? sd_notify_ping : NULL,
        .beat_us = watchdog_us / 2,
    };
    err = core_loop_create(&e->core, &opts, why);
    if (err != PGD_OK)
        goto fail;
    if (uv_async_init(loop, &e->wake, on_wake) != 0) {
        err = pgd_fail(why, PGD_EIO, "cannot create a wake-up handle");
        goto fail;
    }
    e->wake.data = e;
    e->wake_open = true;
    *out = e;
    return PGD_OK;
fail:
    engine_destroy(e);
    return err;
}

pgd_err engine_start(engine *e, void (*on_state)(void *arg, core_state state), void *arg,
                     pgd_why *why)
{
    e->on_state = on_state;
    e->on_state_arg = arg;
    return core_loop_start(e->core, why);
}

void engine_drain(engine *e, uint32_t drain_s)
{
    core_loop_drain(e->core, drain_s);
}

static void on_wake_closed(uv_handle_t *handle)
{
    engine *e = handle->data;
    e->wake_open = false;
}

void engine_stop(engine *e)
{
    core_loop_stop(e->core, 0);
    core_event event;
    while (core_loop_poll(e->core, &event))
        apply_event(e, &event);
    tell_cache_reset(e, CORE_RESET_HELD);
    deliver(e, INT_MAX, INT_MAX);
    if (e->wake_open && !uv_is_closing((uv_handle_t *)&e->wake))
        uv_close((uv_handle_t *)&e->wake, on_wake_closed);
}

void engine_destroy(engine *e)
{
    if (e == NULL)
        return;
    PGD_ASSERT(!e->wake_open);
    core_loop_destroy(e->core);
    if (e->generations != NULL) {
        size_t pos = 0;
        uint64_t id;
        uintptr_t value;
        while (hash_map_next(e->generations, &pos, &id, &value))
            generation_destroy((generation *)value);
    }
    hash_map_destroy(e->generations);
    block_hasher_destroy(e->hasher);
    tokenizer_destroy(e->tok);
    model_file_close(e->model);
    mem_free(e);
}

/* --- facts ------------------------------------------------------------------------------------ */

const config *engine_get_config(const engine *e)
{
    return &e->cfg;
}

const model_config *engine_get_model(const engine *e)
{
    return model_file_get_config(e->model);
}

const tokenizer *engine_get_tokenizer(const engine *e)
{
    return e->tok;
}

const char *engine_model_name(const engine *e)
{
    return e->model_name;
}

void engine_get_stats(const engine *e, core_stats *out)
{
    core_loop_get_stats(e->core, out);
}

const kv_residency *engine_get_residency(const engine *e)
{
    return core_loop_get_residency(e->core);
}

engine_metrics *engine_get_metrics(engine *e)
{
    return &e->metrics;
}

uv_loop_t *engine_get_loop(const engine *e)
{
    return e->loop;
}

int32_t engine_n_generations(const engine *e)
{
    return (int32_t)hash_map_n_entries(e->generations);
}

void engine_default_params(const engine *e, sampling_params *out)
{
    const model_config *m = engine_get_model(e);
    bool use = strcmp(e->cfg.generation_config, "auto") == 0;
    memset(out, 0, sizeof(*out));
    out->temperature = use && m->has_temperature ? m->gen_temperature : 1.0f;
    out->top_p = use && m->has_top_p ? m->gen_top_p : 1.0f;
    out->top_k = use && m->has_top_k ? m->gen_top_k : 0;
    out->min_p = use && m->has_min_p ? m->gen_min_p : 0.0f;
    out->repetition_penalty = use && m->has_repetition_penalty ? m->gen_repetition_penalty : 1.0f;
    out->n_logprobs = -1;
}

uint64_t engine_draw_seed(engine *e)
{
    uint64_t seed;
    if (getrandom(&seed, sizeof(seed), 0) != (ssize_t)sizeof(seed))
        seed = clock_now_ns() ^ (e->next_id << 32);
    return seed;
}

bool engine_reset_prefix_cache(engine *e, bool with_tiers, engine_cache_reset_fn fn, void *arg)
{
    if (!core_loop_reset_prefix_cache(e->core, with_tiers))
        return false;
    e->on_cache_reset = fn;
    e->on_cache_reset_arg = arg;
    return true;
}

int32_t engine_max_source(const engine *e)
{
    return e->max_source;
}

/* --- work ------------------------------------------------------------------------------------- */

pgd_err engine_hash_prompt(block_hash **out, const engine *e, const token_id *prompt,
                           int32_t n_prompt_tokens, const char *cache_salt)
{
    block_hasher *hasher;
    *out = NULL;
    if (e->hasher == NULL)
        return PGD_OK;
    PGD_TRY(block_hasher_create(&hasher, e->hash_seed)); /* e's own belongs to the io thread */
    pgd_err err = request_hash_prompt(out, hasher, prompt, n_prompt_tokens,
                                      (int32_t)e->cfg.block_size, cache_salt);
    block_hasher_destroy(hasher);
    return err;
}

static void force_token(sampling_params *p, int32_t position, token_id id)
{
    if (id >= 0)
        p->forced[p->n_forced++] = (forced_token){position, id};
}

/* The prompt becomes the encoder's input; the decoder begins with a token of its own. The first
 * token of a text may be forced, and the last one of a text that is cut; a text of one token is its
 * last. */
static void split_prompt(request_opts *r, const encdec_config *encoder)
{
    int32_t last = PGD_MIN(r->max_tokens, r->max_model_len - 1) - 1;
    r->encoder_tokens = r->prompt;
    r->n_encoder_tokens = r->n_prompt_tokens;
    r->prompt = &encoder->start_id;
    r->n_prompt_tokens = 1;
    r->prompt_hashes = NULL;
    force_token(&r->params, 0, encoder->forced_bos_id);
    force_token(&r->params, last, encoder->forced_eos_id);
}

core_refusal engine_generate(engine *e, generation **out, const generation_opts *opts)
{
    const model_config *m = engine_get_model(e);
    core_stats stats;
    core_loop_get_stats(e->core, &stats);
    generation *g;
    request *r = NULL;
    if (generation_create(&g, opts, e->tok, m->eos_ids, m->n_eos_ids) != PGD_OK)
        return CORE_REFUSAL_WORKER;
    g->id = ++e->next_id;
    request_opts ropts = {
        .id = g->id,
        .prompt = opts->prompt,
        .n_prompt_tokens = opts->n_prompt_tokens,
        .prompt_hashes = opts->prompt_hashes,
        .max_tokens = opts->max_tokens,
        .max_model_len = stats.max_model_len,
        .params = opts->params,
        .eos_ids = m->eos_ids,
        .n_eos_ids = opts->ignore_eos ? 0 : m->n_eos_ids,
        .priority = opts->priority,
        .arrival_us = opts->arrival_us,
        .cache_salt = opts->cache_salt,
        .block_size = (int32_t)e->cfg.block_size,
        .hasher = e->hasher,
    };
    if (e->max_source > 0)
        split_prompt(&ropts, &m->encdec);
    core_refusal refusal = CORE_REFUSAL_WORKER;
    if (request_create(&r, &ropts) != PGD_OK || !hash_map_put(e->generations, g->id, (uintptr_t)g))
        goto fail;
    refusal = core_loop_submit(e->core, r);
    if (refusal != CORE_REFUSAL_NONE)
        goto fail;
    *out = g;
    return CORE_REFUSAL_NONE;
fail:
    hash_map_remove(e->generations, g->id);
    request_destroy(r);
    generation_destroy(g);
    return refusal;
}

void engine_cancel(engine *e, generation *g)
{
    if (g->is_cancelled)
        return;
    g->is_cancelled = true;
    if (g->is_dirty) {
        list_remove(&g->dirty_node);
        g->is_dirty = false;
    }
    if (hash_map_get(e->generations, g->id, NULL))
        core_loop_abort(e->core, g->id); /* freed with its FINISHED event */
    else if (!g->is_delivering)
        generation_destroy(g);
}

void engine_hold(generation *g)
{
    PGD_ASSERT(g->is_delivering);
    g->is_held = true;
}

void engine_resume(engine *e, generation *g)
{
    g->is_held = false;
    mark_dirty(e, g);
    if (e->wake_open && !uv_is_closing((uv_handle_t *)&e->wake))
        uv_async_send(&e->wake);
    else
        deliver(e, INT_MAX, INT_MAX);
}
