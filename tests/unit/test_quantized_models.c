/* Whole models with quantized weights. The bundled model is written anew with its matrices in each weight type, in mixtures of types
 * and with an untied head; beside each file goes one with the same values in F32. The F32 path is compared with transformers by
 * test_decoder_golden; here it is the measure of the others:
 *
 * 1. The reference level rounds no activations: its logits for both files agree to f32 rounding.
 * 2. At the other levels both models run in lock-step: each linear map of the quantized model is computed once more, from the same
 *    input, by the reference level with the F32 file's weights, the input rounded here to int8 per 32 values where the weight's
 *    type asks for it. Every output agrees to f32 rounding. So rounding activations is all that sets the two models apart.
 * 3. What that amounts to in the logits stays within what such rounding can do. A block of 32 values with the largest magnitude m
 *    has an energy of m^2 or more, and rounding in steps of m/127 adds (m/127)^2/12 for each value: the relative error e of a map's
 *    input is at most sqrt(32/12)/127 = 1.29 % (0.55 % when the values are normal). It is measured in passing for each map. The
 *    errors are independent, and the residual stream and its norms pass them on at most in full: the centred logits
 *    are off by at most r, r^2 = the sum of e^2 over all maps, of their root mean square s. A perturbation of variance (rs)^2
 *    changes a softmax by a Kullback-Leibler divergence of at most (rs)^2/2 in the mean.
 *
 * With an argument the program writes the quantized files into that directory and does nothing else. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "common/file.h"
#include "common/thread.h"
#include "engine/inspect.h"
#include "engine/text/tokenizer.h"
#include "tests/unit/decoder_rig.h"
#include "tests/unit/quantized_model.h"
#include "worker/model_runner.h"

#define SOURCE "config/models/paged-tiny.gguf"
#define TEXT   "tests/golden/english.txt"

enum { N_TOKENS = 48, CHUNK = 28, MAX_RULES = 12, MAX_MAPS = 64 };

#define MAX_F32_ERROR 2e-5                    /* of the root mean square */
#define MAX_ROUNDING  (sqrt(32.0 / 12) / 127) /* likewise, of a map's input */

/* Matrices whose name has `part` are of this type; the first rule that fits counts. */
typedef struct type_rule {
    const char *part;
    dtype type;
} type_rule;

typedef struct model_case {
    const char *name;
    bool untied; /* with an output.weight: the embedding's rows, shifted by one */
    type_rule rules[MAX_RULES];
} model_case;

static const model_case cases[] = {
    {"F32", false, {{"", DTYPE_F32}}},
    {"F16", false, {{"", DTYPE_F16}}},
    {"BF16", false, {{"", DTYPE_BF16}}},
    {"Q8_0", false, {{"", DTYPE_Q8_0}}},
    {"Q4_0", false, {{"", DTYPE_Q4_0}}},
    {"Q4_1", false, {{"", DTYPE_Q4_1}}},
    {"Q5_0", false, {{"", DTYPE_Q5_0}}},
    {"Q5_1", false, {{"", DTYPE_Q5_1}}},
    {"Q4_K", false, {{"", DTYPE_Q4_K}}},
    {"Q5_K", false, {{"", DTYPE_Q5_K}}},
    {"Q6_K", false, {{"", DTYPE_Q6_K}}},
    {"MXFP4", false, {{"", DTYPE_MXFP4}}},
    /* As common mixtures are: V apart from Q and K, in some layers only. */
    {"mixed-k",
     false,
     {{"token_embd", DTYPE_Q6_K},
      {"blk.0.attn_v", DTYPE_Q6_K},
      {"blk.0.ffn_down", DTYPE_Q6_K},
      {"blk.3.attn_v", DTYPE_Q5_K},
      {"", DTYPE_Q4_K}}},
    {"mixed-untied",
     true,
     {{"token_embd", DTYPE_Q4_0},
      {"output.weight", DTYPE_Q6_K},
      {"attn_q", DTYPE_Q5_0},
      {"attn_k", DTYPE_Q5_0},
      {"attn_v", DTYPE_Q8_0},
      {"ffn_gate", DTYPE_Q4_1},
      {"ffn_up", DTYPE_Q5_1},
      {"", DTYPE_Q4_0}}},
    /* Parts of one call with and without rounded activations; three types for Q, K and V. */
    {"mixed-float",
     true,
     {{"token_embd", DTYPE_Q5_K},
      {"output.weight", DTYPE_F16},
      {"attn_q", DTYPE_Q4_K},
      {"attn_k", DTYPE_F16},
      {"attn_v", DTYPE_Q4_1},
      {"attn_output", DTYPE_BF16},
      {"ffn_gate", DTYPE_F32},
      {"ffn_up", DTYPE_Q8_0},
      {"", DTYPE_Q5_1}}},
};

