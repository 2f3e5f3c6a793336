/* Normalisation steps.
 *
 * NFC takes decomposition and composition of single characters from utf8proc but orders combining
 * marks itself: the library's loop moves a mark back one place at a time, quadratic in the length
 * of a run of marks, and a client can send a megabyte of them. Text whose characters all lie below
 * U+0300 is NFC as it stands and is passed through.
 *
 * The tables are those of the system's utf8proc. Where its Unicode version is newer than the
 * reference's, marks assigned in between take part in ordering here and not there.
 */
#include "engine/text/normalizer.h"

#include <string.h>

#include <utf8proc.h>

#include "common/mem.h"
#include "common/utf8.h"

#define NFC_OPTIONS       (UTF8PROC_STABLE | UTF8PROC_COMPOSE)
#define MAX_DECOMPOSED    4 /* code points that one gives under canonical decomposition */
#define FIRST_NFC_CONCERN 0x300
#define N_CLASSES         256 /* canonical combining classes */

void normalizer_deinit(normalizer *z)
{
    for (int32_t i = 0; i < z->n_steps; i++) {
        mem_free(z->steps[i].what);
        mem_free(z->steps[i].with);
    }
    *z = (normalizer){0};
}

pgd_err normalizer_add(normalizer *z, normalizer_kind kind, const char *what, size_t n_what_bytes,
                       const char *with, size_t n_with_bytes)
{
    PGD_ASSERT(kind != NORMALIZER_REPLACE || n_what_bytes > 0);
    if (z->n_steps == NORMALIZER_MAX_STEPS)
        return PGD_ERANGE;
    normalizer_step step = {
        .kind = kind, .n_what_bytes = n_what_bytes, .n_with_bytes = n_with_bytes};
    step.what = mem_strndup(what == NULL ? "" : what, n_what_bytes);
    step.with = mem_strndup(with == NULL ? "" : with, n_with_bytes);
    if (step.what == NULL || step.with == NULL) {
        mem_free(step.what);
        mem_free(step.with);
        return PGD_ENOMEM;
    }
    z->steps[z->n_steps++] = step;
    return PGD_OK;
}

static int32_t combining_class(int32_t cp)
{
    return utf8proc_get_property(cp)->combining_class;
}

/* Stable sort of marks[n] by class: by insertion for the usual few, by counting for long runs. */
static bool sort_marks(int32_t *marks, size_t n)
{
    if (n <= 32) {
        for (size_t i = 1; i < n; i++) {
            int32_t mark = marks[i];
            int32_t class = combining_class(mark);
            size_t k = i;
            for (; k > 0 && combining_class(marks[k - 1]) > class; k--)
                marks[k] = marks[k - 1];
            marks[k] = mark;
        }
        return true;
    }
    int32_t *sorted = mem_realloc_array(NULL, n, sizeof(*sorted));
    if (sorted == NULL)
        return false;
    size_t at[N_CLASSES + 1] = {0};
    for (size_t i = 0; i < n; i++)
        at[combining_class(marks[i]) + 1]++;
    for (int32_t c = 0; c < N_CLASSES; c++)
        at[c + 1] += at[c];
    for (size_t i = 0; i < n; i++)
        sorted[at[combining_class(marks[i])]++] = marks[i];
    memcpy(marks, sorted, n * sizeof(*marks));
    mem_free(sorted);
    return true;
}

/* Canonical order: each run of characters of class > 0, sorted. */
static bool order_marks(int32_t *cps, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t end = i;
        while (end < n && combining_class(cps[end]) > 0)
            end++;
        if (end - i > 1 && !sort_marks(cps + i, end - i))
            return false;
        i = PGD_MAX(end, i + 1);
    }
    return true;
}

