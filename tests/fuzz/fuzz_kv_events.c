/* Any bytes as a batch of KV events from a server, as `paged status --events` reads it: refused with a
 * reason, or read to its end, with all that is borrowed inside the batch. What is printed of it is
 * lines of one form, and in JSON an object each, whatever texts and numbers were in it. */
#include <ctype.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/json.h"
#include "engine/status/event_report.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void check_inside(const void *at, size_t n, const uint8_t *data, size_t n_bytes)
{
    const uint8_t *bytes = at;
    PGD_ASSERT(bytes >= data && n <= n_bytes && bytes + n <= data + n_bytes);
}

static void check_text(kv_event_text t, const uint8_t *data, size_t n_bytes)
{
    if (t.text != NULL)
        check_inside(t.text, t.n_bytes, data, n_bytes);
    else
        PGD_ASSERT(t.n_bytes == 0);
}

static void check_numbers(kv_event_numbers n, const uint8_t *data, size_t n_bytes)
{
    uint64_t number;
    uint32_t n_told = n.n;
    uint32_t n_read = 0;
    if (n.n > 0)
        check_inside(n.at, (size_t)(n.end - n.at), data, n_bytes);
    while (kv_event_unpack_next_number(&number, &n))
        n_read++;
    PGD_ASSERT(n_read == n_told && n.at == n.end);
}

/* Returns how many events it has; -1: refused somewhere. */
static int64_t read_batch(const uint8_t *data, size_t n_bytes)
{
    kv_event_unpack u;
    pgd_why why = {{0}};
    int64_t n = 0;
    if (kv_event_unpack_begin(&u, data, n_bytes, &why) != PGD_OK) {
        PGD_ASSERT(why.text[0] != '\0');
        return -1;
    }
    for (; u.n_left > 0; n++) {
        kv_unpacked_event ev;
        if (kv_event_unpack_next(&ev, &u, &why) != PGD_OK) {
            PGD_ASSERT(why.text[0] != '\0');
            return -1;
        }
        PGD_ASSERT(ev.tag <= KV_EVENT_TAG_OTHER);
        check_text(ev.medium, data, n_bytes);
        check_text(ev.attention, data, n_bytes);
        check_numbers(ev.names, data, n_bytes);
        check_numbers(ev.tokens, data, n_bytes);
    }
    return n;
}

/* hh:mm:ss.mmm #seq, and nothing that a terminal would take for more than text. */
static void check_line(const char *line, size_t n)
{
    static const char form[] = "00:00:00.000 #7 ";
    PGD_ASSERT(n >= sizeof form - 1);
    for (size_t i = 0; i < sizeof form - 1; i++)
        PGD_ASSERT(form[i] == '0' ? isdigit((unsigned char)line[i]) : form[i] == line[i]);
    for (size_t i = 0; i < n; i++)
        PGD_ASSERT(line[i] >= 0x20 && line[i] < 0x7f);
}

static void check_object(const char *line, size_t n)
{
    cJSON *root;
    PGD_ASSERT(json_parse(&root, line, n, 2, NULL) == PGD_OK && cJSON_IsObject(root));
    PGD_ASSERT(cJSON_IsString(json_get(root, "event")));
    cJSON_Delete(root);
}

static void check_report(const uint8_t *data, size_t n_bytes, bool is_json, int64_t n_events)
{
    strbuf out;
    pgd_why why = {{0}};
    int64_t n_lines = 0;
    strbuf_init(&out);
    pgd_err err = event_report_batch(&out, is_json, 7, data, n_bytes, &why);
    PGD_ASSERT((err == PGD_OK) == (n_events >= 0) && !out.failed);
    for (size_t at = 0; at < out.n_bytes; n_lines++) {
        const char *line = out.data + at;
        const char *end = memchr(line, '\n', out.n_bytes - at);
        PGD_ASSERT(end != NULL);
        (is_json ? check_object : check_line)(line, (size_t)(end - line));
        at += (size_t)(end - line) + 1;
    }
    PGD_ASSERT(n_events < 0 || n_lines == n_events);
    strbuf_deinit(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    int64_t n_events = read_batch(data, n_bytes);
    check_report(data, n_bytes, false, n_events);
    check_report(data, n_bytes, true, n_events);
    return 0;
}
