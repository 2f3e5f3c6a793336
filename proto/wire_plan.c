/* Embedded records are laid flat: what begins at a multiple of 8 is a part, either a block of values
 * at fixed places or an array. The padding in front of a part belongs to it, as in the walk.
 *
 * Ranges are held as one comparison without sign, values move as words of 8 and 4 bytes, an array
 * without elements is one comparison of its 8-byte head. Whatever is unusual (a value before which
 * there is padding, behind an array, texts, nested arrays of records) has no plan: no message that
 * comes thousands of times per second needs it.
 *
 * Most rows of a step look alike: the same arrays are empty, one token is in the result. A stencil is
 * a plan for elements of one such shape, in which everything stands at a fixed place: the heads of
 * the arrays and the padding are constants to compare with, the rest is moved. What is of another
 * shape goes by the plan; when two in a row do, the shape is taken anew. */
#include "proto/wire_plan.h"

#include <math.h>
#include <string.h>

typedef struct pair {
    int32_t id;
    float value;
} pair;

static uint32_t limit_value(const wire_limits *limits, uint32_t ref, double constant)
{
    int32_t x;
    if (ref == 0 || limits == NULL)
        return (uint32_t)(int32_t)constant;
    memcpy(&x, (const uint8_t *)limits + ref - 1, 4);
    return (uint32_t)x;
}

/* Integers of 4 bytes. False when no value is in range. */
static bool make_range(uint32_t *lo, uint32_t *span, const wire_field *f, wire_kind kind,
                       const wire_limits *limits)
{
    if (kind == WIRE_KIND_U32) {
        *lo = (uint32_t)f->min;
        *span = (uint32_t)f->max - *lo;
        return f->max_ref == 0 && f->max >= f->min;
    }
    int32_t min = (int32_t)f->min;
    int32_t max = (int32_t)limit_value(limits, f->max_ref, f->max);
    *lo = (uint32_t)min;
    *span = (uint32_t)max - (uint32_t)min;
    return limits == NULL || max >= min;
}

static wire_plan_part *add_part(wire_plan *p)
{
    if (p->n_parts == WIRE_PLAN_MAX_PARTS)
        return NULL;
    wire_plan_part *part = &p->parts[p->n_parts++];
    *part =
        (wire_plan_part){.first_move = (uint16_t)p->n_moves, .first_check = (uint16_t)p->n_checks};
    return part;
}

static bool add_move(wire_plan *p, wire_plan_part *part, uint32_t struct_at, uint32_t n_bytes)
{
    wire_plan_move *last = part->n_moves > 0 ? &p->moves[p->n_moves - 1] : NULL;
    /* Two words of 4 that are neighbours on both sides move as one. */
    if (last != NULL && n_bytes == 4 && last->n_bytes == 4 && last->wire_at + 4u == part->n_bytes &&
        last->struct_at + 4u == struct_at) {
        last->n_bytes = 8;
        return true;
    }
    if (p->n_moves == WIRE_PLAN_MAX_MOVES)
        return false;
    p->moves[p->n_moves++] =
        (wire_plan_move){(uint16_t)part->n_bytes, (uint16_t)struct_at, (uint16_t)n_bytes};
    part->n_moves++;
    return true;
}

static bool add_value(wire_plan *p, wire_plan_part *part, const wire_field *f, uint32_t struct_at,
                      const wire_limits *limits)
{
    uint32_t n_bytes = f->kind == WIRE_KIND_U64 ? 8 : 4;
    if (f->n != 1 || f->kind == WIRE_KIND_U8 || part->n_bytes % n_bytes != 0 ||
        (f->flags & WIRE_FLAG_SETS_GROUPS) || !add_move(p, part, struct_at, n_bytes))
        return false;
    wire_plan_check check = {.wire_at = part->n_bytes, .f32 = NULL};
    part->n_bytes += n_bytes;
    if (f->kind == WIRE_KIND_U64)
        return true;
    if (f->kind == WIRE_KIND_F32)
        check.f32 = f;
    else if (!make_range(&check.lo, &check.span, f, f->kind, limits))
        return false;
    if (check.f32 == NULL && check.span == UINT32_MAX)
        return true;
    if (p->n_checks == WIRE_PLAN_MAX_CHECKS || (f->kind == WIRE_KIND_F32 && f->max_ref != 0))
        return false;
    p->checks[p->n_checks++] = check;
    part->n_checks++;
    return true;
}

