/* One table: name, kind, place, range, help. Both parsing and --help read it. */
#include "engine/bench/bench_serve_opts.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <unistd.h>

typedef enum opt_kind { OPT_INT, OPT_REAL, OPT_FLAG, OPT_TEXT } opt_kind;

typedef struct opt_row {
    const char *name;
    opt_kind kind;
    size_t offset;
    double min, max;
    const char *value; /* shown in help */
    const char *help;
} opt_row;

#define AT(f) offsetof(bench_serve_opts, f)

static const opt_row rows[] = {
    {"url", OPT_TEXT, AT(url), 0, 0, "URL",
     "Server to measure: http://host:port or unix:/path. Without it: a daemon of its own, started "
     "with the other options given (those of paged serve)."},
    {"request-rate", OPT_REAL, AT(request_rate), 1e-6, 1e9, "R",
     "Requests per second with exponential gaps (open loop); inf: as many as max-concurrency "
     "allows (closed loop). Default inf."},
    {"max-concurrency", OPT_INT, AT(load.max_concurrency), 0, 65536, "N",
     "Most requests at once. 0: no limit. Default 0."},
    {"num-prompts", OPT_INT, AT(load.num_prompts), 0, 1e9, "N",
     "Requests to send. 0: until duration. Default 100, or 0 with a duration."},
    {"duration", OPT_REAL, AT(load.duration_s), 0, 1e7, "S",
     "Begin no request after this many seconds; those that run may finish. 0: no limit."},
    {"input-len", OPT_INT, AT(load.input_len), 1, 1e7, "N", "Tokens of a prompt. Default 128."},
    {"output-len", OPT_INT, AT(load.output_len), 1, 1e7, "N",
     "Tokens to generate for each. Default 128."},
    {"random-range-ratio", OPT_REAL, AT(load.range_ratio), 0, 1, "X",
     "Lengths vary evenly between (1 - X) and (1 + X) times those. Default 0."},
    {"prefix-len", OPT_INT, AT(load.prefix_len), 0, 1e7, "N",
     "The first N tokens of input-len are shared with other requests. Default 0."},
    {"num-prefixes", OPT_INT, AT(load.num_prefixes), 1, 1e9, "N",
     "Different shared prefixes, used in turn. Default 1."},
    {"ignore-eos", OPT_FLAG, AT(load.ignore_eos), 0, 0, NULL,
     "Ask for the full output length (not part of OpenAI's API). On; --no-ignore-eos for servers "
     "that refuse it."},
    {"temperature", OPT_REAL, AT(load.temperature), 0, 2, "X", "Default 0."},
    {"text", OPT_FLAG, AT(load.is_text), 0, 0, NULL,
     "Send words instead of token ids, for servers that take text only."},
    {"token-ids", OPT_FLAG, AT(load.with_token_ids), 0, 0, NULL,
     "Ask for the ids of the generated tokens (paged and vLLM know return_token_ids): a token "
     "whose "
     "text is held back, as half a character is, then has its chunk. On where added latency is "
     "told."},
    {"vocab-size", OPT_INT, AT(load.vocab_size), 1, 1e9, "N",
     "Token ids are below it. Default: what /v1/models tells, else 1000."},
    {"seed", OPT_INT, AT(load.seed), 0, 9e15, "N",
     "Same seed, same requests: a second run against one server finds them in its prefix cache. "
     "Default 1."},
    {"api-key-file", OPT_TEXT, AT(api_key_file), 0, 0, "FILE",
     "Its first key is sent; its own daemon is given the file too."},
    {"timeout", OPT_REAL, AT(timeout_s), 0.001, 1e6, "S",
     "An answer without a byte for this long has failed. Default 600."},
    {"num-warmups", OPT_INT, AT(num_warmups), 0, 1e6, "N",
     "Requests sent first and not counted. Default 1 for its own daemon, else 0."},
    {"streams", OPT_TEXT, AT(streams_text), 0, 0, "A,B,...",
     "One run, and one line of a table, for each number of requests at once (closed loop; "
     "duration 5 unless it or num-prompts is given)."},
    {"sweep", OPT_FLAG, AT(sweep), 0, 0, NULL,
     "The cost of HTTP and scheduling alone: --device sim --streams 1,16,256,1000 --input-len 16, "
     "once with steps of 10 ms (added latency: a model whose steps hide the server's work) and "
     "once with steps of 0 (throughput: nothing but the server's work)."},
    {"server-cpus", OPT_TEXT, AT(server_cpus), 0, 0, "LIST",
     "CPUs of its own daemon, engine and worker together: 0 or 0,2-3."},
    {"client-cpus", OPT_TEXT, AT(client_cpus), 0, 0, "LIST", "CPUs of this process."},
    {"server-pid", OPT_INT, AT(server_pid), 1, 4194304, "PID",
     "With a url on this host: the engine's process, for its CPU time."},
    {"histogram", OPT_FLAG, AT(histogram), 0, 0, NULL,
     "Draw TTFT and ITL. On when the output is a terminal."},
    {"json", OPT_FLAG, AT(json), 0, 0, NULL, "One JSON object instead of text."},
};

