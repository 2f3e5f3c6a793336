/* The load: streamed completions against one server, in open loop (requests come when they are due,
 * whatever the server does) or closed loop (a fixed number runs at once), and what came of them.
 *
 * Times are the client's: a chunk is timed when the read that brought its end returned. Tokens are
 * usage.completion_tokens; a server that sends no usage has its chunks counted, and the result says
 * for how many answers.
 * Owns:    its connections' requests; results belong to the caller
 * Thread:  the loop's
 */
#ifndef ENGINE_BENCH_BENCH_LOAD_H
#define ENGINE_BENCH_BENCH_LOAD_H

#include "engine/bench/latency_hist.h"
#include "engine/http/http_client.h"

typedef struct bench_load_opts {
    const char *model;
    const char *headers;     /* further request lines (the key), or NULL */
    double request_rate;     /* requests per second, exponential gaps; 0 = as fast as allowed */
    int64_t max_concurrency; /* 0 = no limit */
    int64_t num_prompts;     /* 0 = no limit; then duration_s is set */
    double duration_s;       /* no request is begun after it; 0 = no limit */
    int64_t input_len;       /* tokens, prefix included */
    int64_t output_len;
    double range_ratio; /* lengths are uniform in len * (1 - r) to len * (1 + r) */
    int64_t prefix_len; /* tokens at the front that requests of one prefix share */
    int64_t num_prefixes;
    int64_t vocab_size; /* prompt ids are below it */
    int64_t seed;
    double temperature;
    bool ignore_eos;
    bool is_text;        /* words instead of token ids */
    bool with_token_ids; /* asks for ids, so that a token whose text is held back has a chunk */
} bench_load_opts;

/* Why a request failed; kind, name. */
#define BENCH_FAILURES(X)               \
    X(BENCH_UNREACHED, "unreached")     \
    X(BENCH_CLOSED, "closed")           \
    X(BENCH_TIMEOUT, "timeout")         \
    X(BENCH_MALFORMED, "malformed")     \
    X(BENCH_HTTP_429, "http_429")       \
    X(BENCH_HTTP_4XX, "http_4xx")       \
    X(BENCH_HTTP_5XX, "http_5xx")       \
    X(BENCH_HTTP_OTHER, "http_other")   \
    X(BENCH_ERROR_EVENT, "error_event") \
    X(BENCH_EMPTY, "empty")             \
    X(BENCH_LOCAL, "local")             \
    X(BENCH_CANCELLED, "cancelled")

typedef enum bench_failure {
#define BENCH_FAILURE_ENUM(kind, name) kind,
    BENCH_FAILURES(BENCH_FAILURE_ENUM)
#undef BENCH_FAILURE_ENUM
        BENCH_N_FAILURES
} bench_failure;

const char *bench_failure_name(bench_failure kind);

typedef struct bench_result {
    uint64_t n_started;
    uint64_t n_succeeded;
    uint64_t n_failed[BENCH_N_FAILURES];
    char detail[BENCH_N_FAILURES][200]; /* of the first of each kind */
    uint64_t n_without_usage;
    uint64_t n_short; /* succeeded with fewer tokens than asked for */
    uint64_t n_prompt_tokens;
    uint64_t n_cached_tokens;
    uint64_t n_output_tokens;
    uint64_t n_chunks; /* with text or token ids */
    uint64_t n_connects;
    uint64_t duration_us; /* first request begun to last answer's end */
    bool gave_up;         /* the server stopped accepting connections */
    latency_hist ttft;    /* request sent (connecting included) to first chunk */
    latency_hist tpot;    /* per request: first to last chunk over tokens - 1 */
    latency_hist itl;     /* every gap between two chunks of a request */
    latency_hist e2e;     /* of requests that succeeded */
    latency_hist late;    /* open loop: due to sent */
} bench_result;

PGD_MUST_USE pgd_err bench_result_init(bench_result *r);
void bench_result_deinit(bench_result *r);
uint64_t bench_result_n_failed(const bench_result *r);

/* Runs the loop until every request has ended, or *stop becomes true: what still runs then is
 * cancelled and counted so. */
PGD_MUST_USE pgd_err bench_load_run(uv_loop_t *loop, http_client *client,
                                    const bench_load_opts *opts, const bool *stop,
                                    bench_result *out);

#endif