static bool add_array(wire_plan *p, const wire_field *f, uint32_t tag, uint32_t base,
                      const wire_limits *limits)
{
    wire_plan_part *part = add_part(p);
    if (part == NULL || f->count_bytes != 4 ||
        (f->elem != WIRE_KIND_I32 && f->elem != WIRE_KIND_U64 && f->elem != WIRE_KIND_PAIR) ||
        (f->kind == WIRE_KIND_INLINE && (f->flags & WIRE_FLAG_PER_GROUP)))
        return false;
    part->f = f;
    part->tag = tag;
    part->struct_at = base + f->offset;
    part->count_at = base + f->count_offset;
    part->elem_bytes = f->elem == WIRE_KIND_I32 ? 4 : 8;
    part->min_n = f->min_n;
    part->max_n =
        f->max_n_ref != 0 && limits != NULL ? limit_value(limits, f->max_n_ref, 0) : f->max_n;
    if (f->kind == WIRE_KIND_INLINE)
        p->clear_bytes = PGD_MIN(p->clear_bytes, part->struct_at);
    return f->elem == WIRE_KIND_U64 || make_range(&part->lo, &part->span, f, WIRE_KIND_I32, limits);
}

static bool add_record(wire_plan *p, const wire_record *rec, uint32_t base,
                       const wire_limits *limits)
{
    wire_plan_part *values = NULL; /* NULL: a value here would not be at a fixed place */
    for (uint32_t i = 0; i < rec->n_fields; i++) {
        const wire_field *f = &rec->fields[i];
        bool is_known = false;
        switch (f->kind) {
        case WIRE_KIND_RECORD:
            is_known = add_record(p, f->record, base + f->offset, limits);
            values = NULL;
            break;
        case WIRE_KIND_ARRAY:
        case WIRE_KIND_INLINE:
            is_known = add_array(p, f, i + 1, base, limits);
            values = NULL;
            break;
        case WIRE_KIND_STRING:
            break;
        default:
            if (values == NULL && i == 0)
                values = add_part(p);
            is_known = values != NULL && add_value(p, values, f, base + f->offset, limits);
        }
        if (!is_known)
            return false;
    }
    return true;
}

/* Nothing but inline arrays lies behind clear_bytes. */
static bool is_tail_inline(const wire_plan *p)
{
    for (uint32_t i = 0; i < p->n_moves; i++) {
        if (p->moves[i].struct_at + p->moves[i].n_bytes > p->clear_bytes)
            return false;
    }
    for (uint32_t i = 0; i < p->n_parts; i++) {
        const wire_plan_part *part = &p->parts[i];
        if (part->f != NULL &&
            ((part->f->kind == WIRE_KIND_ARRAY && part->struct_at >= p->clear_bytes) ||
             part->count_at >= p->clear_bytes))
            return false;
    }
    return true;
}

/* Nothing but values, each at the same place on both sides, and no padding. */
static bool is_flat(const wire_plan *p)
{
    bool is_same = p->n_parts == 1 && p->parts[0].f == NULL &&
                   p->parts[0].n_bytes == p->struct_bytes && p->struct_bytes % WIRE_ALIGN == 0;
    for (uint32_t i = 0; i < p->n_moves; i++)
        is_same = is_same && p->moves[i].wire_at == p->moves[i].struct_at;
    return is_same;
}

bool wire_plan_make(wire_plan *p, const wire_record *rec, const wire_limits *limits)
{
    p->n_parts = 0;
    p->n_moves = 0;
    p->n_checks = 0;
    p->struct_bytes = rec->struct_bytes;
    p->clear_bytes = rec->struct_bytes;
    if (rec->struct_bytes > UINT16_MAX || !add_record(p, rec, 0, limits) || !is_tail_inline(p))
        return false;
    p->is_flat = is_flat(p);
    return true;
}

