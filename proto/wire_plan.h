/* The field table of a record, made ready for many elements of one array: where each value goes is
 * worked out once, not for each element. Only for wire.c.
 *
 * A plan knows records of plain values and plain arrays, embedded records included; for others
 * wire_plan_make says no and wire.c walks the table. Reading is all or nothing: what a plan takes is
 * what the walk takes, with the same result; what it does not take, the walk looks at again and
 * tells what is wrong. Elements of a flat plan are not even moved.
 * Thread:  any
 */
#ifndef PROTO_WIRE_PLAN_H
#define PROTO_WIRE_PLAN_H

#include "proto/wire.h"

#define WIRE_PLAN_MAX_PARTS  12
#define WIRE_PLAN_MAX_MOVES  24
#define WIRE_PLAN_MAX_CHECKS 24

/* A value that stands at wire_at in its block of values and at struct_at in the struct. */
typedef struct wire_plan_move {
    uint16_t wire_at;
    uint16_t struct_at;
    uint16_t n_bytes; /* 1, 4, 8 */
} wire_plan_move;

typedef struct wire_plan_check {
    uint32_t wire_at;
    uint32_t lo;           /* in range: value - lo <= span, without sign */
    uint32_t span;         /* of an F32: ignored */
    const wire_field *f32; /* NULL = an integer of 4 bytes */
} wire_plan_check;

/* Starts at a multiple of 8: a block of values, or an array. */
typedef struct wire_plan_part {
    /* values */
    uint16_t first_move, n_moves;
    uint16_t first_check, n_checks;
    uint32_t n_bytes; /* without padding at its end */
    /* array: f != NULL */
    const wire_field *f;
    uint32_t tag;
    uint32_t struct_at;
    uint32_t count_at;
    uint32_t elem_bytes;
    uint32_t min_n;
    uint32_t max_n;
    uint32_t lo;
    uint32_t span;
} wire_plan_part;

typedef struct wire_plan {
    uint32_t n_parts;
    uint32_t n_moves;
    uint32_t n_checks;
    uint32_t struct_bytes;
    bool is_flat;         /* an element lies in the frame as in memory */
    uint32_t clear_bytes; /* inline arrays behind it are read before they are used */
    wire_plan_part parts[WIRE_PLAN_MAX_PARTS];
    wire_plan_move moves[WIRE_PLAN_MAX_MOVES];
    wire_plan_check checks[WIRE_PLAN_MAX_CHECKS];
} wire_plan;

/* limits NULL: a plan for writing. False: the record is not of this kind. */
bool wire_plan_make(wire_plan *p, const wire_record *rec, const wire_limits *limits);
/* Writes n_elems elements from byte pos of the frame on; returns the byte behind them. data NULL:
 * only measures. */
size_t wire_plan_write(uint8_t *data, size_t pos, const wire_plan *p, const uint8_t *elems,
                       size_t n_elems, int32_t n_groups);
/* Whether n_elems elements of a flat plan are in range and can be used where they lie. */
bool wire_plan_is_in_range(const wire_plan *p, const uint8_t *elems, size_t n_elems);
/* Reads up to n_elems elements from *pos of a frame of n_bytes on, and moves *pos behind them.
 * Returns how many; the next one is not for this plan. */
size_t wire_plan_read(uint8_t *elems, size_t *pos, const wire_plan *p, size_t n_elems,
                      const uint8_t *data, size_t n_bytes, int32_t n_groups);

#endif
