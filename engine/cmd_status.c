/* `paged status`: two looks at a running server, an interval apart, since rates need two; on a
 * terminal then one look after the other until interrupted. No signal is caught and no terminal mode
 * is changed: Ctrl-C simply ends it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <unistd.h>

#include "engine/cmd_status_events.h"
#include "engine/commands.h"
#include "engine/http/client_key.h"
#include "engine/status/status_report.h"

#define EXIT_NOT_READY   1
#define EXIT_NOT_REACHED 69
#define TIMEOUT_US       5000000u
#define URL_BYTES        400
#define CLEAR_AND_HOME   "\033[2J\033[H"

typedef struct status_opts {
    config cfg;
    char url[URL_BYTES];
    double interval_s;
    bool once;
    bool json;
    bool events;
    char events_url[CMD_STATUS_EVENTS_URL_BYTES]; /* "" = as the server says */
} status_opts;

/* Where a daemon of this configuration listens. */
static bool default_url(status_opts *o)
{
    const config *c = &o->cfg;
    const char *host = c->host;
    if (c->uds[0] != '\0') {
        snprintf(o->url, sizeof(o->url), "unix:%s", c->uds);
        return true;
    }
    if (c->port == 0) {
        fputs("paged status: port 0 is any free one: give --url\n", stderr);
        return false;
    }
    if (strcmp(host, "0.0.0.0") == 0)
        host = "127.0.0.1";
    else if (strcmp(host, "::") == 0)
        host = "::1";
    bool is_v6 = strchr(host, ':') != NULL;
    snprintf(o->url, sizeof(o->url), "http://%s%s%s:%lld", is_v6 ? "[" : "", host, is_v6 ? "]" : "",
             (long long)c->port);
    return true;
}

static bool is_option(const char *word, size_t len, const char *name)
{
    return strlen(name) == len && strncmp(word, name, len) == 0;
}

static bool copy_url(char *out, size_t cap, const char *option, const char *value)
{
    if (strlen(value) >= cap) {
        fprintf(stderr, "paged status: %s: expected a shorter one\n", option);
        return false;
    }
    snprintf(out, cap, "%s", value);
    return true;
}

/* Own words: --url URL, --interval S, --once, --json, --events, --events-url URL. */
static bool parse_own(status_opts *o, char **words, int n)
{
    for (int i = 0; i < n; i++) {
        size_t len = strcspn(words[i], "=");
        const char *value = words[i][len] == '=' ? words[i] + len + 1 : NULL;
        if (strcmp(words[i], "--once") == 0) {
            o->once = true;
        } else if (strcmp(words[i], "--json") == 0) {
            o->json = true;
        } else if (strcmp(words[i], "--events") == 0) {
            o->events = true;
        } else if (is_option(words[i], len, "--events-url")) {
            o->events = true;
            if (!copy_url(o->events_url, sizeof(o->events_url), "--events-url",
                          value != NULL ? value : words[++i]))
                return false;
        } else if (is_option(words[i], len, "--url")) {
            if (!copy_url(o->url, sizeof(o->url), "--url", value != NULL ? value : words[++i]))
                return false;
        } else if (is_option(words[i], len, "--interval")) {
            char *end;
            value = value != NULL ? value : words[++i];
            o->interval_s = strtod(value, &end);
            if (end == value || *end != '\0' || !(o->interval_s >= 0.1 && o->interval_s <= 3600)) {
                fprintf(stderr, "paged status: --interval: expected 0.1 to 3600 seconds, got %s\n",
                        value);
                return false;
            }
        } else {
            fprintf(stderr, "paged status: unexpected %s; paged status --help lists the options\n",
                    words[i]);
            return false;
        }
    }
    return true;
}