/* --- stencils --------------------------------------------------------------------------------- */

#define MAX_HEADS  16
#define MAX_INLINE 2 /* elements */
#define MIN_ELEMS  4 /* of an array, for a stencil to be worth it */
#define MAX_ELEMS  (MAX_HEADS * MAX_INLINE)
#define MAX_CLEARS 32

typedef struct word_move {
    uint16_t wire_at;
    uint16_t struct_at;
} word_move;

typedef struct stencil {
    uint32_t n_bytes; /* of an element, a multiple of 8; 0 = no stencil */
    uint32_t n_heads, n_pads, n_counts, n_nulls, n_moves8, n_moves4, n_checks;
    struct {
        uint64_t value;
        uint32_t at;
    } heads[MAX_HEADS];
    struct {
        uint32_t struct_at;
        int32_t n;
    } counts[MAX_HEADS];
    uint16_t pads[MAX_HEADS + WIRE_PLAN_MAX_PARTS]; /* 4 bytes each */
    uint16_t nulls[MAX_HEADS]; /* pointers in the struct that say: no elements */
    uint32_t n_clears;
    uint16_t clears[MAX_CLEARS]; /* words of 8 in the struct that no move of 8 fills */
    word_move moves8[WIRE_PLAN_MAX_MOVES];
    word_move moves4[WIRE_PLAN_MAX_MOVES + MAX_ELEMS];
    struct {
        uint32_t at, lo, span;
    } checks[WIRE_PLAN_MAX_CHECKS + MAX_ELEMS];
} stencil;

static bool add_stencil_array(stencil *s, uint32_t *at, const wire_plan_part *part, int32_t n,
                              int32_t g)
{
    const wire_field *f = part->f;
    if (s->n_heads == MAX_HEADS || n < 0 || (uint32_t)n < part->min_n ||
        (uint32_t)n > part->max_n || (f->flags & WIRE_FLAG_SAME_COUNT) ||
        (f->kind == WIRE_KIND_ARRAY && n != 0))
        return false;
    s->heads[s->n_heads].value = part->tag | (uint64_t)(uint32_t)n << 32;
    s->heads[s->n_heads++].at = *at;
    *at += 8;
    if (f->flags & WIRE_FLAG_OPTIONAL) {
        s->nulls[s->n_nulls++] = (uint16_t)(part->struct_at + 8 * (uint32_t)g);
        return true;
    }
    s->counts[s->n_counts].struct_at = part->count_at + 4 * (uint32_t)g;
    s->counts[s->n_counts++].n = n;
    for (int32_t i = 0; i < n; i++) { /* inline */
        if (f->elem != WIRE_KIND_I32 || i == MAX_INLINE)
            return false;
        s->moves4[s->n_moves4++] =
            (word_move){(uint16_t)*at, (uint16_t)(part->struct_at + 4 * (uint32_t)i)};
        s->checks[s->n_checks].at = *at;
        s->checks[s->n_checks].lo = part->lo;
        s->checks[s->n_checks++].span = part->span;
        *at += 4;
    }
    return true;
}

static bool add_stencil_values(stencil *s, uint32_t *at, const wire_plan *p,
                               const wire_plan_part *part)
{
    for (uint32_t i = 0; i < part->n_checks; i++) {
        const wire_plan_check *c = &p->checks[part->first_check + i];
        if (c->f32 != NULL)
            return false;
        s->checks[s->n_checks].at = *at + c->wire_at;
        s->checks[s->n_checks].lo = c->lo;
        s->checks[s->n_checks++].span = c->span;
    }
    for (uint32_t i = 0; i < part->n_moves; i++) {
        const wire_plan_move *m = &p->moves[part->first_move + i];
        word_move move = {(uint16_t)(*at + m->wire_at), m->struct_at};
        if (m->n_bytes == 8)
            s->moves8[s->n_moves8++] = move;
        else
            s->moves4[s->n_moves4++] = move;
    }
    *at += part->n_bytes;
    return true;
}