static char temp_dir[64];
static token_id tokens[N_TOKENS];

/* --- files --------------------------------------------------------------------------------------------- */

static dtype pick_type(const model_case *c, const char *name)
{
    const type_rule *rule = c->rules;
    while (strstr(name, rule->part) == NULL)
        rule++;
    return rule->type;
}

/* The case's file, or with as_f32 the same values in F32. */
static void write_model(const char *path, const model_case *c, bool as_f32)
{
    gguf_file *source;
    pgd_why why = {{0}};
    quantized_tensor list[BUILDER_MAX_TENSORS] = {0};
    DECODER_RIG_CHECK(gguf_open(&source, SOURCE, &why) == PGD_OK, why);
    int n = gguf_n_tensors(source);
    assert_true(n < BUILDER_MAX_TENSORS);
    for (int i = 0; i < n; i++) {
        quantized_tensor *t = &list[i];
        t->from = gguf_get_tensor_at(source, i);
        (void)snprintf(t->name, sizeof(t->name), "%.*s", (int)t->from->name.n_bytes,
                       t->from->name.data);
        t->type = t->from->n_dims == 1 ? DTYPE_F32 : pick_type(c, t->name);
        t->drops = as_f32;
    }
    if (c->untied) {
        list[n] = (quantized_tensor){.name = "output.weight",
                                     .from = gguf_get_tensor(source, "token_embd.weight"),
                                     .first_row = 1,
                                     .type = pick_type(c, "output.weight"),
                                     .drops = as_f32};
        n++;
    }
    quantized_write(path, source, list, n);
    gguf_close(source);
}

/* --- the int8 rounding of activations, and the reference in lock-step --------------------------------------- */

static void round_row(float *out, const float *x, int32_t n)
{
    for (int32_t b = 0; b < n; b += 32) {
        float max = 0;
        for (int32_t i = b; i < b + 32; i++)
            max = fmaxf(max, fabsf(x[i]));
        float d = max / 127, inverse = d > 0 ? 1 / d : 0;
        for (int32_t i = b; i < b + 32; i++)
            out[i] = d * nearbyintf(x[i] * inverse);
    }
}

/* matmul_impl has no pointer of its own, hence file-level state. */
static struct {
    const matmul_impl *inner;
    decoder_rig *want; /* the F32 file at the reference level */
    int32_t n_calls;   /* in this forward */
    int32_t n_outputs; /* compared in all */
    double worst;
    double energy[MAX_MAPS]; /* of each map's input, and of what rounding added to it */
    double noise[MAX_MAPS];
} lockstep;

/* Linear maps in the order in which the decoder calls them. */
static const weights_linear *lockstep_linear(int32_t call)
{
    const weights *w = lockstep.want->w;
    if (call == 4 * w->n_layers)
        return &w->head;
    assert_true(call < 4 * w->n_layers && call < MAX_MAPS);
    const weights_layer *layer = &w->layers[call / 4];
    const weights_linear *maps[] = {&layer->qkv, &layer->attn_out, &layer->gate_up, &layer->down};
    return maps[call % 4];
}

