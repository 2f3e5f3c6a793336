/* What has come is printed at once and flushed, since the reader is often a pipe. */
#include "engine/cmd_status_events.h"

#include <stdio.h>
#include <string.h>

#include "engine/commands.h"
#include "engine/kv/kv_events_link_client.h"
#include "engine/status/event_report.h"

#define EXIT_NOT_REACHED 69
#define WAIT_MS          200

void cmd_status_events_url(char out[CMD_STATUS_EVENTS_URL_BYTES], const char *told,
                           const http_target *server)
{
    static const char *const all[] = {"tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"};
    bool is_v6 = strchr(server->host, ':') != NULL;
    snprintf(out, CMD_STATUS_EVENTS_URL_BYTES, "%s", told);
    for (size_t i = 0; i < PGD_ARRAY_LEN(all); i++) {
        size_t n = strlen(all[i]);
        if (strncmp(told, all[i], n) == 0)
            snprintf(out, CMD_STATUS_EVENTS_URL_BYTES, "tcp://%s%s%s:%.16s", is_v6 ? "[" : "",
                     server->host, is_v6 ? "]" : "", told + n);
    }
}

static pgd_err print_frame(const kv_events_frame *f, uint64_t *next_seq, bool is_json, pgd_why *why)
{
    strbuf b;
    strbuf_init(&b);
    if (*next_seq != UINT64_MAX && f->seq > *next_seq)
        event_report_gap(&b, is_json, *next_seq, f->seq);
    pgd_err err = event_report_batch(&b, is_json, f->seq, f->batch, f->n_bytes, why);
    if (err == PGD_OK && b.failed)
        err = pgd_fail(why, PGD_ENOMEM, "out of memory");
    if (b.n_bytes > 0 && !b.failed)
        fputs(b.data, stdout);
    if (fflush(stdout) != 0 && err == PGD_OK)
        err = pgd_fail(why, PGD_EIO, "cannot write");
    strbuf_deinit(&b);
    *next_seq = f->seq + 1;
    return err;
}

int cmd_status_events_print(const char *url, const char *topic, bool is_json)
{
    kv_events_link_client *client;
    uint64_t next_seq = UINT64_MAX;
    pgd_why why = {0};
    pgd_err err = kv_events_link_client_open(&client, url, topic, &why);
    while (err == PGD_OK) {
        kv_events_frame frame;
        err = kv_events_link_client_recv(&frame, client, WAIT_MS, &why);
        if (err == PGD_OK)
            err = print_frame(&frame, &next_seq, is_json, &why);
        else if (err == PGD_EAGAIN)
            err = PGD_OK;
    }
    fprintf(stderr, "paged status: events: %s\n", pgd_why_text(&why, err));
    kv_events_link_client_close(client);
    return err == PGD_ENOMEM ? EXIT_STATUS_SYSTEM : EXIT_NOT_REACHED;
}
