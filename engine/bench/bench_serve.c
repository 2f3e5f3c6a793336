/* `paged bench serve`: finds or starts the server, asks for its model, runs the load once or once
 * per row, reports.
 *
 * Its own daemon is started with the words that are not options of the bench. Limits that would only
 * turn the load away (connections, queue, and for the simulated device the batch) are raised to
 * what the load needs unless the user set them; limits that shape a real model's speed are left. */
#include "engine/bench/bench_serve.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include <sys/resource.h>
#include <unistd.h>

#include "common/json.h"
#include "engine/bench/bench_daemon.h"
#include "engine/bench/bench_report.h"
#include "engine/bench/bench_serve_opts.h"
#include "engine/bench/proc_cpu.h"
#include "engine/commands.h"
#include "engine/http/client_key.h"

#define EXIT_SOME_FAILED  1
#define MAX_MODELS_BYTES  (1u << 20)
#define FALLBACK_VOCAB    1000
#define SPARE_CONNECTIONS 16
#define SWEEP_STEP_US     10000
#define MAX_ADDED_FLAGS   20

typedef struct bench {
    bench_serve_opts opts;
    uv_loop_t loop;
    uv_signal_t sigint;
    uv_signal_t sigterm;
    http_target target;
    bench_daemon daemon;
    char url[400];
    char model[512];
    char headers[CLIENT_KEY_HEADER_BYTES]; /* "" or the key's line */
    double sim_step_us;                    /* of the server, < 0 = not known */
    bool has_model;
    bool stop;
    bool any_failed;
    strbuf out;
    int n_reported;
} bench;

/* --- the server ------------------------------------------------------------------------------- */

/* What the load needs of its own daemon, before the user's flags, which win. */
typedef struct added_flags {
    const char *flags[MAX_ADDED_FLAGS + BENCH_MAX_WORDS + 1];
    char values[MAX_ADDED_FLAGS][24];
    int n_flags;
    int n_values;
} added_flags;

static void add_flag(added_flags *a, const char *name, int64_t value)
{
    char *text = a->values[a->n_values++];
    snprintf(text, sizeof(a->values[0]), "%lld", (long long)value);
    a->flags[a->n_flags++] = name;
    a->flags[a->n_flags++] = text;
}

static int64_t most_at_once(const bench_serve_opts *o)
{
    int64_t most = o->load.max_concurrency > 0 ? o->load.max_concurrency : o->load.num_prompts;
    for (int i = 0; i < o->n_streams; i++)
        most = PGD_MAX(most, o->streams[i]);
    /* An open loop for a time: nobody knows. */
    return PGD_MIN(most > 0 ? most : 4096, 65536 - SPARE_CONNECTIONS);
}

