/* Angles grow with the position, so that frequencies are kept in double: an f32 frequency would be
 * off by a whole millirad at position 16,384. */
#include "worker/model/rope_table.h"

#include <math.h>

static double scale_llama3(double f, const model_config *cfg)
{
    double wavelength = 2 * M_PI / f, context = cfg->rope_original_context;
    double low = cfg->rope_low_freq_factor, high = cfg->rope_high_freq_factor;
    if (wavelength < context / high)
        return f;
    if (wavelength > context / low || high == low)
        return f / cfg->rope_factor;
    double smooth = (context / wavelength - low) / (high - low);
    return (1 - smooth) * f / cfg->rope_factor + smooth * f;
}

/* Column i of the table for frequency f. */
static void fill_column(float *out, int32_t n_positions, int32_t rope_dim, int32_t i, double f)
{
    for (int32_t p = 0; p < n_positions; p++) {
        float *row = out + (int64_t)p * rope_dim;
        row[i] = (float)cos(p * f);
        row[rope_dim / 2 + i] = (float)sin(p * f);
    }
}

pgd_err rope_table_fill(float *out, int32_t n_positions, const model_config *cfg,
                        const float *freqs, pgd_why *why)
{
    int32_t half = cfg->rope_dim / 2;
    if (cfg->rope_scaling == ROPE_SCALING_YARN)
        return pgd_fail(
            why, PGD_EUNSUPPORTED,
            "expected rope scaling none, linear or llama3, got yarn, in the model's configuration");
    for (int32_t i = 0; i < half; i++) {
        double f = pow(cfg->rope_theta, -2.0 * i / cfg->rope_dim);
        if (freqs)
            f /= freqs[i];
        if (cfg->rope_scaling == ROPE_SCALING_LINEAR)
            f /= cfg->rope_factor;
        else if (cfg->rope_scaling == ROPE_SCALING_LLAMA3)
            f = scale_llama3(f, cfg);
        fill_column(out, n_positions, cfg->rope_dim, i, f);
    }
    return PGD_OK;
}

void rope_table_fill_local(float *out, int32_t n_positions, const model_config *cfg)
{
    for (int32_t i = 0; i < cfg->rope_dim / 2; i++)
        fill_column(out, n_positions, cfg->rope_dim, i,
                    pow(cfg->rope_local_theta, -2.0 * i / cfg->rope_dim));
}