static bool fail_range(const opt_row *r, const char *value)
{
    fprintf(stderr, "paged bench serve: --%s: expected %.10g to %.10g%s, got %s\n", r->name, r->min,
            r->max, strcmp(r->name, "request-rate") == 0 ? " or inf" : "", value);
    return false;
}

static bool set_value(bench_serve_opts *o, const opt_row *r, char *value)
{
    char *at = (char *)o + r->offset;
    char *end;
    if (r->kind == OPT_TEXT) {
        memcpy(at, &value, sizeof(value));
        return true;
    }
    if (r->kind == OPT_INT) {
        int64_t v = strtoll(value, &end, 10);
        if (end == value || *end != '\0' || (double)v < r->min || (double)v > r->max)
            return fail_range(r, value);
        memcpy(at, &v, sizeof(v));
        return true;
    }
    double v = strtod(value, &end);
    bool is_inf = r->offset == AT(request_rate) && isinf(v) && v > 0;
    if (end == value || *end != '\0' || (!is_inf && !(v >= r->min && v <= r->max)))
        return fail_range(r, value);
    memcpy(at, &v, sizeof(v));
    return true;
}

/* Whether name[0..n) is the row's; with "no-" before it for a flag, *on is false. */
static bool matches(const opt_row *r, const char *name, size_t n, bool *on)
{
    *on = true;
    if (r->kind == OPT_FLAG && n > 3 && strncmp(name, "no-", 3) == 0 && strlen(r->name) == n - 3 &&
        strncmp(r->name, name + 3, n - 3) == 0) {
        *on = false;
        return true;
    }
    return strlen(r->name) == n && strncmp(r->name, name, n) == 0;
}

static bool parse_streams(bench_serve_opts *o)
{
    const char *at = o->streams_text;
    while (at != NULL) {
        char *end;
        long v = strtol(at, &end, 10);
        if (end == at || (*end != ',' && *end != '\0') || v < 1 || v > 65536 ||
            o->n_streams == BENCH_MAX_STREAMS) {
            fprintf(stderr,
                    "paged bench serve: --streams: expected up to %d numbers from 1 to 65536 with "
                    "commas, got %s\n",
                    BENCH_MAX_STREAMS, o->streams_text);
            return false;
        }
        o->streams[o->n_streams++] = v;
        at = *end == ',' ? end + 1 : NULL;
    }
    return true;
}