static bool is_filled(const stencil *s, uint32_t struct_at)
{
    for (uint32_t i = 0; i < s->n_moves8; i++) {
        if (s->moves8[i].struct_at == struct_at)
            return true;
    }
    return false;
}

static bool add_clears(stencil *s, uint32_t clear_bytes)
{
    s->n_clears = 0;
    for (uint32_t at = 0; at < clear_bytes; at += 8) {
        if (is_filled(s, at))
            continue;
        if (s->n_clears == MAX_CLEARS)
            return false;
        s->clears[s->n_clears++] = (uint16_t)at;
    }
    return clear_bytes % 8 == 0;
}

/* For elements like msg: as many elements in each array. */
static void make_stencil(stencil *s, const wire_plan *p, const uint8_t *msg, int32_t n_groups)
{
    uint32_t at = 0;
    s->n_bytes = 0;
    s->n_heads = s->n_pads = s->n_counts = s->n_nulls = 0;
    s->n_moves8 = s->n_moves4 = s->n_checks = 0;
    for (uint32_t i = 0; i < p->n_parts; i++) {
        const wire_plan_part *part = &p->parts[i];
        bool is_repeated = part->f != NULL && (part->f->flags & WIRE_FLAG_PER_GROUP);
        for (int32_t g = 0; g < (is_repeated ? n_groups : 1); g++) {
            int32_t n = 0;
            if (at % 8 != 0) {
                s->pads[s->n_pads++] = (uint16_t)at;
                at += 4;
            }
            if (part->f != NULL && !(part->f->flags & WIRE_FLAG_OPTIONAL))
                memcpy(&n, msg + part->count_at + 4 * (size_t)g, 4);
            if (part->f != NULL ? !add_stencil_array(s, &at, part, n, g)
                                : !add_stencil_values(s, &at, p, part))
                return;
        }
    }
    if (at % 8 == 0 && add_clears(s, p->clear_bytes))
        s->n_bytes = at;
}

/* Counts elements that do not fit; takes the shape anew from the second in a row. */
static inline void note_misfit(stencil *s, int *n_misfits, const wire_plan *p, const uint8_t *msg,
                               size_t n_left, int32_t n_groups)
{
    if (++*n_misfits < 2 || n_left < MIN_ELEMS)
        return;
    *n_misfits = 0;
    make_stencil(s, p, msg, n_groups);
}

/* --- writing ---------------------------------------------------------------------------------- */

static inline size_t pad_to_8(uint8_t *data, size_t pos)
{
    size_t n_pad = -pos & 7;
    if (data != NULL && n_pad > 0)
        memset(data + pos, 0, n_pad);
    return pos + n_pad;
}

static inline void move_word(uint8_t *to, const uint8_t *from, uint32_t n_bytes)
{
    if (n_bytes == 8)
        memcpy(to, from, 8);
    else
        memcpy(to, from, 4);
}

static inline size_t write_array(uint8_t *data, size_t pos, const wire_plan_part *part,
                                 const uint8_t *msg, int32_t n_groups)
{
    const wire_field *f = part->f;
    int32_t n_repeats = f->flags & WIRE_FLAG_PER_GROUP ? n_groups : 1;
    for (int32_t g = 0; g < n_repeats; g++) {
        int32_t n_elems;
        memcpy(&n_elems, msg + part->count_at + 4 * (size_t)g, 4);
        const uint8_t *at = msg + part->struct_at + 8 * (size_t)g;
        const uint8_t *elems = at;
        if (f->kind == WIRE_KIND_ARRAY)
            memcpy(&elems, at, sizeof elems);
        if ((f->flags & WIRE_FLAG_OPTIONAL) && elems == NULL)
            n_elems = 0;
        PGD_ASSERTF(n_elems == 0 || (n_elems > 0 && elems != NULL),
                    "wire: field %s has a bad count %d", f->name, n_elems);
        pos = pad_to_8(data, pos);
        if (data != NULL) {
            uint64_t head = part->tag | (uint64_t)(uint32_t)n_elems << 32;
            memcpy(data + pos, &head, 8);
            if (n_elems == 1)
                move_word(data + pos + 8, elems, part->elem_bytes);
            else if (n_elems > 1)
                memcpy(data + pos + 8, elems, (size_t)n_elems * part->elem_bytes);
        }
        pos += 8 + (size_t)n_elems * part->elem_bytes;
    }
    return pos;
}

