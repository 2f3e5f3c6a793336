/* One pass finds the bounds of name, labels and value of every sample; labels are only taken apart
 * when somebody asks for one, by the same function that checked them. A page is some hundred lines:
 * looking a name up by walking them costs nothing that a person would notice. */
#include "engine/status/metrics_text.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

static bool is_name_char(char c, bool is_first)
{
    return isalpha((unsigned char)c) || c == '_' || c == ':' ||
           (!is_first && isdigit((unsigned char)c));
}

static const char *skip_blank(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t'))
        at++;
    return at;
}

static const char *skip_name(const char *at, const char *end)
{
    const char *start = at;
    while (at < end && is_name_char(*at, at == start))
        at++;
    return at;
}

/* name="value", a comma behind it perhaps; NULL when that is not what stands there. The value's
 * bounds, escapes included, go to *value and *value_end. */
static const char *read_label(const char *at, const char *end, const char **name_end,
                              const char **value, const char **value_end)
{
    *name_end = skip_name(at, end);
    const char *equals = skip_blank(*name_end, end);
    if (*name_end == at || equals == end || *equals != '=')
        return NULL;
    at = skip_blank(equals + 1, end);
    if (at == end || *at != '"')
        return NULL;
    *value = ++at;
    while (at < end && *at != '"')
        at += *at == '\\' && at + 1 < end ? 2 : 1;
    if (at >= end)
        return NULL;
    *value_end = at;
    at = skip_blank(at + 1, end);
    if (at < end && *at == ',')
        return skip_blank(at + 1, end);
    return at < end && *at != '}' ? NULL : at;
}

static bool read_value(const char *at, const char *end, double *out)
{
    char digits[64];
    at = skip_blank(at, end);
    size_t n = 0;
    while (at + n < end && at[n] != ' ' && at[n] != '\t' && at[n] != '\r')
        n++;
    if (n == 0 || n >= sizeof(digits) || isspace((unsigned char)*at))
        return false;
    memcpy(digits, at, n);
    digits[n] = '\0';
    char *stop;
    *out = strtod(digits, &stop); /* takes +Inf, -Inf and NaN too */
    return *stop == '\0';
}

static bool read_sample(metrics_sample *s, const char *at, const char *end)
{
    *s = (metrics_sample){.name = at};
    at = skip_name(at, end);
    s->n_name = (size_t)(at - s->name);
    if (s->n_name == 0 || at == end)
        return false;
    at = skip_blank(at, end);
    if (at < end && *at == '{') {
        const char *name_end;
        const char *value;
        const char *value_end;
        s->labels = ++at;
        at = skip_blank(at, end);
        while (at != NULL && at < end && *at != '}')
            at = read_label(at, end, &name_end, &value, &value_end);
        if (at == NULL || at == end)
            return false;
        s->n_labels = (size_t)(at - s->labels);
        at++;
    }
    return read_value(at, end, &s->value);
}

static pgd_err add_sample(metrics_text *m, const metrics_sample *s, pgd_why *why)
{
    if (m->n_samples == METRICS_TEXT_MAX_SAMPLES)
        return pgd_fail(why, PGD_ERANGE, "metrics: expected at most %d samples, got more",
                        METRICS_TEXT_MAX_SAMPLES);
    if (m->n_samples == m->cap) {
        size_t cap = PGD_MAX(2 * m->cap, 256u);
        metrics_sample *grown = mem_realloc_array(m->samples, cap, sizeof(*grown));
        if (grown == NULL)
            return pgd_fail(why, PGD_ENOMEM, "out of memory");
        m->samples = grown;
        m->cap = cap;
    }
    m->samples[m->n_samples++] = *s;
    return PGD_OK;
}

pgd_err metrics_text_parse(metrics_text *out, const char *text, size_t n_bytes, pgd_why *why)
{
    const char *end = text + n_bytes;
    int line_number = 1;
    *out = (metrics_text){0};
    for (const char *line = text; line < end; line_number++) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        const char *stop = newline != NULL ? newline : end;
        const char *at = skip_blank(line, stop);
        metrics_sample s;
        pgd_err err = PGD_OK;
        line = newline != NULL ? newline + 1 : end;
        if (at == stop || *at == '#' || *at == '\r')
            continue;
        if (read_sample(&s, at, stop))
            err = add_sample(out, &s, why);
        else
            err = pgd_fail(why, PGD_EFORMAT,
                           "metrics, line %d: expected name{labels} value, got \"%.*s\"",
                           line_number, (int)PGD_MIN(stop - at, 60), at);
        if (err != PGD_OK) {
            metrics_text_deinit(out);
            return err;
        }
    }
    return PGD_OK;
}

void metrics_text_deinit(metrics_text *m)
{
    mem_free(m->samples);
    *m = (metrics_text){0};
}

const metrics_sample *metrics_text_next(const metrics_text *m, const metrics_sample *at,
                                        const char *name)
{
    size_t n = strlen(name);
    size_t i = at == NULL ? 0 : (size_t)(at - m->samples) + 1;
    for (; i < m->n_samples; i++) {
        if (m->samples[i].n_name == n && memcmp(m->samples[i].name, name, n) == 0)
            return &m->samples[i];
    }
    return NULL;
}

bool metrics_text_sum(const metrics_text *m, const char *name, double *out)
{
    const metrics_sample *s = metrics_text_next(m, NULL, name);
    double sum = 0;
    if (s == NULL)
        return false;
    for (; s != NULL; s = metrics_text_next(m, s, name))
        sum += s->value;
    *out = sum;
    return true;
}

bool metrics_text_label(const metrics_sample *s, const char *label, char *out, size_t cap)
{
    const char *name_end;
    const char *value = NULL;
    const char *value_end = NULL;
    size_t n_label = strlen(label);
    size_t n = 0;
    out[0] = '\0';
    if (s->n_labels == 0)
        return false;
    const char *end = s->labels + s->n_labels;
    const char *at = skip_blank(s->labels, end);
    while (at != NULL && at < end) {
        const char *name = at;
        at = read_label(at, end, &name_end, &value, &value_end);
        if (at == NULL)
            return false;
        if ((size_t)(name_end - name) == n_label && memcmp(name, label, n_label) == 0)
            break;
        value = NULL;
    }
    if (value == NULL)
        return false;
    for (const char *c = value; c < value_end && n + 1 < cap; c++) {
        bool is_escape = *c == '\\' && c + 1 < value_end;
        if (is_escape)
            c++;
        out[n++] = is_escape && *c == 'n' ? '\n' : *c;
    }
    out[n] = '\0';
    return true;
}