static bool start_daemon(bench *b, const config *cfg, int64_t step_us)
{
    const bench_serve_opts *o = &b->opts;
    static added_flags a; /* large */
    pgd_why why = {0};
    int64_t n = most_at_once(o);
    bool is_sim = o->sweep || strcmp(cfg->device, "sim") == 0;
    a.n_flags = a.n_values = 0;
    if (o->sweep) {
        a.flags[a.n_flags++] = "--device";
        a.flags[a.n_flags++] = "sim";
    }
    if (cfg->max_connections < n + SPARE_CONNECTIONS)
        add_flag(&a, "--max-connections", n + SPARE_CONNECTIONS);
    if (cfg->max_queued_requests < n)
        add_flag(&a, "--max-queued-requests", n);
    if (is_sim && cfg->max_num_seqs == 0)
        add_flag(&a, "--max-num-seqs", PGD_MAX(n, 256));
    if (o->sweep && cfg->max_num_batched_tokens == 0)
        add_flag(&a, "--max-num-batched-tokens", PGD_MAX(n * 2 * o->load.input_len, 2048));
    if (o->sweep && cfg->num_kv_blocks == 0 && cfg->kv_cache_memory == 0) {
        int64_t n_tokens = 2 * (o->load.input_len + o->load.output_len); /* as lengths may vary */
        int64_t n_blocks = n * (n_tokens / cfg->block_size + 2);
        add_flag(&a, "--num-kv-blocks", PGD_MIN(PGD_MAX(n_blocks, 4096), INT32_MAX));
    }
    for (int i = 0; i < o->n_words; i++)
        a.flags[a.n_flags++] = o->words[i];
    if (o->sweep)
        add_flag(&a, "--sim-step-us", step_us);
    if (strcmp(cfg->log_level, "error") == 0 || strcmp(cfg->log_level, "warn") == 0) {
        a.flags[a.n_flags++] = "--log-level"; /* the line that tells the port is of this level */
        a.flags[a.n_flags++] = "info";
    }
    if (o->api_key_file != NULL) {
        a.flags[a.n_flags++] = "--api-key-file";
        a.flags[a.n_flags++] = o->api_key_file;
    }
    a.flags[a.n_flags] = NULL;
    pgd_err err = bench_daemon_start(&b->daemon, a.flags, o->server_cpus, &b->loop, &b->stop, &why);
    if (err == PGD_OK)
        err = http_target_parse(&b->target, b->daemon.url, &why);
    if (err != PGD_OK) {
        fprintf(stderr, "paged bench serve: %s\n", why.text);
        return false;
    }
    snprintf(b->url, sizeof(b->url), "%s", b->daemon.url);
    b->sim_step_us = !is_sim                  ? -1
                     : o->sweep               ? (double)step_us
                     : cfg->sim_token_us == 0 ? (double)cfg->sim_step_us
                                              : -1;
    return true;
}

/* {"data":[{"id":"...","meta":{"n_vocab":N}}]} */
static pgd_err read_models(bench *b, const char *text, size_t n_bytes, pgd_why *why)
{
    cJSON *root;
    int64_t n_vocab = 0;
    PGD_TRY(json_parse(&root, text, n_bytes, JSON_MAX_DEPTH, why));
    const cJSON *first = cJSON_GetArrayItem(json_get(root, "data"), 0);
    const char *id = json_string(json_get(first, "id"));
    if (!b->has_model && id != NULL && strlen(id) < sizeof(b->model)) {
        snprintf(b->model, sizeof(b->model), "%s", id);
        b->has_model = true;
    }
    if (json_get_i64(&n_vocab, json_get(first, "meta"), "n_vocab", 1, INT32_MAX, NULL) == PGD_OK &&
        n_vocab > 0 && b->opts.load.vocab_size == 0)
        b->opts.load.vocab_size = n_vocab;
    cJSON_Delete(root);
    return b->has_model ? PGD_OK
                        : pgd_fail(why, PGD_EFORMAT, "/v1/models: expected data with an id");
}

static bool ask_model(bench *b, http_client *client)
{
    strbuf body;
    int status = 0;
    pgd_why why = {0};
    strbuf_init(&body);
    pgd_err err =
        http_fetch(client, "GET", "/v1/models", b->headers, &body, MAX_MODELS_BYTES, &status, &why);
    if (err == PGD_OK && status != 200)
        err = pgd_fail(&why, PGD_EPROTO, "/v1/models: expected status 200, got %d: %.*s", status,
                       (int)PGD_MIN(body.n_bytes, 200u), body.data != NULL ? body.data : "");
    if (err == PGD_OK)
        err = read_models(b, body.data != NULL ? body.data : "", body.n_bytes, &why);
    strbuf_deinit(&body);
    if (b->opts.load.vocab_size == 0)
        b->opts.load.vocab_size = FALLBACK_VOCAB;
    if (b->has_model) /* a name from the command line is enough */
        return true;
    fprintf(stderr, "paged bench serve: %s: %s\n", b->url, pgd_why_text(&why, err));
    return false;
}

/* --- runs ------------------------------------------------------------------------------------- */