static inline bool fits(const stencil *s, const uint8_t *msg)
{
    int32_t n;
    uint64_t pointer;
    for (uint32_t i = 0; i < s->n_counts; i++) {
        memcpy(&n, msg + s->counts[i].struct_at, 4);
        if (n != s->counts[i].n)
            return false;
    }
    for (uint32_t i = 0; i < s->n_nulls; i++) {
        memcpy(&pointer, msg + s->nulls[i], 8);
        if (pointer != 0)
            return false;
    }
    return s->n_bytes > 0;
}

static inline void stencil_write(uint8_t *to, const stencil *s, const uint8_t *msg)
{
    for (uint32_t i = 0; i < s->n_heads; i++)
        memcpy(to + s->heads[i].at, &s->heads[i].value, 8);
    for (uint32_t i = 0; i < s->n_pads; i++)
        memset(to + s->pads[i], 0, 4);
    for (uint32_t i = 0; i < s->n_moves8; i++)
        memcpy(to + s->moves8[i].wire_at, msg + s->moves8[i].struct_at, 8);
    for (uint32_t i = 0; i < s->n_moves4; i++)
        memcpy(to + s->moves4[i].wire_at, msg + s->moves4[i].struct_at, 4);
}

static inline size_t write_elem(uint8_t *data, size_t pos, const wire_plan *p, const uint8_t *msg,
                                int32_t n_groups)
{
    for (uint32_t i = 0; i < p->n_parts; i++) {
        const wire_plan_part *part = &p->parts[i];
        if (part->f != NULL) {
            pos = write_array(data, pos, part, msg, n_groups);
            continue;
        }
        pos = pad_to_8(data, pos);
        const wire_plan_move *move = &p->moves[part->first_move];
        for (uint32_t m = 0; data != NULL && m < part->n_moves; m++)
            move_word(data + pos + move[m].wire_at, msg + move[m].struct_at, move[m].n_bytes);
        pos += part->n_bytes;
    }
    return pos;
}

/* Measuring is writing with no data, compiled twice. */
static inline __attribute__((always_inline)) size_t write_elems(uint8_t *data, size_t pos,
                                                                const wire_plan *p,
                                                                const uint8_t *msg, size_t n_elems,
                                                                int32_t n_groups)
{
    stencil s = {.n_bytes = 0};
    int n_misfits = 1;
    for (size_t e = 0; e < n_elems; e++, msg += p->struct_bytes) {
        if (pos % 8 == 0 && fits(&s, msg)) {
            if (data != NULL)
                stencil_write(data + pos, &s, msg);
            pos += s.n_bytes;
            n_misfits = 0;
            continue;
        }
        pos = write_elem(data, pos, p, msg, n_groups);
        note_misfit(&s, &n_misfits, p, msg, n_elems - e, n_groups);
    }
    return pos;
}

size_t wire_plan_write(uint8_t *data, size_t pos, const wire_plan *p, const uint8_t *elems,
                       size_t n_elems, int32_t n_groups)
{
    if (p->is_flat) {
        if (data != NULL)
            memcpy(data + pos, elems, n_elems * p->struct_bytes);
        return pos + n_elems * p->struct_bytes;
    }
    return data != NULL ? write_elems(data, pos, p, elems, n_elems, n_groups)
                        : write_elems(NULL, pos, p, elems, n_elems, n_groups);
}

/* --- reading ---------------------------------------------------------------------------------- */