/* want[n_rows, w->n_out] (+)= what the reference level makes of x. */
static void run_reference(float *want, const weights_linear *w, const matmul_args *args,
                          bool rounded)
{
    decoder_rig *rig = lockstep.want;
    float *x = mem_calloc((size_t)args->n_rows * (size_t)args->n_in, sizeof(*x));
    assert_non_null(x);
    for (int32_t t = 0; t < args->n_rows; t++) {
        const float *from = args->x + t * args->x_stride;
        float *row = x + (size_t)t * (size_t)args->n_in;
        memcpy(row, from, (size_t)args->n_in * sizeof(*row));
        if (rounded)
            round_row(row, from, args->n_in);
        for (int32_t i = 0; i < args->n_in; i++) {
            lockstep.energy[lockstep.n_calls] += (double)from[i] * from[i];
            lockstep.noise[lockstep.n_calls] +=
                ((double)row[i] - from[i]) * ((double)row[i] - from[i]);
        }
    }
    matmul_args all = {.x = x,
                       .x_stride = args->n_in,
                       .n_rows = args->n_rows,
                       .n_in = args->n_in,
                       .n_weights = w->n_parts,
                       .accumulate = args->accumulate};
    int32_t at = 0;
    for (int32_t i = 0; i < w->n_parts; i++) {
        all.weights[i] = &w->parts[i];
        all.out[i] = want + at;
        all.out_stride[i] = w->n_out;
        at += w->parts[i].n_out;
    }
    assert_int_equal(rig->ops.matmul->run(&all, &rig->ctx), PGD_OK);
    mem_free(x);
}

static double mean_square(const float *x, int32_t n)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sum / n;
}

static bool is_float(dtype type)
{
    return type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16;
}

/* Columns [at, at + part's outputs) of want against what the level under test computed. */
static void compare_part(const float *want, int32_t n_out, const matmul_args *args, int32_t part)
{
    int64_t at = args->out[part] - args->out[0];
    for (int32_t t = 0; t < args->n_rows; t++) {
        const float *row = want + (int64_t)t * n_out;
        const float *got = args->out[part] + t * args->out_stride[part];
        double scale = sqrt(mean_square(row, n_out));
        for (int32_t i = 0; i < args->weights[part]->n_out; i++) {
            double error = fabs((double)got[i] - (double)row[at + i]) / scale;
            if (!(error <= MAX_F32_ERROR))
                fail_msg("linear map %d, %s: output %d of row %d is %g, expected %g",
                         lockstep.n_calls, dtype_name((int32_t)args->weights[part]->type), i, t,
                         (double)got[i], (double)row[at + i]);
            lockstep.worst = PGD_MAX(lockstep.worst, error);
        }
        lockstep.n_outputs += args->weights[part]->n_out;
    }
}

/* What the parts with (or without) rounded activations should become, [n_rows, w->n_out], accumulated onto what is there; NULL when
 * there is no such part. Free with mem_free. */
static float *make_want(const weights_linear *w, const matmul_args *args, bool rounded)
{
    bool is_wanted = false;
    for (int32_t i = 0; i < args->n_weights; i++)
        is_wanted = is_wanted || is_float(args->weights[i]->type) != rounded;
    if (!is_wanted)
        return NULL;
    float *want = mem_calloc((size_t)args->n_rows * (size_t)w->n_out, sizeof(*want));
    assert_non_null(want);
    for (int32_t t = 0; args->accumulate && t < args->n_rows; t++)
        memcpy(want + (int64_t)t * w->n_out, args->out[0] + t * args->out_stride[0],
               (size_t)w->n_out * sizeof(*want));
    run_reference(want, w, args, rounded);
    return want;
}

static pgd_err lockstep_run(const matmul_args *args, kernel_ctx *ctx)
{
    const weights_linear *w = lockstep_linear(lockstep.n_calls);
    assert_int_equal(w->n_in, args->n_in);
    float *plain = make_want(w, args, false), *rounded = make_want(w, args, true);
    pgd_err err = lockstep.inner->run(args, ctx);
    int32_t n_out = 0;
    for (int32_t i = 0; i < args->n_weights; i++) {
        compare_part(is_float(args->weights[i]->type) ? plain : rounded, w->n_out, args, i);
        n_out += args->weights[i]->n_out;
    }
    assert_int_equal(n_out, w->n_out);
    lockstep.n_calls++;
    mem_free(plain);
    mem_free(rounded);
    return err;
}

/* --- runs --------------------------------------------------------------------------------------------------- */

static const decoder_rig_opts rig_opts = {
    .max_rows = CHUNK, .max_context = N_TOKENS, .kv_type = DTYPE_F32};

/* Logits [N_TOKENS, vocab_size] of all tokens, computed in chunks; free with mem_free. */
static float *run_tokens(decoder_rig *rig)
{
    size_t vocab_size = (size_t)rig->cfg->vocab_size;
    float *all = mem_calloc(N_TOKENS * vocab_size, sizeof(*all));
    assert_non_null(all);
    decoder_rig_start(rig, tokens, N_TOKENS);
    for (int32_t at = 0; at < N_TOKENS; at += CHUNK) {
        int32_t n = PGD_MIN(CHUNK, N_TOKENS - at);
        lockstep.n_calls = 0;
        memcpy(all + (size_t)at * vocab_size, decoder_rig_forward(rig, n),
               (size_t)n * vocab_size * sizeof(*all));
    }
    return all;
}

