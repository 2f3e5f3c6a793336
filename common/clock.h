/* Time. now_us is CLOCK_MONOTONIC; wall time only for what users see.
 *
 * Thread:  any
 */
#ifndef COMMON_CLOCK_H
#define COMMON_CLOCK_H

#include "common/base.h"

uint64_t clock_now_us(void);
uint64_t clock_now_ns(void);
/* Since 1970. */
int64_t clock_wall_s(void);
int64_t clock_wall_us(void);

#endif
