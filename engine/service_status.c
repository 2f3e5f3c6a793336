/* Text from elsewhere (a model's name, a worker's last words) is cleaned: a newline in it would be
 * another variable of the protocol. */
#include "engine/service_status.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "engine/sd_notify.h"

#define SERVING_PERIOD_US  5000000u
#define LOADING_EXTEND_US  60000000u /* a page cache that reads from a slow disk may pause */
#define STOPPING_MARGIN_US 15000000u /* to end the worker and to close, after the drain limit */

static void clean(char *text)
{
    for (char *c = text; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7F)
            *c = ' ';
    }
}

/* Sends first ("" or lines that end in a newline) with the status line, unless neither is new. */
static void PGD_PRINTF(3, 4) tell(service_status *s, const char *first, const char *fmt, ...)
{
    char line[sizeof(s->line)];
    char message[sizeof(s->line) + 100];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    clean(line);
    if (first[0] == '\0' && strcmp(line, s->line) == 0)
        return;
    memcpy(s->line, line, sizeof(line));
    snprintf(message, sizeof(message), "%sSTATUS=%s", first, line);
    sd_notify_send(message);
}

void service_status_loading(service_status *s, const core_stats *stats)
{
    char extend[64] = "";
    uint64_t now_us = clock_now_us();
    if (stats->state == CORE_STARTING && stats->why[0] != '\0') {
        /* For its worker, whose own unit has a start limit. */
        if (now_us - s->told_us >= SERVING_PERIOD_US) {
            snprintf(extend, sizeof(extend), "EXTEND_TIMEOUT_USEC=%u\n", LOADING_EXTEND_US);
            s->told_us = now_us;
        }
        tell(s, extend, "%.300s", stats->why);
        return;
    }
    if (stats->load_total_bytes == 0)
        return;
    if (stats->load_done_bytes > s->load_done_bytes)
        snprintf(extend, sizeof(extend), "EXTEND_TIMEOUT_USEC=%u\n", LOADING_EXTEND_US);
    s->load_done_bytes = stats->load_done_bytes;
    tell(s, extend, "loading the model: %.0f %% of %.0f MB",
         100.0 * (double)stats->load_done_bytes / (double)stats->load_total_bytes,
         (double)stats->load_total_bytes * 1e-6);
}

void service_status_ready(service_status *s, const char *model_name, const char *address)
{
    s->is_ready = true;
    snprintf(s->subject, sizeof(s->subject), "%.120s on %.160s", model_name, address);
    tell(s, "READY=1\n", "serving %s", s->subject);
}

void service_status_serving(service_status *s, const core_stats *stats, uint64_t now_us)
{
    const scheduler_stats *k = &stats->scheduler;
    if (now_us - s->told_us < SERVING_PERIOD_US)
        return;
    double seconds = (double)(now_us - s->told_us) * 1e-6;
    double rate = s->told_us == 0 || k->n_generated_tokens < s->n_tokens
                      ? 0
                      : (double)(k->n_generated_tokens - s->n_tokens) / seconds;
    int32_t n_waiting = k->n_waiting + stats->n_queued_commands;
    s->told_us = now_us;
    s->n_tokens = k->n_generated_tokens;
    if (k->n_running == 0 && n_waiting == 0 && rate <= 0)
        tell(s, "", "serving %s: idle", s->subject);
    else
        tell(s, "", "serving %s: %d running, %d waiting, %.0f tokens/s", s->subject, k->n_running,
             n_waiting, rate);
}

void service_status_recovering(service_status *s, const char *why)
{
    tell(s, "", "restarting the worker: %.300s", why);
}

void service_status_reload_begin(const service_status *s)
{
    char message[80];
    if (!s->is_ready)
        return;
    snprintf(message, sizeof(message), "RELOADING=1\nMONOTONIC_USEC=%" PRIu64, clock_now_us());
    sd_notify_send(message);
}

void service_status_reload_end(const service_status *s)
{
    if (s->is_ready)
        sd_notify_send("READY=1");
}

void service_status_stopping(service_status *s, uint64_t drain_s)
{
    char first[80];
    snprintf(first, sizeof(first), "STOPPING=1\nEXTEND_TIMEOUT_USEC=%" PRIu64 "\n",
             drain_s * 1000000u + STOPPING_MARGIN_US);
    tell(s, first, "finishing running requests");
}