typedef struct difference {
    double error; /* root mean square of the difference of centred logits, of that of the logits */
    double scale; /* root mean square of the centred logits wanted */
    double kl;    /* mean over tokens of the divergence of got's softmax from want's */
} difference;

static double log_sum_exp(const float *x, int32_t n)
{
    double max = x[0], sum = 0;
    for (int32_t i = 1; i < n; i++)
        max = PGD_MAX(max, (double)x[i]);
    for (int32_t i = 0; i < n; i++)
        sum += exp(x[i] - max);
    return max + log(sum);
}

static difference compare_logits(const float *got, const float *want, int32_t n)
{
    double error = 0, scale = 0, kl = 0;
    for (int32_t t = 0; t < N_TOKENS; t++, got += n, want += n) {
        double mean = 0, mean_error = 0, square = 0, square_error = 0;
        double got_sum = log_sum_exp(got, n), want_sum = log_sum_exp(want, n);
        for (int32_t i = 0; i < n; i++) {
            double d = (double)got[i] - want[i];
            mean += want[i];
            mean_error += d;
            square += (double)want[i] * want[i];
            square_error += d * d;
            kl += exp(want[i] - want_sum) * ((want[i] - want_sum) - (got[i] - got_sum));
        }
        error += square_error / n - mean_error / n * (mean_error / n);
        scale += square / n - mean / n * (mean / n);
    }
    return (difference){
        .error = sqrt(error / scale), .scale = sqrt(scale / N_TOKENS), .kl = kl / N_TOKENS};
}

/* The limit r of the error of the logits, from what was measured in lock-step. */
static double rounding_limit(int32_t n_maps)
{
    double sum = 0;
    for (int32_t i = 0; i < n_maps; i++) {
        double e2 = lockstep.noise[i] / lockstep.energy[i];
        if (!(sqrt(e2) <= MAX_ROUNDING))
            fail_msg("the input of linear map %d was rounded by %g, at most %g is possible", i,
                     sqrt(e2), MAX_ROUNDING);
        sum += e2;
    }
    return sqrt(sum);
}

static void check_level(const model_case *c, const char *path, cpu_isa isa, const float *want)
{
    static matmul_impl wrapper;
    decoder_rig rig;
    decoder_rig_opts opts = rig_opts;
    decoder_rig *want_rig = lockstep.want;
    memset(&lockstep, 0, sizeof(lockstep));
    lockstep.want = want_rig;
    lockstep.inner = matmul_get_impl(isa);
    wrapper = *lockstep.inner;
    wrapper.run = lockstep_run;
    opts.isa = isa;
    opts.matmul = isa == CPU_ISA_REF ? NULL : &wrapper;
    decoder_rig_open(&rig, path, &opts);
    float *got = run_tokens(&rig);
    difference d = compare_logits(got, want, rig.cfg->vocab_size);
    double max_error = MAX_F32_ERROR;
    if (isa != CPU_ISA_REF) {
        int32_t n_maps = 4 * rig.cfg->n_layers + 1;
        assert_int_equal(lockstep.n_calls, n_maps);
        assert_true(lockstep.n_outputs > N_TOKENS * rig.cfg->vocab_size);
        max_error = PGD_MAX(max_error, rounding_limit(n_maps));
    }
    double max_kl = max_error * d.scale * max_error * d.scale / 2;
    print_message(
        "%-12s %-10s linear maps %.1e, logits %.1e (limit %.1e), divergence %.1e (limit %.1e)\n",
        c->name, cpu_features_name(isa), lockstep.worst, d.error, max_error, d.kl, max_kl);
    if (!(d.error <= max_error && fabs(d.kl) <= max_kl))
        fail_msg("%s at %s: expected an error of the logits of at most %g and a divergence of at "
                 "most %g, got %g "
                 "and %g",
                 c->name, cpu_features_name(isa), max_error, max_kl, d.error, d.kl);
    mem_free(got);
    decoder_rig_close(&rig);
}

