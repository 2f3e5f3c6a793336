/* `paged bench latency|throughput`: the whole engine (scheduler, messages, worker), without HTTP.
 *
 * latency: one request at a time; prefill rate = prompt tokens / time to first token, decode rate
 * from the tokens behind it. throughput: all requests at once; total rate = (prompt + output
 * tokens) / wall time. Prompts are random ids from a seed, so that no two share a prefix; eos is
 * ignored, so that every request has its exact length. */
#include "engine/bench/bench_offline.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"
#include "engine/bench/bench_words.h"
#include "engine/commands.h"
#include "engine/offline.h"

typedef struct bench_opts {
    int64_t input_len;
    int64_t output_len;
    int64_t num_prompts;
    int64_t iterations;
    int64_t seed;
    bool json;
} bench_opts;

typedef struct sample {
    uint64_t start_us, first_us, last_us;
    int32_t n_output;
    bool failed;
    char error_text[160]; /* of a failed one, "" = none given */
    int *n_left;
} sample;

/* What generations refer to: freed only once the engine is gone. */
typedef struct bench_state {
    sample *samples; /* [n] */
    double *prefill; /* [iterations] */
    double *decode;
    double *total;
    int n_left;
} bench_state;

static void on_chunk(void *arg, generation *g)
{
    sample *s = arg;
    if (g->finish == GENERATION_RUNNING)
        return;
    s->first_us = g->first_token_us;
    s->last_us = g->last_token_us;
    s->n_output = g->n_output_tokens;
    s->failed = g->finish != GENERATION_LENGTH;
    if (g->error_text != NULL)
        snprintf(s->error_text, sizeof(s->error_text), "%s", g->error_text);
    (*s->n_left)--;
}

/* Begins one request of random ids; `which` makes it unique. */
static bool begin(offline *o, sample *s, const bench_opts *opts, uint64_t which)
{
    int32_t vocab = engine_get_model(o->engine)->vocab_size;
    token_id *ids = mem_realloc_array(NULL, (size_t)opts->input_len, sizeof(token_id));
    if (ids == NULL)
        return false;
    for (int64_t i = 0; i < opts->input_len; i++)
        ids[i] = (token_id)(hash_u64(((uint64_t)opts->seed << 40) ^ (which << 20) ^ (uint64_t)i) %
                            (uint64_t)vocab);
    generation_opts g = {
        .prompt = ids,
        .n_prompt_tokens = (int32_t)opts->input_len,
        .max_tokens = (int32_t)opts->output_len,
        .ignore_eos = true,
        .arrival_us = clock_now_us(),
        .on_chunk = on_chunk,
        .arg = s,
    };
    engine_default_params(o->engine, &g.params);
    g.params.temperature = 0;
    generation *gen;
    s->start_us = g.arrival_us;
    bool ok = engine_generate(o->engine, &gen, &g) == CORE_REFUSAL_NONE;
    mem_free(ids);
    return ok;
}

/* Runs n requests at once; false when one failed. *wall_us: from the first submit to the last
 * token. */
static bool run_batch(offline *o, const bench_opts *opts, bench_state *b, int64_t n,
                      uint64_t *which, uint64_t *wall_us)
{
    sample *samples = b->samples;
    b->n_left = (int)n;
    uint64_t start = clock_now_us();
    for (int64_t i = 0; i < n; i++) {
        samples[i] = (sample){.n_left = &b->n_left};
        if (!begin(o, &samples[i], opts, (*which)++)) {
            fputs("paged bench: a request was refused; raise --max-queued-requests or lower the "
                  "lengths\n",
                  stderr);
            return false;
        }
    }
    if (!offline_wait(o, &b->n_left)) {
        fputs("paged bench: the worker could not be kept running\n", stderr);
        return false;
    }
    uint64_t end = start;
    for (int64_t i = 0; i < n; i++) {
        if (samples[i].failed) {
            fprintf(stderr, "paged bench: a request failed: %s\n",
                    samples[i].error_text[0] != '\0' ? samples[i].error_text
                                                     : "it ended before its length");
            return false;
        }
        end = PGD_MAX(end, samples[i].last_us);
    }
    *wall_us = end - start;
    return true;
}

