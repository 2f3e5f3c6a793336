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

/* The index, not whole, of the frequency that turns so many times in the original context. */
static double yarn_bound(const model_config *cfg, double n_rotations)
{
    return cfg->rope_dim * log(cfg->rope_original_context / (n_rotations * 2 * M_PI)) /
           (2 * log(cfg->rope_theta));
}

static double scale_yarn(double f, int32_t i, const model_config *cfg)
{
    double low = yarn_bound(cfg, cfg->rope_beta_fast), high = yarn_bound(cfg, cfg->rope_beta_slow);
    if (cfg->rope_truncates) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, cfg->rope_dim - 1);
    if (low == high)
        high += 0.001;
    double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
    return f / cfg->rope_factor * ramp + f * (1 - ramp);
}

/* Column i of the table for frequency f, size times its cosines and sines. */
static void fill_column(float *out, int32_t n_positions, int32_t rope_dim, int32_t i, double f,
                        double size)
{
    for (int32_t p = 0; p < n_positions; p++) {
        float *row = out + (int64_t)p * rope_dim;
        row[i] = (float)(size * cos(p * f));
        row[rope_dim / 2 + i] = (float)(size * sin(p * f));
    }
}

void rope_table_fill(float *out, int32_t n_positions, const model_config *cfg, const float *freqs)
{
    int32_t half = cfg->rope_dim / 2;
    double size = cfg->rope_scaling == ROPE_SCALING_YARN ? cfg->rope_attention_factor : 1;
    for (int32_t i = 0; i < half; i++) {
        double f = pow(cfg->rope_theta, -2.0 * i / cfg->rope_dim);
        if (freqs)
            f /= freqs[i];
        if (cfg->rope_scaling == ROPE_SCALING_LINEAR)
            f /= cfg->rope_factor;
        else if (cfg->rope_scaling == ROPE_SCALING_LLAMA3)
            f = scale_llama3(f, cfg);
        else if (cfg->rope_scaling == ROPE_SCALING_YARN)
            f = scale_yarn(f, i, cfg);
        fill_column(out, n_positions, cfg->rope_dim, i, f, size);
    }
}

void rope_table_fill_local(float *out, int32_t n_positions, const model_config *cfg)
{
    for (int32_t i = 0; i < cfg->rope_dim / 2; i++)
        fill_column(out, n_positions, cfg->rope_dim, i,
                    pow(cfg->rope_local_theta, -2.0 * i / cfg->rope_dim), 1);
}
