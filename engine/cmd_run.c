/* `paged run`: a completion on the terminal, token by token as it comes. With -p one prompt;
 * without it the whole of a piped stdin, or on a terminal one completion per line that is typed. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "engine/commands.h"
#include "engine/offline.h"

#define MAX_STDIN_BYTES ((size_t)64 << 20)

typedef struct run_opts {
    const char *prompt;
    int32_t max_tokens;
    double temperature; /* < 0: the model's default */
    double top_p;
    int64_t top_k;
    int64_t seed;
    bool has_seed;
    bool ignore_eos;
} run_opts;

typedef struct run_state {
    int n_left;
    generation_finish finish;
    int32_t n_output;
    int32_t n_prompt;
    int32_t n_cached;
    uint64_t start_us, first_us, last_us;
    const char *error_text;
} run_state;

static void on_chunk(void *arg, generation *g)
{
    run_state *s = arg;
    fwrite(g->text.data, 1, g->text.n_bytes, stdout);
    fflush(stdout);
    if (g->finish == GENERATION_RUNNING)
        return;
    s->finish = g->finish;
    s->n_output = g->n_output_tokens;
    s->n_prompt = g->n_prompt_tokens;
    s->n_cached = g->n_cached_tokens;
    s->first_us = g->first_token_us;
    s->last_us = g->last_token_us;
    s->error_text = g->error_text;
    s->n_left = 0;
}

static void print_figures(const run_state *s)
{
    double decode_s = (double)(s->last_us - s->first_us) * 1e-6;
    fprintf(
        stderr,
        "\n[%d prompt tokens (%d cached), %d output tokens; first token %.0f ms, %.1f tokens/s]\n",
        s->n_prompt, s->n_cached, s->n_output,
        s->first_us > 0 ? (double)(s->first_us - s->start_us) * 1e-3 : 0.0,
        decode_s > 0 ? (s->n_output - 1) / decode_s : 0.0);
}

/* Exit status of one completion. */
static int complete(offline *o, const char *text, size_t n_bytes, const run_opts *opts)
{
    run_state s = {.n_left = 1, .start_us = clock_now_us()};
    core_stats stats;
    engine_get_stats(o->engine, &stats);
    /* An encoder has its own length, and leaves the decoder's to the completion. */
    int32_t max_source = engine_max_source(o->engine);
    int32_t max_prompt = max_source > 0 ? max_source : stats.max_model_len - 1;
    int32_t max_ids = (int32_t)PGD_MIN(2 * (int64_t)max_prompt + 2, INT32_MAX);
    token_id *ids = NULL;
    int32_t n_ids = 0;
    pgd_err err = tokenizer_encode(&ids, &n_ids, engine_get_tokenizer(o->engine), text, n_bytes,
                                   TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, max_ids);
    if (err != PGD_OK && err != PGD_ERANGE) {
        fprintf(stderr, "paged run: the prompt could not be tokenized: %s\n", pgd_err_text(err));
        return EXIT_STATUS_SYSTEM;
    }
    if (err == PGD_ERANGE || n_ids == 0 || n_ids > max_prompt) {
        fprintf(stderr, "paged run: the prompt has %s%d tokens; expected 1 to %d (%s)\n",
                err == PGD_ERANGE ? "more than " : "", err == PGD_ERANGE ? max_ids : n_ids,
                max_prompt, max_source > 0 ? "the model's encoder" : "max_model_len");
        mem_free(ids);
        return EXIT_STATUS_USAGE;
    }
    generation_opts g = {
        .prompt = ids,
        .n_prompt_tokens = n_ids,
        .max_tokens = PGD_MIN(opts->max_tokens, stats.max_model_len - (max_source > 0 ? 1 : n_ids)),
        .ignore_eos = opts->ignore_eos,
        .skip_special = true,
        .arrival_us = s.start_us,
        .on_chunk = on_chunk,
        .arg = &s,
    };
    engine_default_params(o->engine, &g.params);
    if (opts->temperature >= 0)
        g.params.temperature = (float)opts->temperature;
    if (opts->top_p > 0)
        g.params.top_p = (float)opts->top_p;
    if (opts->top_k >= 0)
        g.params.top_k = (int32_t)opts->top_k;
    g.params.seed = opts->has_seed ? (uint64_t)opts->seed : engine_draw_seed(o->engine);
    generation *gen;
    core_refusal refusal = engine_generate(o->engine, &gen, &g);
    mem_free(ids);
    if (refusal != CORE_REFUSAL_NONE || !offline_wait(o, &s.n_left)) {
        fprintf(stderr, "\npaged run: the worker is not available\n");
        return EXIT_STATUS_WORKER;
    }
    if (s.finish == GENERATION_ERROR) {
        fprintf(stderr, "\npaged run: %s\n", s.error_text);
        return EXIT_STATUS_WORKER;
    }
    print_figures(&s);
    return 0;
}