static bool check(bench_serve_opts *o)
{
    bench_load_opts *l = &o->load;
    const char *wrong = NULL;
    if (o->sweep && o->url != NULL)
        wrong = "--sweep measures a daemon of its own: leave out --url, or use --streams";
    else if (o->server_cpus != NULL && o->url != NULL)
        wrong = "--server-cpus is for a daemon of its own: leave out --url";
    else if (o->server_pid != 0 && o->url == NULL)
        wrong = "--server-pid needs --url";
    else if (o->n_streams > 0 && (l->max_concurrency != 0 || !isinf(o->request_rate)))
        wrong = "--streams sets the concurrency: leave out --max-concurrency and --request-rate";
    else if (l->prefix_len > l->input_len)
        wrong = "--prefix-len: expected at most --input-len";
    if (wrong == NULL)
        return true;
    fprintf(stderr, "paged bench serve: %s\n", wrong);
    return false;
}

static void set_defaults(bench_serve_opts *o)
{
    *o = (bench_serve_opts){
        .load = {.input_len = -1,
                 .output_len = 128,
                 .num_prefixes = 1,
                 .num_prompts = -1,
                 .seed = 1,
                 .ignore_eos = true},
        .request_rate = INFINITY,
        .num_warmups = -1,
        .timeout_s = 600,
        .histogram = isatty(STDOUT_FILENO) != 0,
    };
}

static void derive(bench_serve_opts *o)
{
    bench_load_opts *l = &o->load;
    if (l->input_len < 0)
        l->input_len = o->sweep ? 16 : 128;
    l->request_rate = isinf(o->request_rate) ? 0 : o->request_rate;
    if (l->num_prompts <= 0 && l->duration_s == 0) {
        if (o->n_streams > 0)
            l->duration_s = 5;
        else
            l->num_prompts = 100;
    }
    l->num_prompts = PGD_MAX(l->num_prompts, 0);
    if (o->num_warmups < 0)
        o->num_warmups = o->url == NULL;
}

bool bench_serve_opts_parse(bench_serve_opts *o, int argc, char **argv)
{
    set_defaults(o);
    for (int i = 0; i < argc; i++) {
        const char *name = argv[i] + 2;
        size_t n = strncmp(argv[i], "--", 2) == 0 ? strcspn(name, "=") : 0;
        const opt_row *r = NULL;
        bool on = true;
        for (size_t k = 0; n > 0 && k < PGD_ARRAY_LEN(rows) && r == NULL; k++)
            r = matches(&rows[k], name, n, &on) ? &rows[k] : NULL;
        if (r == NULL) {
            if (o->n_words == BENCH_MAX_WORDS) {
                fputs("paged bench serve: too many arguments\n", stderr);
                return false;
            }
            o->words[o->n_words++] = argv[i];
        } else if (r->kind == OPT_FLAG) {
            memcpy((char *)o + r->offset, &on, sizeof(on));
        } else if (name[n] != '=' && i + 1 >= argc) {
            fprintf(stderr, "paged bench serve: --%s expects a value\n", r->name);
            return false;
        } else if (!set_value(o, r, name[n] == '=' ? argv[i] + 2 + n + 1 : argv[++i])) {
            return false;
        }
    }
    if (o->sweep && o->streams_text == NULL)
        o->streams_text = "1,16,256,1000";
    if (!parse_streams(o))
        return false;
    derive(o);
    return check(o);
}

static void print_wrapped(FILE *out, const char *text)
{
    int col = 0;
    while (*text != '\0') {
        int n = (int)strcspn(text, " ");
        if (col > 0 && col + 1 + n > 70) {
            fputs("\n                            ", out);
            col = 0;
        }
        fprintf(out, "%s%.*s", col > 0 ? " " : "", n, text);
        col += n + (col > 0);
        text += n;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

void bench_serve_opts_help(FILE *out)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        char head[64];
        snprintf(head, sizeof(head), "--%s %s", rows[i].name,
                 rows[i].value != NULL ? rows[i].value : "");
        fprintf(out, "  %-25s ", head);
        print_wrapped(out, rows[i].help);
    }
}