static void check_logits(const model_case *c, const char *path, const char *f32_path)
{
    decoder_rig want_rig;
    decoder_rig_opts opts = rig_opts;
    opts.isa = CPU_ISA_REF;
    decoder_rig_open(&want_rig, f32_path, &opts);
    float *want = run_tokens(&want_rig);
    lockstep.want = &want_rig;
    const kernel_ops *ops;
    for (int isa = CPU_ISA_REF; isa <= CPU_ISA_NEON; isa++) {
        if (ops_cpu_get(&ops, (cpu_isa)isa) == PGD_OK)
            check_level(c, path, (cpu_isa)isa, want);
    }
    mem_free(want);
    decoder_rig_close(&want_rig);
}

/* --- memory, inspection, quality -------------------------------------------------------------------------------- */

/* Bytes of a row of 256 values: in the file, and in panels of 32 rows (matmul_internal.h). Types of 5 and 6 bits take a byte a
 * value there, K types two bytes for each scale of 32 values besides the super-block's. */
static size_t row_256_bytes(dtype type, bool in_panels)
{
    switch (type) {
    case DTYPE_F32:
        return 1024;
    case DTYPE_F16:
    case DTYPE_BF16:
        return 512;
    case DTYPE_Q8_0:
        return 8 * (2 + 32);
    case DTYPE_Q4_0:
        return 8 * (2 + 16);
    case DTYPE_MXFP4:
        return 8 * (1 + 16);
    case DTYPE_Q4_1:
        return 8 * (4 + 16);
    case DTYPE_Q5_0:
        return in_panels ? 8 * (2 + 32) : 8 * (2 + 20);
    case DTYPE_Q5_1:
        return in_panels ? 8 * (4 + 32) : 8 * (4 + 20);
    case DTYPE_Q4_K:
        return in_panels ? 4 + 8 * (2 + 16) : 144;
    case DTYPE_Q5_K:
        return in_panels ? 4 + 8 * (2 + 32) : 176;
    case DTYPE_Q6_K:
        return in_panels ? 2 + 8 * (2 + 32) : 210;
    default:
        fail();
        return 0;
    }
}

/* Packed matrices and f32 norms; the embedding stays in the file, a tied head is a copy of it. */
static void check_memory(const model_case *c, const char *path)
{
    step_runner *r;
    load_done_msg done;
    gguf_file *file;
    cpu_isa isa;
    pgd_why why = {{0}};
    load_msg load = {.kv_dtype = DTYPE_F16,
                     .block_size = 16,
                     .max_model_len = 64,
                     .max_num_seqs = 1,
                     .max_num_batched_tokens = 64,
                     .n_threads = 2};
    (void)snprintf(load.model_path, sizeof(load.model_path), "%s", path);
    DECODER_RIG_CHECK(cpu_features_choose(&isa, &why) == PGD_OK, why);
    DECODER_RIG_CHECK(model_runner_create(&r, "cpu", &why) == PGD_OK, why);
    DECODER_RIG_CHECK(r->vtbl->load(r, &load, &done, NULL, NULL, &why) == PGD_OK, why);
    r->vtbl->destroy(r);

    size_t want = 0;
    DECODER_RIG_CHECK(gguf_open(&file, path, &why) == PGD_OK, why);
    for (int32_t i = 0; i < gguf_n_tensors(file); i++) {
        const gguf_tensor *t = gguf_get_tensor_at(file, i);
        bool is_embed = t->name.n_bytes == 17 && memcmp(t->name.data, "token_embd.weight", 17) == 0;
        if (t->n_dims == 1)
            want += (size_t)t->dims[0] * sizeof(float);
        else if (!is_embed || !c->untied)
            want += (size_t)t->dims[0] * (size_t)(t->dims[1] / 256) *
                    row_256_bytes((dtype)t->type_id, isa != CPU_ISA_REF);
    }
    gguf_close(file);
    assert_int_equal(done.weight_bytes, want);
}

static void check_inspect(const char *path)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    assert_non_null(out);
    int status = inspect_run(path, out);
    assert_int_equal(fclose(out), 0);
    if (status != INSPECT_RUNNABLE)
        fail_msg("expected a file that this build can run:\n%s", text);
    free(text);
}