static uint64_t own_cpu_us(void)
{
    struct rusage u;
    if (getrusage(RUSAGE_SELF, &u) != 0)
        return 0;
    return (uint64_t)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000000u +
           (uint64_t)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static pid_t server_pid(const bench *b)
{
    return b->daemon.pid != 0 ? b->daemon.pid : (pid_t)b->opts.server_pid;
}

static bool warm_up(bench *b, http_client *client, const bench_load_opts *load)
{
    bench_result r;
    bench_load_opts few = *load;
    if (b->opts.num_warmups == 0)
        return true;
    few.num_prompts = b->opts.num_warmups;
    few.duration_s = 0;
    few.request_rate = 0;
    few.seed = load->seed + 1; /* not the prompts that are measured: they would be cached */
    if (few.max_concurrency == 0)
        few.max_concurrency = 1;
    if (bench_result_init(&r) != PGD_OK)
        return false;
    bool ok = bench_load_run(&b->loop, client, &few, &b->stop, &r) == PGD_OK;
    bench_result_deinit(&r);
    return ok;
}

static bool run_load(bench *b, http_client *client, const bench_load_opts *load, bench_run *run)
{
    if (!warm_up(b, client, load) || bench_result_init(&run->result) != PGD_OK) {
        fputs("paged bench serve: out of memory\n", stderr);
        return false;
    }
    proc_cpu before = {0};
    proc_cpu after = {0};
    pid_t pid = server_pid(b);
    run->sim_step_us = b->sim_step_us;
    run->has_server_cpu = pid != 0 && proc_cpu_read(&before, pid);
    uint64_t own_us = own_cpu_us();
    pgd_err err = bench_load_run(&b->loop, client, load, &b->stop, &run->result);
    run->client_cpu_us = own_cpu_us() - own_us;
    run->has_server_cpu = run->has_server_cpu && proc_cpu_read(&after, pid) &&
                          after.children_us >= before.children_us; /* else a worker went */
    run->engine_cpu_us = after.self_us - before.self_us;
    run->worker_cpu_us = after.children_us - before.children_us;
    b->any_failed |= bench_result_n_failed(&run->result) > 0 || run->result.gave_up;
    if (err != PGD_OK) {
        fprintf(stderr, "paged bench serve: %s\n", pgd_err_text(err));
        bench_result_deinit(&run->result);
    }
    return err == PGD_OK;
}

static void report(bench *b, const bench_run *run, const bench_load_opts *load)
{
    const bench_serve_opts *o = &b->opts;
    bool is_row = run->n_streams > 0;
    if (o->json) {
        strbuf_append_str(&b->out, b->n_reported > 0 ? ",\n" : is_row ? "{\"rows\":[\n" : "");
        bench_report_json(&b->out, run, load, b->url);
    } else if (!is_row) {
        bench_report_text(&b->out, run, load, b->url, o->histogram);
    } else {
        if (b->n_reported == 0)
            bench_report_row_head(&b->out);
        bench_report_row(&b->out, run);
    }
    b->n_reported++;
    /* Text is shown as it comes: a sweep takes its time. */
    if (!o->json) {
        fputs(b->out.failed ? "" : b->out.data, stdout);
        fflush(stdout);
        strbuf_reset(&b->out);
    }
}

/* The first failure of each kind: a table's row has no room for it. */
static void tell_failures(const bench_run *run)
{
    for (int i = 0; i < BENCH_N_FAILURES; i++) {
        if (run->result.n_failed[i] > 0)
            fprintf(stderr, "paged bench serve: %llu failed, %s: %s\n",
                    (unsigned long long)run->result.n_failed[i], bench_failure_name(i),
                    run->result.detail[i]);
    }
}

static bool run_rows(bench *b, http_client *client)
{
    const bench_serve_opts *o = &b->opts;
    int n_rows = PGD_MAX(o->n_streams, 1);
    bool ok = true;
    for (int i = 0; i < n_rows && ok && !b->stop; i++) {
        static bench_run run;
        bench_load_opts load = o->load;
        run = (bench_run){0};
        if (o->n_streams > 0) {
            run.n_streams = load.max_concurrency = o->streams[i];
            if (load.num_prompts > 0)
                load.num_prompts = PGD_MAX(load.num_prompts, o->streams[i]);
        }
        load.model = b->model;
        load.headers = b->headers;
        load.with_token_ids |= b->sim_step_us > 0;
        load.seed += 2 * i; /* no row's prompts are in the cache from another's */
        ok = run_load(b, client, &load, &run);
        if (!ok)
            break;
        report(b, &run, &load);
        if (o->n_streams > 0)
            tell_failures(&run);
        bench_result_deinit(&run.result);
    }
    return ok;
}

/* Against the server at b->target. */
static bool measure(bench *b)
{
    http_client *client;
    pgd_why why = {0};
    pgd_err err = http_client_create(&client, &b->loop, &b->target,
                                     (uint64_t)(b->opts.timeout_s * 1e6), &why);
    if (err != PGD_OK) {
        fprintf(stderr, "paged bench serve: %s\n", pgd_why_text(&why, err));
        return false;
    }
    bool ok = ask_model(b, client) && run_rows(b, client);
    http_client_destroy(client);
    return ok;
}

static bool measure_own(bench *b, const config *cfg)
{
    static const int64_t sweep_steps[] = {SWEEP_STEP_US, 0};
    int n_daemons = b->opts.sweep ? (int)PGD_ARRAY_LEN(sweep_steps) : 1;
    bool ok = true;
    for (int i = 0; i < n_daemons && ok && !b->stop; i++) {
        ok = start_daemon(b, cfg, sweep_steps[i]) && measure(b);
        ok = bench_daemon_stop(&b->daemon) && ok;
    }
    return ok;
}

/* --- start ------------------------------------------------------------------------------------ */

static void on_signal(uv_signal_t *handle, int signum)
{
    bench *b = handle->data;
    (void)signum;
    b->stop = true;
}

static void watch(bench *b, uv_signal_t *handle, int signum)
{
    handle->data = b;
    uv_signal_init(&b->loop, handle);
    uv_signal_start(handle, on_signal, signum);
    uv_unref((uv_handle_t *)handle);
}

static bool read_key(bench *b, const char *configured)
{
    pgd_why why = {0};
    const char *path = b->opts.api_key_file != NULL ? b->opts.api_key_file : configured;
    if (client_key_header(b->headers, path, &why) == PGD_OK)
        return true;
    fprintf(stderr, "paged bench serve: %s\n", why.text);
    return false;
}

/* With --url the only words left are the model's name and the server's simulated step. */
static bool read_url_words(bench *b)
{
    bench_serve_opts *o = &b->opts;
    for (int i = 0; i < o->n_words; i++) {
        const char *word = o->words[i];
        bool is_model = strncmp(word, "--model", 7) == 0 && (word[7] == '=' || word[7] == '\0');
        bool is_step =
            strncmp(word, "--sim-step-us", 13) == 0 && (word[13] == '=' || word[13] == '\0');
        const char *value = strchr(word, '=');
        if (!is_model && !is_step) {
            fprintf(stderr,
                    "paged bench serve: unexpected %s: with --url there are the bench's own "
                    "options, --model NAME and --sim-step-us N\n",
                    word);
            return false;
        }
        value = value != NULL ? value + 1 : i + 1 < o->n_words ? o->words[++i] : "";
        char *end = NULL;
        double step = is_step ? strtod(value, &end) : 0;
        if (value[0] == '\0' || strlen(value) >= sizeof(b->model) ||
            (is_step && (*end != '\0' || !(step >= 0)))) {
            fprintf(stderr, "paged bench serve: %s: unexpected value \"%s\"\n", word, value);
            return false;
        }
        if (is_step) {
            b->sim_step_us = step;
        } else {
            snprintf(b->model, sizeof(b->model), "%s", value);
            b->has_model = true;
        }
    }
    return true;
}

static void raise_file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}