static inline bool skip_to_8(size_t *pos, const uint8_t *data, size_t n_bytes)
{
    size_t n_pad = -*pos & 7;
    if (n_pad > n_bytes - *pos)
        return false;
    for (size_t i = 0; i < n_pad; i++) {
        if (data[*pos + i] != 0)
            return false;
    }
    *pos += n_pad;
    return true;
}

static inline bool is_f32_in_range(const uint8_t *at, const wire_field *f)
{
    float x;
    memcpy(&x, at, 4);
    return (double)x >= f->min && (double)x <= f->max;
}

static inline bool read_values(uint8_t *msg, size_t *pos, const wire_plan *p,
                               const wire_plan_part *part, const uint8_t *data, size_t n_bytes)
{
    if (part->n_bytes > n_bytes - *pos)
        return false;
    const uint8_t *at = data + *pos;
    const wire_plan_check *check = &p->checks[part->first_check];
    for (uint32_t i = 0; i < part->n_checks; i++) {
        uint32_t x;
        memcpy(&x, at + check[i].wire_at, 4);
        if (check[i].f32 != NULL ? !is_f32_in_range(at + check[i].wire_at, check[i].f32)
                                 : x - check[i].lo > check[i].span)
            return false;
    }
    const wire_plan_move *move = &p->moves[part->first_move];
    for (uint32_t m = 0; m < part->n_moves; m++)
        move_word(msg + move[m].struct_at, at + move[m].wire_at, move[m].n_bytes);
    *pos += part->n_bytes;
    return true;
}

static bool are_in_range(const wire_plan_part *part, const uint8_t *at, uint32_t n_elems)
{
    uint32_t n_bad = 0;
    if (part->f->elem == WIRE_KIND_I32) {
        for (uint32_t i = 0; i < n_elems; i++) {
            uint32_t x;
            memcpy(&x, at + 4 * (size_t)i, 4);
            n_bad += x - part->lo > part->span;
        }
    } else if (part->f->elem == WIRE_KIND_PAIR) {
        for (uint32_t i = 0; i < n_elems; i++) {
            pair x;
            memcpy(&x, at + 8 * (size_t)i, 8);
            n_bad += (uint32_t)x.id - part->lo > part->span || !isfinite(x.value);
        }
    }
    return n_bad == 0;
}

static inline bool read_array(uint8_t *msg, size_t *pos, const wire_plan_part *part,
                              const uint8_t *data, size_t n_bytes, int32_t n_groups)
{
    const wire_field *f = part->f;
    int32_t n_repeats = f->flags & WIRE_FLAG_PER_GROUP ? n_groups : 1;
    for (int32_t g = 0; g < n_repeats; g++) {
        uint8_t *count_at = msg + part->count_at + 4 * (size_t)g;
        uint64_t head;
        if (!skip_to_8(pos, data, n_bytes) || n_bytes - *pos < 8)
            return false;
        memcpy(&head, data + *pos, 8);
        uint32_t n_elems = (uint32_t)(head >> 32);
        size_t elems_bytes = (size_t)n_elems * part->elem_bytes;
        if ((uint32_t)head != part->tag || n_elems < part->min_n || n_elems > part->max_n ||
            elems_bytes > n_bytes - *pos - 8)
            return false;
        if (f->flags & (WIRE_FLAG_OPTIONAL | WIRE_FLAG_SAME_COUNT)) {
            uint32_t n_said;
            memcpy(&n_said, count_at, 4);
            if (n_elems != n_said && !((f->flags & WIRE_FLAG_OPTIONAL) && n_elems == 0))
                return false;
        }
        if (!(f->flags & WIRE_FLAG_OPTIONAL))
            memcpy(count_at, &n_elems, 4);
        *pos += 8;
        if (n_elems == 0)
            continue; /* the pointer is cleared */
        const uint8_t *elems = data + *pos;
        if (!are_in_range(part, elems, n_elems))
            return false;
        if (f->kind == WIRE_KIND_ARRAY)
            memcpy(msg + part->struct_at + 8 * (size_t)g, &elems, sizeof elems);
        else
            memcpy(msg + part->struct_at, elems, elems_bytes);
        *pos += elems_bytes;
    }
    return true;
}

