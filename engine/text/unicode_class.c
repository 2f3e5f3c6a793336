/* Look-up of a code point's classes.
 *
 * ASCII lies in the first few ranges, which are tried in turn; for the rest a binary search of
 * about ten steps. Rejected: a separate table for ASCII, a second truth beside the ranges; and
 * utf8proc's categories, which are those of whatever version the system has.
 */
#include "engine/text/unicode_class.h"

/* Ranges below this index hold every class of U+0000..U+007F. */
#define N_ASCII_RANGES 6

unsigned unicode_class(int32_t cp)
{
    if (cp < 0)
        return 0;
    uint32_t c = (uint32_t)cp;
    if (c < 0x80) {
        for (int32_t i = 0; i < N_ASCII_RANGES; i++)
            if (c <= unicode_ranges[i].last)
                return c >= unicode_ranges[i].first ? unicode_ranges[i].classes : 0;
        return 0;
    }
    int32_t lo = 0;
    int32_t hi = unicode_n_ranges;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (unicode_ranges[mid].last < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (lo == unicode_n_ranges || unicode_ranges[lo].first > c)
        return 0;
    return unicode_ranges[lo].classes;
}