/* Significant bits of a value. */
static int value_bits(dtype type)
{
    switch (type) {
    case DTYPE_F32:
        return 24;
    case DTYPE_F16:
        return 11;
    case DTYPE_BF16:
    case DTYPE_Q8_0:
        return 8;
    case DTYPE_Q6_K:
        return 6;
    case DTYPE_Q5_0:
    case DTYPE_Q5_1:
    case DTYPE_Q5_K:
        return 5;
    default:
        return 4;
    }
}

/* The files are worth comparing only if the quantisers above do their work: the error of a matrix in n bits is below 2^-(n-1). */
static void check_quality(const model_case *c, const char *path)
{
    gguf_file *file, *source;
    pgd_why why = {{0}};
    DECODER_RIG_CHECK(gguf_open(&file, path, &why) == PGD_OK, why);
    DECODER_RIG_CHECK(gguf_open(&source, SOURCE, &why) == PGD_OK, why);
    for (int32_t i = 0; i < gguf_n_tensors(source); i++) {
        const gguf_tensor *t = gguf_get_tensor_at(file, i), *s = gguf_get_tensor_at(source, i);
        int64_t n = t->n_dims == 1 ? t->dims[0] : t->dims[0] * t->dims[1];
        float *got = mem_calloc((size_t)n, sizeof(float)),
              *want = mem_calloc((size_t)n, sizeof(float));
        assert_true(got != NULL && want != NULL);
        dtype_dequantize_row(got, t->data, n, (dtype)t->type_id);
        dtype_dequantize_row(want, s->data, n, (dtype)s->type_id);
        double scale = mean_square(want, (int32_t)n);
        for (int64_t k = 0; k < n; k++)
            got[k] -= want[k];
        double error = sqrt(mean_square(got, (int32_t)n) / scale);
        if (!(error <= pow(2, 1 - value_bits((dtype)t->type_id))))
            fail_msg("%s: %.*s in %s is off by %g", c->name, (int)t->name.n_bytes, t->name.data,
                     dtype_name(t->type_id), error);
        mem_free(got);
        mem_free(want);
    }
    gguf_close(source);
    gguf_close(file);
}

/* --- tests --------------------------------------------------------------------------------------------------------- */

static void test_quantized_model(void **state)
{
    const model_case *c = *state;
    char path[128], f32_path[128];
    (void)snprintf(path, sizeof(path), "%s/%s.gguf", temp_dir, c->name);
    (void)snprintf(f32_path, sizeof(f32_path), "%s/%s-as-f32.gguf", temp_dir, c->name);
    write_model(path, c, false);
    write_model(f32_path, c, true);
    check_quality(c, path);
    check_inspect(path);
    check_memory(c, path);
    check_logits(c, path, f32_path);
    (void)remove(path);
    (void)remove(f32_path);
}

static int setup(void **state)
{
    (void)state;
    char *text;
    size_t n_bytes;
    model_file *file;
    tokenizer *t;
    token_id *ids;
    int32_t n_ids;
    pgd_why why = {{0}};
    (void)builder_make_dir(temp_dir);
    if (file_read(&text, &n_bytes, TEXT, 1 << 20, &why) != PGD_OK ||
        model_file_open(&file, SOURCE, &why) != PGD_OK ||
        tokenizer_create(&t, file, &why) != PGD_OK ||
        tokenizer_encode(&ids, &n_ids, t, text, n_bytes, 0, 1 << 20) != PGD_OK ||
        n_ids < N_TOKENS) {
        print_error("%s\n", why.text);
        return -1;
    }
    memcpy(tokens, ids, sizeof(tokens));
    mem_free(ids);
    tokenizer_destroy(t);
    model_file_close(file);
    mem_free(text);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    builder_remove_dir(temp_dir);
    return 0;
}

int main(int argc, char **argv)
{
    struct CMUnitTest tests[PGD_ARRAY_LEN(cases)];
    char path[1024];
    thread_set_flush_denormals();
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        tests[i] = (struct CMUnitTest){.name = cases[i].name,
                                       .test_func = test_quantized_model,
                                       .initial_state = (void *)&cases[i]};
        if (argc == 2) {
            (void)snprintf(path, sizeof(path), "%s/%s.gguf", argv[1], cases[i].name);
            write_model(path, &cases[i], false);
        }
    }
    return argc == 2 ? 0 : cmocka_run_group_tests(tests, setup, teardown);
}