static int bench(offline *o, bench_state *b, const bench_opts *opts, bool is_latency)
{
    int64_t n = is_latency ? 1 : opts->num_prompts;
    sample *samples = b->samples = mem_calloc((size_t)n, sizeof(*samples));
    double *prefill = b->prefill = mem_calloc((size_t)opts->iterations, sizeof(double));
    double *decode = b->decode = mem_calloc((size_t)opts->iterations, sizeof(double));
    double *total = b->total = mem_calloc((size_t)opts->iterations, sizeof(double));
    int status = 0;
    uint64_t which = 0, wall_us = 0;
    if (samples == NULL || prefill == NULL || decode == NULL || total == NULL) {
        fputs("paged bench: out of memory\n", stderr);
        return EXIT_STATUS_SYSTEM;
    }
    /* One run warms caches and threads; it is not counted. */
    for (int64_t it = -1; it < opts->iterations && status == 0; it++) {
        if (!run_batch(o, opts, b, n, &which, &wall_us)) {
            status = EXIT_STATUS_WORKER;
            break;
        }
        if (it < 0)
            continue;
        uint64_t first = 0, last = 0;
        for (int64_t i = 0; i < n; i++) {
            first = PGD_MAX(first, samples[i].first_us);
            last = PGD_MAX(last, samples[i].last_us);
        }
        double decode_s = (double)(last - first) * 1e-6;
        prefill[it] =
            (double)(n * opts->input_len) / ((double)(first - samples[0].start_us) * 1e-6);
        decode[it] = decode_s > 0 ? (double)(n * (opts->output_len - 1)) / decode_s : 0;
        total[it] = (double)(n * (opts->input_len + opts->output_len)) / ((double)wall_us * 1e-6);
    }
    if (status == 0) {
        core_stats stats;
        engine_get_stats(o->engine, &stats);
        double p = bench_median(prefill, opts->iterations),
               d = bench_median(decode, opts->iterations),
               t = bench_median(total, opts->iterations);
        const char *kind = is_latency ? "latency" : "throughput";
        const char *model = engine_model_name(o->engine);
        strbuf name;
        strbuf_init(&name);
        strbuf_append_json(&name, model, strlen(model));
        if (opts->json)
            printf("{\"bench\":\"%s\",\"model\":%s,\"device\":\"%s\",\"requests\":%" PRId64
                   ",\"input_len\":%" PRId64 ",\"output_len\":%" PRId64 ",\"iterations\":%" PRId64
                   ",\"prefill_tok_s\":%.2f,\"decode_tok_s\":%.2f,\"total_tok_s\":%.2f,\"startup_"
                   "s\":%.3f}\n",
                   kind, name.failed ? "\"\"" : name.data, stats.device_name, n, opts->input_len,
                   opts->output_len, opts->iterations, p, d, t, (double)o->ready_us * 1e-6);
        else
            printf("%s: %s on %s, %" PRId64 " request(s) of %" PRId64 " in, %" PRId64
                   " out, median of %" PRId64 "\n"
                   "  prefill %10.1f tokens/s%s\n  decode  %10.1f tokens/s%s\n  total   %10.1f "
                   "tokens/s\n",
                   kind, model, stats.device_name, n, opts->input_len, opts->output_len,
                   opts->iterations, p, is_latency ? "" : "  (until the last first token)", d,
                   is_latency ? "" : "  (after it)", t);
        strbuf_deinit(&name);
    }
    return status;
}

void bench_offline_help(FILE *out)
{
    fputs("usage: paged bench latency|throughput --model PATH [options]\n\n"
          "The engine and its worker without HTTP. latency: one request at a time. throughput: all "
          "at once.\n\n"
          "  --input-len N             Tokens of a prompt. Default 512, throughput 128.\n"
          "  --output-len N            Tokens to generate. Default 128, throughput 64.\n"
          "  --num-prompts N           Requests at once of throughput. Default 16.\n"
          "  --iterations N            Runs, of which the median is told. Default 5.\n"
          "  --seed N                  Same seed, same prompts. Default 1.\n"
          "  --json                    One JSON object instead of text.\n",
          out);
}

int bench_offline_main(int argc, char **argv, bool is_latency)
{
    static const char *const extra[] = {
        "input-len=", "output-len=", "num-prompts=", "iterations=", "seed=", "json", NULL};
    static const bench_word rows[] = {
        {"--input-len", offsetof(bench_opts, input_len), 1, 10000000},
        {"--output-len", offsetof(bench_opts, output_len), 1, 10000000},
        {"--num-prompts", offsetof(bench_opts, num_prompts), 1, 100000},
        {"--iterations", offsetof(bench_opts, iterations), 1, 1000},
        {"--seed", offsetof(bench_opts, seed), 0, 1 << 20},
    };
    bench_opts opts = {.input_len = is_latency ? 512 : 128,
                       .output_len = is_latency ? 128 : 64,
                       .num_prompts = 16,
                       .iterations = 5,
                       .seed = 1};
    char *words[200];
    int n_words = 0;
    config cfg;
    if (argc > (int)PGD_ARRAY_LEN(words) ||
        !command_load_config(&cfg, argc, argv, extra, words, &n_words) ||
        !bench_words_parse(&opts, &opts.json, rows, PGD_ARRAY_LEN(rows), words, n_words))
        return EXIT_STATUS_USAGE;
    command_quiet_log(&cfg);
    cfg.max_queued_requests = PGD_MAX(cfg.max_queued_requests, opts.num_prompts);
    offline o;
    bench_state b = {0};
    int status = offline_start(&o, &cfg);
    if (status != 0)
        return status;
    core_stats stats;
    engine_get_stats(o.engine, &stats);
    if (opts.input_len + opts.output_len > stats.max_model_len) {
        fprintf(stderr,
                "paged bench: input and output of %" PRId64 " tokens, but this model holds %d\n",
                opts.input_len + opts.output_len, stats.max_model_len);
        status = EXIT_STATUS_USAGE;
    } else {
        status = bench(&o, &b, &opts, is_latency);
    }
    offline_stop(&o);
    mem_free(b.samples);
    mem_free(b.prefill);
    mem_free(b.decode);
    mem_free(b.total);
    return status;
}