/* text: well-formed. */
static pgd_err append_nfc(strbuf *out, const char *text, size_t n_bytes)
{
    int32_t *cps = mem_realloc_array(NULL, n_bytes + MAX_DECOMPOSED, sizeof(*cps));
    if (cps == NULL)
        return PGD_ENOMEM;
    pgd_err err = PGD_OK;
    size_t cap = n_bytes + MAX_DECOMPOSED;
    size_t n = 0;
    int boundary = 0;
    for (size_t i = 0; i < n_bytes;) {
        uint32_t cp;
        size_t used;
        if (utf8_decode(&cp, &used, text + i, n_bytes - i) != UTF8_OK)
            PGD_PANIC("not UTF-8 at byte %zu of %zu", i, n_bytes);
        i += used;
        if (cap - n < MAX_DECOMPOSED) {
            int32_t *grown = mem_realloc_array(cps, 2 * cap, sizeof(*cps));
            if (grown == NULL) {
                err = PGD_ENOMEM;
                goto done;
            }
            cps = grown;
            cap *= 2;
        }
        utf8proc_ssize_t got = utf8proc_decompose_char(
            (int32_t)cp, cps + n, (utf8proc_ssize_t)(cap - n), NFC_OPTIONS, &boundary);
        PGD_ASSERTF(got >= 0 && got <= MAX_DECOMPOSED, "U+%04X decomposes to %td", cp,
                    (ptrdiff_t)got);
        n += (size_t)got;
    }
    if (!order_marks(cps, n)) {
        err = PGD_ENOMEM;
        goto done;
    }
    utf8proc_ssize_t n_composed = utf8proc_normalize_utf32(cps, (utf8proc_ssize_t)n, NFC_OPTIONS);
    PGD_ASSERT(n_composed >= 0);
    for (utf8proc_ssize_t i = 0; i < n_composed; i++) {
        char bytes[4];
        strbuf_append(out, bytes, utf8_encode(bytes, (uint32_t)cps[i]));
    }
done:
    mem_free(cps);
    return err;
}

static pgd_err apply_nfc(strbuf *out, const char *text, size_t n_bytes)
{
    size_t i = 0;
    while (i < n_bytes) {
        /* A stretch of well-formed text, then maybe an invalid byte. */
        size_t end = i;
        bool concerned = false;
        bool broken = false;
        while (end < n_bytes && !broken) {
            uint32_t cp;
            size_t used;
            if (utf8_decode(&cp, &used, text + end, n_bytes - end) == UTF8_OK) {
                concerned = concerned || cp >= FIRST_NFC_CONCERN;
                end += used;
            } else {
                broken = true;
            }
        }
        if (concerned)
            PGD_TRY(append_nfc(out, text + i, end - i));
        else
            strbuf_append(out, text + i, end - i);
        if (broken) {
            strbuf_append(out, text + end, 1);
            end++;
        }
        i = end;
    }
    return PGD_OK;
}

static void apply_replace(const normalizer_step *step, strbuf *out, const char *text,
                          size_t n_bytes)
{
    size_t i = 0;
    while (i < n_bytes) {
        const char *found = memmem(text + i, n_bytes - i, step->what, step->n_what_bytes);
        size_t end = found == NULL ? n_bytes : (size_t)(found - text);
        strbuf_append(out, text + i, end - i);
        if (found != NULL) {
            strbuf_append(out, step->with, step->n_with_bytes);
            end += step->n_what_bytes;
        }
        i = end;
    }
}

static pgd_err apply_step(const normalizer_step *step, strbuf *out, const char *text,
                          size_t n_bytes)
{
    strbuf_reset(out);
    switch (step->kind) {
    case NORMALIZER_NFC:
        PGD_TRY(apply_nfc(out, text, n_bytes));
        break;
    case NORMALIZER_PREPEND:
        if (n_bytes > 0) {
            strbuf_append(out, step->with, step->n_with_bytes);
            strbuf_append(out, text, n_bytes);
        }
        break;
    case NORMALIZER_REPLACE:
        apply_replace(step, out, text, n_bytes);
        break;
    }
    return out->failed ? PGD_ENOMEM : PGD_OK;
}

pgd_err normalizer_apply(const normalizer *z, const char *text, size_t n_bytes, strbuf *out,
                         strbuf *spare)
{
    if (z->n_steps == 0) {
        strbuf_reset(out);
        strbuf_append(out, text, n_bytes);
        return out->failed ? PGD_ENOMEM : PGD_OK;
    }
    PGD_TRY(apply_step(&z->steps[0], out, text, n_bytes));
    for (int32_t i = 1; i < z->n_steps; i++) {
        strbuf last = *out;
        *out = *spare;
        *spare = last;
        PGD_TRY(
            apply_step(&z->steps[i], out, spare->data == NULL ? "" : spare->data, spare->n_bytes));
    }
    return PGD_OK;
}
