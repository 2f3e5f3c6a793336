/* The option table itself: one row per option.
 *
 * Thread:  any; static const data
 */
#ifndef CONFIG_CONFIG_TABLE_H
#define CONFIG_CONFIG_TABLE_H

#include "config/config.h"

typedef enum config_type {
    CONFIG_INT,    /* int64_t, min..max */
    CONFIG_BYTES,  /* int64_t with suffix K, M, G, T (1024) */
    CONFIG_FLOAT,  /* double, fmin..fmax */
    CONFIG_BOOL,   /* bool: true/false, yes/no, on/off, 1/0 */
    CONFIG_STRING, /* char[cap] */
    CONFIG_CHOICE  /* int64_t index into choices, or char[cap] holding one of them when cap > 0 */
} config_type;

typedef struct config_option {
    const char *section;
    const char *name; /* with underscores, as in the file */
    config_type type;
    size_t offset;
    size_t cap;       /* strings: bytes of the field */
    const char *unit; /* for --help, "" = none */
    double min, max;
    const char *fallback; /* default, as text */
    const char *choices;  /* "a|b|c": CONFIG_CHOICE; CONFIG_INT and _BYTES: words for 0 */
    const char *help;     /* one or two sentences */
} config_option;

extern const config_option config_options[];
extern const size_t config_n_options;

#endif