static void wait_interval(double s)
{
    struct timespec left = {.tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
}

static int exit_status(const server_status *s)
{
    return s->is_healthy ? 0 : s->is_reached ? EXIT_NOT_READY : EXIT_NOT_REACHED;
}

static void show(const status_opts *o, const server_status *now, const server_status *before,
                 bool is_live)
{
    strbuf b;
    strbuf_init(&b);
    if (is_live)
        strbuf_append_str(&b, CLEAR_AND_HOME);
    if (o->json)
        status_report_json(&b, now, before, o->url);
    else
        status_report_text(&b, now, before, o->url);
    if (o->json)
        strbuf_append_char(&b, '\n');
    fputs(b.failed ? "out of memory\n" : b.data, stdout);
    fflush(stdout);
    strbuf_deinit(&b);
}

static int watch_server(const status_opts *o, http_client *client, const char *headers)
{
    static server_status looks[2]; /* large */
    bool is_live = !o->once && !o->json && isatty(STDOUT_FILENO);
    int at = 0;
    server_status_read(&looks[0], client, headers);
    /* Nothing to compare when nobody is there. */
    while (looks[at].is_reached || is_live) {
        wait_interval(o->interval_s);
        at = !at;
        server_status_read(&looks[at], client, headers);
        if (!is_live)
            break;
        show(o, &looks[at], &looks[!at], true);
    }
    if (!is_live)
        show(o, &looks[at], &looks[!at], false);
    return exit_status(&looks[at]);
}

static int print_events(status_opts *o, const server_status *server, const http_target *target)
{
    if (server->kv_events_url[0] == '\0') {
        fprintf(stderr,
                server->is_reached ? "paged status: %s publishes no KV events: start it with "
                                     "--kv-events-url\n"
                                   : "paged status: no server answers at %s\n",
                o->url);
        return server->is_reached ? EXIT_STATUS_USAGE : EXIT_NOT_REACHED;
    }
    cmd_status_events_url(o->events_url, server->kv_events_url, target);
    return cmd_status_events_print(o->events_url, server->kv_events_topic, o->json);
}

void cmd_status_help(FILE *out, int argc, char **argv)
{
    (void)argc;
    (void)argv;
    fputs(
        "usage: paged status [--url URL] [options]\n\n"
        "The state of a running server: requests, tokens per second, KV cache, prefix cache,\n"
        "latencies, workers. On a terminal it is shown again and again; else once.\n\n"
        "  --url URL            http://host:port or unix:/path. Default: where a daemon with this\n"
        "                       configuration listens (--config, PAGED_HOST, PAGED_PORT, "
        "PAGED_UDS).\n"
        "  --interval S         Seconds between two looks, of which rates are made. Default 1.\n"
        "  --once               One text, also on a terminal.\n"
        "  --json               One JSON object.\n"
        "  --events             Prints KV events as they come, until interrupted (with --json one\n"
        "                       object per line), from where the server says it publishes them.\n"
        "  --events-url URL     Prints those of this kv_events_url; asks no server.\n"
        "  --api-key-file FILE  Its first key is sent.\n\n"
        "Exit status: 0 healthy, 1 not ready, 69 not reachable, 64 usage.\n",
        out);
}

int cmd_status(int argc, char **argv)
{
    static const char *const extra[] = {"url=",   "interval=",   "once", "json",
                                        "events", "events-url=", NULL};
    static status_opts o = {.interval_s = 1};
    char *words[64];
    int n_words = 0;
    char headers[CLIENT_KEY_HEADER_BYTES];
    http_target target;
    uv_loop_t loop;
    http_client *client;
    pgd_why why = {0};
    if (argc > (int)PGD_ARRAY_LEN(words) ||
        !command_load_config(&o.cfg, argc, argv, extra, words, &n_words) ||
        !parse_own(&o, words, n_words))
        return EXIT_STATUS_USAGE;
    if (o.events_url[0] != '\0')
        return cmd_status_events_print(o.events_url, NULL, o.json);
    if (o.url[0] == '\0' && !default_url(&o))
        return EXIT_STATUS_USAGE;
    pgd_err err = http_target_parse(&target, o.url, &why);
    if (err == PGD_OK)
        err = client_key_header(headers, o.cfg.api_key_file, &why);
    if (err != PGD_OK) {
        fprintf(stderr, "paged status: %s\n", pgd_why_text(&why, err));
        return EXIT_STATUS_USAGE;
    }
    if (uv_loop_init(&loop) != 0)
        return EXIT_STATUS_SYSTEM;
    err = http_client_create(&client, &loop, &target, TIMEOUT_US, &why);
    if (err != PGD_OK) {
        fprintf(stderr, "paged status: %s\n", pgd_why_text(&why, err));
        PGD_ASSERT(uv_loop_close(&loop) == 0);
        return EXIT_NOT_REACHED;
    }
    static server_status server; /* large */
    int status = 0;
    if (o.events)
        server_status_read_version(&server, client, headers);
    else
        status = watch_server(&o, client, headers);
    http_client_destroy(client);
    PGD_ASSERT(uv_loop_close(&loop) == 0);
    return o.events ? print_events(&o, &server, &target) : status;
}