static bool read_stdin(strbuf *out)
{
    char buf[65536];
    size_t n;
    while ((n = fread(buf, 1, sizeof(buf), stdin)) > 0) {
        strbuf_append(out, buf, n);
        if (out->n_bytes > MAX_STDIN_BYTES) {
            fprintf(stderr, "paged run: stdin: expected at most %zu bytes\n", MAX_STDIN_BYTES);
            return false;
        }
    }
    if (out->failed)
        fputs("paged run: out of memory for the prompt\n", stderr);
    return !out->failed;
}

static int complete_lines(offline *o, const run_opts *opts)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    int status = 0;
    fputs("Type a prompt and press Enter; an empty line or Ctrl-D ends.\n> ", stderr);
    while ((n = getline(&line, &cap, stdin)) > 1) {
        if (line[n - 1] == '\n')
            n--;
        status = complete(o, line, (size_t)n, opts);
        if (status == EXIT_STATUS_WORKER)
            break;
        fputs("> ", stderr);
    }
    free(line); /* getline's */
    return status;
}

static bool parse_double(double *out, const char *name, const char *text, double min, double max)
{
    char *end;
    *out = strtod(text, &end);
    if (end != text && *end == '\0' && *out >= min && *out <= max)
        return true;
    fprintf(stderr, "paged run: %s: expected %g to %g, got %s\n", name, min, max, text);
    return false;
}

static bool parse_int(int64_t *out, const char *name, const char *text, int64_t min, int64_t max)
{
    char *end;
    errno = 0;
    *out = strtoll(text, &end, 10);
    if (end != text && *end == '\0' && errno == 0 && *out >= min && *out <= max)
        return true;
    fprintf(stderr, "paged run: %s: expected %lld to %lld, got %s\n", name, (long long)min,
            (long long)max, text);
    return false;
}

/* Name without dashes, and the value behind '=' or in the next word. */
static bool parse_own(run_opts *o, char **words, int n)
{
    for (int i = 0; i < n; i++) {
        char name[32];
        const char *word = words[i];
        if (word[0] != '-') {
            if (o->prompt == NULL) {
                fprintf(stderr, "paged run: unexpected %s; the prompt goes behind -p\n", word);
                return false;
            }
            fprintf(stderr, "paged run: unexpected %s\n", word);
            return false;
        }
        const char *equals = strchr(word, '=');
        size_t skip = word[1] == '-' ? 2 : 1;
        snprintf(name, sizeof(name), "%.*s",
                 (int)((equals != NULL ? (size_t)(equals - word) : strlen(word)) - skip),
                 word + skip);
        if (strcmp(name, "ignore-eos") == 0) {
            o->ignore_eos = true;
            continue;
        }
        const char *value = equals != NULL ? equals + 1 : words[++i];
        int64_t v = 0;
        if (strcmp(name, "p") == 0 || strcmp(name, "prompt") == 0) {
            o->prompt = value;
        } else if (strcmp(name, "n") == 0 || strcmp(name, "max-tokens") == 0) {
            if (!parse_int(&v, name, value, 1, 10000000))
                return false;
            o->max_tokens = (int32_t)v;
        } else if (strcmp(name, "temperature") == 0) {
            if (!parse_double(&o->temperature, name, value, 0, 2))
                return false;
        } else if (strcmp(name, "top-p") == 0) {
            if (!parse_double(&o->top_p, name, value, 1e-6, 1))
                return false;
        } else if (strcmp(name, "top-k") == 0) {
            if (!parse_int(&o->top_k, name, value, 0, 2147483647))
                return false;
        } else {
            if (!parse_int(&o->seed, name, value, INT64_MIN, INT64_MAX))
                return false;
            o->has_seed = true;
        }
    }
    return true;
}

int cmd_run(int argc, char **argv)
{
    static const char *const extra[] = {"p=",     "prompt=", "n=",    "max-tokens=", "temperature=",
                                        "top-p=", "top-k=",  "seed=", "ignore-eos",  NULL};
    char *words[200];
    int n_words = 0;
    config cfg;
    run_opts opts = {.max_tokens = 128, .temperature = -1, .top_p = -1, .top_k = -1};
    if (argc > (int)PGD_ARRAY_LEN(words) ||
        !command_load_config(&cfg, argc, argv, extra, words, &n_words) ||
        !parse_own(&opts, words, n_words))
        return EXIT_STATUS_USAGE;
    command_quiet_log(&cfg); /* the terminal belongs to the text */
    offline o;
    int status = offline_start(&o, &cfg);
    if (status != 0)
        return status;
    if (opts.prompt != NULL) {
        status = complete(&o, opts.prompt, strlen(opts.prompt), &opts);
    } else if (isatty(STDIN_FILENO)) {
        status = complete_lines(&o, &opts);
    } else {
        strbuf text;
        strbuf_init(&text);
        status = read_stdin(&text)
                     ? complete(&o, text.data != NULL ? text.data : "", text.n_bytes, &opts)
                     : EXIT_STATUS_USAGE;
        strbuf_deinit(&text);
    }
    offline_stop(&o);
    return status;
}
