/* The formula of the header. */
#include "engine/offload/offload_cost.h"

#define WEIGHT        (1.0 / 8)
#define BETTER_WEIGHT (1.0 / 2)

enum { FIRST_REFUSALS = 4, MOST_REFUSALS = 256 };

void offload_rate_note(double *rate, uint64_t us, uint64_t n)
{
    if (us == 0 || n == 0)
        return;
    double sample = (double)us / (double)n;
    double weight = sample < *rate ? BETTER_WEIGHT : WEIGHT;
    *rate = *rate > 0 ? *rate + (sample - *rate) * weight : sample;
}

bool offload_is_worth(const offload_rates *rates, const offload_work *work)
{
    bool is_known = rates->us_per_token > 0 && rates->us_per_load > 0 &&
                    (rates->us_per_read > 0 || work->n_disk_blocks == 0);
    double load_us = (double)work->n_blocks * rates->us_per_load +
                     (double)work->n_disk_blocks * rates->us_per_read;
    return !is_known || load_us <= (double)work->n_tokens * rates->us_per_token;
}

bool offload_should_load(offload_rates *rates, const offload_work *work)
{
    int32_t *n_refused = &rates->refusals[work->n_disk_blocks > 0].n_refused;
    int32_t *n_most = &rates->refusals[work->n_disk_blocks > 0].n_most;
    bool is_worth = offload_is_worth(rates, work);
    if (is_worth || *n_most == 0)
        *n_most = FIRST_REFUSALS;
    if (is_worth)
        *n_refused = 0;
    if (is_worth || (*n_refused)++ < *n_most)
        return is_worth;
    *n_refused = 0;
    *n_most = PGD_MIN(2 * *n_most, MOST_REFUSALS);
    return true;
}