static int prepare(bench *b, config *cfg)
{
    bench_serve_opts *o = &b->opts;
    pgd_why why = {0};
    pgd_err err = PGD_OK;
    b->sim_step_us = -1;
    if (o->url != NULL) {
        if (!read_url_words(b))
            return EXIT_STATUS_USAGE;
        err = http_target_parse(&b->target, o->url, &why);
        snprintf(b->url, sizeof(b->url), "%.399s", o->url);
    } else {
        char *rest[BENCH_MAX_WORDS];
        int n_rest = 0;
        if (!command_load_config(cfg, o->n_words, o->words, NULL, rest, &n_rest))
            return EXIT_STATUS_USAGE;
        if (n_rest > 0)
            err = pgd_fail(&why, PGD_EINVAL, "unexpected %s; --help lists the options", rest[0]);
    }
    if (err == PGD_OK && o->client_cpus != NULL)
        err = proc_cpu_bind(o->client_cpus, &why);
    if (err != PGD_OK) {
        fprintf(stderr, "paged bench serve: %s\n", pgd_why_text(&why, err));
        return EXIT_STATUS_USAGE;
    }
    return read_key(b, cfg->api_key_file) ? 0 : EXIT_STATUS_USAGE;
}

int bench_serve_main(int argc, char **argv)
{
    static bench b;
    static config cfg;
    if (!bench_serve_opts_parse(&b.opts, argc, argv))
        return EXIT_STATUS_USAGE;
    int status = prepare(&b, &cfg);
    if (status != 0)
        return status;
    if (uv_loop_init(&b.loop) != 0)
        return EXIT_STATUS_SYSTEM;
    raise_file_limit();
    strbuf_init(&b.out);
    watch(&b, &b.sigint, SIGINT);
    watch(&b, &b.sigterm, SIGTERM);
    bool ok = b.opts.url != NULL ? measure(&b) : measure_own(&b, &cfg);
    if (b.opts.json && b.n_reported > 0) {
        strbuf_append_str(&b.out, b.opts.n_streams > 0 ? "\n]}\n" : "\n");
        fputs(b.out.failed ? "" : b.out.data, stdout);
    }
    strbuf_deinit(&b.out);
    uv_close((uv_handle_t *)&b.sigint, NULL);
    uv_close((uv_handle_t *)&b.sigterm, NULL);
    uv_run(&b.loop, UV_RUN_DEFAULT);
    PGD_ASSERT(uv_loop_close(&b.loop) == 0);
    if (!ok)
        return b.daemon.exit_status != 0 ? b.daemon.exit_status : EXIT_SOME_FAILED;
    return b.any_failed || b.stop ? EXIT_SOME_FAILED : 0;
}

void bench_serve_help(FILE *out)
{
    fputs(
        "usage: paged bench serve [--url URL] [options]\n\n"
        "Measures a running server (any that speaks OpenAI's completions API), or starts a daemon\n"
        "with the options of paged serve that are given too, measures it and stops it:\n\n"
        "  paged bench serve --url http://127.0.0.1:8000 --request-rate 4 --num-prompts 200\n"
        "  paged bench serve --model MODEL.gguf --max-concurrency 16\n"
        "  paged bench serve --sweep --server-cpus 0 --client-cpus 1\n\n",
        out);
    bench_serve_opts_help(out);
    fputs(
        "\nTTFT: sent to first chunk. TPOT: first to last chunk over tokens - 1, per request.\n"
        "ITL: every gap between two chunks; a chunk that holds several tokens shows in tokens per\n"
        "chunk. E2E: sent to end. late: how long after its due time a request was sent. added\n"
        "(simulated device): ITL and TTFT minus one step. Exit status: 0 all succeeded, 1 some\n"
        "failed.\n",
        out);
}