static inline bool read_elem(uint8_t *msg, size_t *pos, const wire_plan *p, const uint8_t *data,
                             size_t n_bytes, int32_t n_groups)
{
    size_t at = *pos;
    memset(msg, 0, p->clear_bytes);
    for (uint32_t i = 0; i < p->n_parts; i++) {
        const wire_plan_part *part = &p->parts[i];
        bool ok = skip_to_8(&at, data, n_bytes);
        if (ok && part->f != NULL)
            ok = read_array(msg, &at, part, data, n_bytes, n_groups);
        else if (ok)
            ok = read_values(msg, &at, p, part, data, n_bytes);
        if (!ok)
            return false;
    }
    *pos = at;
    return true;
}

static inline bool stencil_read(uint8_t *msg, const stencil *s, const uint8_t *from)
{
    uint64_t n_bad = 0;
    for (uint32_t i = 0; i < s->n_heads; i++) {
        uint64_t x;
        memcpy(&x, from + s->heads[i].at, 8);
        n_bad |= x ^ s->heads[i].value;
    }
    for (uint32_t i = 0; i < s->n_pads; i++) {
        uint32_t x;
        memcpy(&x, from + s->pads[i], 4);
        n_bad |= x;
    }
    for (uint32_t i = 0; i < s->n_checks; i++) {
        uint32_t x;
        memcpy(&x, from + s->checks[i].at, 4);
        n_bad |= x - s->checks[i].lo > s->checks[i].span;
    }
    if (n_bad != 0)
        return false;
    for (uint32_t i = 0; i < s->n_clears; i++)
        memset(msg + s->clears[i], 0, 8);
    for (uint32_t i = 0; i < s->n_counts; i++)
        memcpy(msg + s->counts[i].struct_at, &s->counts[i].n, 4);
    for (uint32_t i = 0; i < s->n_moves8; i++)
        memcpy(msg + s->moves8[i].struct_at, from + s->moves8[i].wire_at, 8);
    for (uint32_t i = 0; i < s->n_moves4; i++)
        memcpy(msg + s->moves4[i].struct_at, from + s->moves4[i].wire_at, 4);
    return true;
}

bool wire_plan_is_in_range(const wire_plan *p, const uint8_t *elems, size_t n_elems)
{
    const uint8_t *end = elems + n_elems * p->struct_bytes;
    uint32_t n_bad = 0;
    for (uint32_t i = 0; i < p->n_checks; i++) {
        const wire_plan_check c = p->checks[i];
        for (const uint8_t *e = elems; c.f32 != NULL && e < end; e += p->struct_bytes)
            n_bad += !is_f32_in_range(e + c.wire_at, c.f32);
        for (const uint8_t *e = elems; c.f32 == NULL && e < end; e += p->struct_bytes) {
            uint32_t x;
            memcpy(&x, e + c.wire_at, 4);
            n_bad += x - c.lo > c.span;
        }
    }
    return n_bad == 0;
}

size_t wire_plan_read(uint8_t *elems, size_t *pos, const wire_plan *p, size_t n_elems,
                      const uint8_t *data, size_t n_bytes, int32_t n_groups)
{
    stencil s = {.n_bytes = 0};
    int n_misfits = 1;
    uint8_t *msg = elems;
    for (size_t e = 0; e < n_elems; e++, msg += p->struct_bytes) {
        if (s.n_bytes > 0 && *pos % 8 == 0 && s.n_bytes <= n_bytes - *pos &&
            stencil_read(msg, &s, data + *pos)) {
            *pos += s.n_bytes;
            n_misfits = 0;
            continue;
        }
        if (!read_elem(msg, pos, p, data, n_bytes, n_groups))
            return e;
        note_misfit(&s, &n_misfits, p, msg, n_elems - e, n_groups);
    }
    return n_elems;
}
