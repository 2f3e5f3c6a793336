/* Sampling: Philox against published vectors, every filter against its definition, frequencies against exact probabilities, and the same
 * token at every instruction-set level, alone or in a batch. */
#include "kernels/sample.h"
#include "tests/kernels/kernel_rig.h"

enum { MAX_VOCAB = 50000 };

static sample_row plain_row(const float *logits)
{
    return (sample_row){.logits = logits,
                        .top_p = 1,
                        .repetition_penalty = 1,
                        .n_logprobs = -1,
                        .n_prompt_tokens = 0};
}

static token_id sample_one(kernel_rig *rig, sample_row *row, int32_t vocab_size)
{
    sample_args args = {row, 1, vocab_size};
    assert_int_equal(rig->ops->sample(&args, &rig->alone), PGD_OK);
    return row->token;
}

static size_t workspace_bytes(void)
{
    size_t n_bytes = 0;
    for (int isa = CPU_ISA_REF; isa <= CPU_ISA_NEON; isa++) {
        const kernel_ops *ops;
        if (ops_cpu_get(&ops, (cpu_isa)isa) == PGD_OK)
            n_bytes = PGD_MAX(n_bytes, ops->sample_workspace_bytes(MAX_VOCAB, 2));
    }
    return n_bytes;
}

/* Known-answer vectors of the Random123 distribution (Salmon et al. 2011), philox4x32 with 10 rounds. */
static void test_sample_philox_vectors(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < PGD_ARRAY_LEN(cases); i++) {
        uint32_t got[4];
        sample_philox(got, cases[i].key, cases[i].counter);
        assert_memory_equal(got, cases[i].want, sizeof(got));
    }
}

/* --- greedy ----------------------------------------------------------------------------------- */

static void check_greedy(kernel_rig *rig)
{
    const int32_t vocabs[] = {1, 2, 3, 15, 16, 17, 33, 1000, 4099, 49152};
    for (size_t k = 0; k < PGD_ARRAY_LEN(vocabs); k++) {
        int32_t vocab_size = vocabs[k];
        float *logits = kernel_rig_floats(vocab_size);
        int32_t first = kernel_rig_int(0, vocab_size - 1),
                second = kernel_rig_int(0, vocab_size - 1);
        logits[first] = logits[second] = 1000; /* a tie goes to the lower id */
        sample_row row = plain_row(logits);
        assert_int_equal(sample_one(rig, &row, vocab_size), PGD_MIN(first, second));
        row.temperature = 1e-7f; /* below SAMPLE_MIN_TEMPERATURE */
        assert_int_equal(sample_one(rig, &row, vocab_size), PGD_MIN(first, second));
        for (int32_t i = 0; i < vocab_size; i++)
            logits[i] = -2;
        assert_int_equal(sample_one(rig, &row, vocab_size), 0);
        logits[vocab_size - 1] = -1;
        assert_int_equal(sample_one(rig, &row, vocab_size), vocab_size - 1);
        const float bad[] = {NAN, INFINITY, -INFINITY};
        logits[first] = bad[k % 3];
        assert_int_equal(sample_one(rig, &row, vocab_size), -1);
        assert_int_equal(row.error, SAMPLE_ERROR_NOT_FINITE);
        row.temperature = 1;
        assert_int_equal(sample_one(rig, &row, vocab_size), -1);
        assert_int_equal(row.error, SAMPLE_ERROR_NOT_FINITE);
        kernel_rig_free(logits, vocab_size);
    }
}

static void test_sample_greedy(void **state)
{
    (void)state;
    kernel_rig_for_all(check_greedy, workspace_bytes());
}

/* --- bias, mask, penalties -------------------------------------------------------------------- */

static void check_adjustments(kernel_rig *rig)
{
    const float logits[6] = {1, 5, 4, -1, 3, 2};
    const sample_bias bias[3] = {{3, 4.5f}, {3, 1}, {1, -10}};
    const token_id masked[2] = {3, 1};
    sample_row row = plain_row(logits);
    row.bias = bias;
    row.n_bias = 3; /* 3: -1 + 5.5 = 4.5; 1: -5 */
    assert_int_equal(sample_one(rig, &row, 6), 3);
    row.masked_ids = masked;
    row.n_masked_ids = 2;
    assert_int_equal(sample_one(rig, &row, 6), 2);

    /* Prompt 1 2, output 2 4 4. */
    const token_id tokens[5] = {1, 2, 2, 4, 4};
    row = plain_row(logits);
    row.tokens = tokens;
    row.n_prompt_tokens = 2;
    row.n_tokens = 5;
    row.repetition_penalty = 2; /* 1: 2.5, 2: 2, 4: 1.5; 5 keeps 2 */
    assert_int_equal(sample_one(rig, &row, 6), 1);
    row.presence_penalty = 0.75f; /* 2 and 4 lose it, 1 is of the prompt */
    assert_int_equal(sample_one(rig, &row, 6), 1);
    row.repetition_penalty = 1;
    row.presence_penalty = 0;
    row.frequency_penalty = -1.5f; /* 2: 5.5, 4: 6 */
    assert_int_equal(sample_one(rig, &row, 6), 4);
    row.frequency_penalty = 2; /* 2: 2, 4: -1 */
    row.masked_ids = masked + 1;
    row.n_masked_ids = 1;
    row.presence_penalty = -0.25f; /* 2: 2.25 beats 5: 2 */
    assert_int_equal(sample_one(rig, &row, 6), 2);
    row.presence_penalty = 0.25f;
    assert_int_equal(sample_one(rig, &row, 6), 5);

    /* Negative logits are multiplied by the repetition penalty. */
    const float negative[3] = {-1, -1.5f, -3};
    const token_id seen[1] = {0};
    row = plain_row(negative);
    row.tokens = seen;
    row.n_prompt_tokens = row.n_tokens = 1;
    row.repetition_penalty = 1.6f;
    assert_int_equal(sample_one(rig, &row, 3), 1);
    row.repetition_penalty = 1.4f;
    assert_int_equal(sample_one(rig, &row, 3), 0);

    const token_id all[3] = {2, 0, 1};
    row.masked_ids = all;
    row.n_masked_ids = 3;
    for (int i = 0; i < 2; i++) {
        row.temperature = (float)i;
        assert_int_equal(sample_one(rig, &row, 3), -1);
        assert_int_equal(row.error, SAMPLE_ERROR_ALL_MASKED);
    }
}

static void test_sample_adjustments(void **state)
{
    (void)state;
    kernel_rig_for_all(check_adjustments, workspace_bytes());
}

/* --- filters and frequencies ------------------------------------------------------------------ */

/* Exact probabilities after temperature, top-k, top-p and min-p, by sorting. */
static void exact(double *p, const float *z, int32_t n, const sample_row *r)
{
    int32_t order[64];
    double mass = 0, total = 0, reached = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t at = i;
        for (; at > 0 && z[order[at - 1]] < z[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
        p[i] = 0;
    }
    int32_t n_keep = r->top_k > 0 ? PGD_MIN(r->top_k, n) : n;
    for (int32_t i = 0; i < n_keep; i++)
        mass += exp(((double)z[order[i]] - z[order[0]]) / r->temperature);
    for (int32_t i = 0; i < n_keep; i++) {
        double w = exp(((double)z[order[i]] - z[order[0]]) / r->temperature);
        if (w >= r->min_p)
            total += p[order[i]] = w;
        reached += w;
        if (r->top_p < 1 && reached >= r->top_p * mass)
            break;
    }
    for (int32_t i = 0; i < n; i++)
        p[i] /= total;
}

static void check_frequencies(kernel_rig *rig)
{
    enum { N = 24, DRAWS = 20000 };
    float logits[N];
    for (int32_t k = 0; k < 10; k++) {
        for (int32_t i = 0; i < N; i++)
            logits[i] = (float)kernel_rig_int(0, 12) * 0.25f; /* with ties */
        sample_row row = plain_row(logits);
        row.temperature = k % 2 ? 0.7f : 1.3f;
        row.top_k = k == 2 || k == 5 || k == 8 ? kernel_rig_int(1, N + 2) : 0;
        row.top_p = k == 3 || k == 5 || k == 9 ? 0.6f : 1;
        row.min_p = k == 4 || k == 8 || k == 9 ? 0.2f : 0;
        row.seed = 1234567890123456789u + (uint64_t)k;
        row.choice_idx = k % 3;
        double p[N], chi2 = 0;
        int32_t counts[N] = {0}, n_cells = 0;
        exact(p, logits, N, &row);
        for (int32_t i = 0; i < DRAWS; i++) {
            row.n_tokens = i; /* each output position is a fresh draw */
            row.n_prompt_tokens = 0;
            token_id token = sample_one(rig, &row, N);
            assert_in_range(token, 0, N - 1);
            counts[token]++;
        }
        for (int32_t i = 0; i < N; i++) {
            if (p[i] == 0)
                assert_int_equal(counts[i], 0);
            if (p[i] == 0)
                continue;
            double expected = p[i] * DRAWS;
            chi2 += (counts[i] - expected) * (counts[i] - expected) / expected;
            n_cells++;
        }
        /* The 0.9999 quantile of chi-square with 23 degrees of freedom is 57.1; fewer cells have less. */
        double dof = n_cells - 1, limit = dof + 4 * sqrt(2 * dof) + 10;
        if (!(chi2 <= limit))
            fail_msg("%s case %d: chi-square %.1f with %d cells, expected at most %.1f",
                     rig->ops->name, k, chi2, n_cells, limit);
    }
}

static void test_sample_frequencies(void **state)
{
    (void)state;
    kernel_rig_for_all(check_frequencies, workspace_bytes());
}

/* Choices, seeds and positions must not repeat each other's draws. */
static void check_streams(kernel_rig *rig)
{
    enum { N = 1000 };
    float logits[N] = {0};
    sample_row row = plain_row(logits);
    token_id tokens[5];
    row.temperature = 1;
    row.seed = 42;
    tokens[0] = sample_one(rig, &row, N);
    assert_int_equal(sample_one(rig, &row, N), tokens[0]);
    row.seed = 43;
    tokens[1] = sample_one(rig, &row, N);
    row.seed = 42 + ((uint64_t)1 << 32);
    tokens[2] = sample_one(rig, &row, N);
    row.seed = 42;
    row.choice_idx = 1;
    tokens[3] = sample_one(rig, &row, N);
    row.choice_idx = 0;
    row.n_tokens = 1;
    tokens[4] = sample_one(rig, &row, N);
    for (int i = 0; i < 5; i++) {
        for (int j = 0; j < i; j++)
            assert_int_not_equal(tokens[i], tokens[j]);
    }
    /* Only the output position counts, not how long the prompt was. */
    const token_id prompt[3] = {1, 2, 3};
    row.tokens = prompt;
    row.n_prompt_tokens = 2;
    row.n_tokens = 3;
    assert_int_equal(sample_one(rig, &row, N), tokens[4]);
}

static void test_sample_streams(void **state)
{
    (void)state;
    kernel_rig_for_all(check_streams, workspace_bytes());
}

/* --- logprobs --------------------------------------------------------------------------------- */

static void check_logprobs(kernel_rig *rig)
{
    const int32_t vocabs[] = {1, 5, 40, 5000};
    for (size_t k = 0; k < PGD_ARRAY_LEN(vocabs); k++) {
        int32_t n = vocabs[k], n_best = PGD_MIN(n, SAMPLE_MAX_LOGPROBS);
        float *logits = kernel_rig_floats(n);
        for (int32_t i = 0; i < n; i += 3)
            logits[i] = (float)kernel_rig_int(0, 3); /* ties */
        sample_logprob got[SAMPLE_MAX_LOGPROBS + 1];
        sample_row row = plain_row(logits);
        const sample_bias bias = {n - 1, 90}; /* logprobs are of the raw logits */
        row.bias = &bias;
        row.n_bias = 1;
        row.n_logprobs = n_best;
        row.logprobs = got;
        assert_int_equal(sample_one(rig, &row, n), n - 1);
        double sum = 0, m = -INFINITY;
        for (int32_t i = 0; i < n; i++)
            m = fmax(m, logits[i]);
        for (int32_t i = 0; i < n; i++)
            sum += exp(logits[i] - m);
        assert_int_equal(got[0].id, n - 1);
        for (int32_t i = 0; i <= n_best; i++)
            assert_true(fabs(got[i].logprob - (logits[got[i].id] - m - log(sum))) < 2e-5);
        for (int32_t i = 1; i <= n_best; i++) {
            int32_t n_before = 0; /* ids that come before it: exactly its rank */
            for (int32_t j = 0; j < n; j++)
                n_before += logits[j] > logits[got[i].id] ||
                            (logits[j] == logits[got[i].id] && j < got[i].id);
            assert_int_equal(n_before, i - 1);
        }
        kernel_rig_free(logits, n);
    }
}

static void test_sample_logprobs(void **state)
{
    (void)state;
    kernel_rig_for_all(check_logprobs, workspace_bytes());
}

/* A given token has the logprobs that it would have if it had been sampled; nothing else counts. */
static void check_given_token(kernel_rig *rig)
{
    enum { N = 700, K = 4 };
    float *logits = kernel_rig_floats(N);
    token_id masked = 5;
    for (token_id id = 0; id < N; id += 37) {
        sample_logprob want[K + 1], got[K + 1];
        const sample_bias bias = {id, 1000};
        sample_row forced = plain_row(logits);
        forced.bias = &bias;
        forced.n_bias = 1;
        forced.n_logprobs = K;
        forced.logprobs = want;
        assert_int_equal(sample_one(rig, &forced, N), id);
        sample_row given = {.logits = logits,
                            .has_token = true,
                            .token = id,
                            .n_logprobs = K,
                            .n_masked_ids = 1,
                            .masked_ids = &masked,
                            .logprobs = got};
        assert_int_equal(sample_one(rig, &given, N), id);
        assert_int_equal(given.error, SAMPLE_OK);
        assert_memory_equal(got, want, sizeof(got));
    }
    logits[N - 1] = NAN;
    sample_logprob unused[1];
    sample_row bad = {.logits = logits, .has_token = true, .token = 3, .logprobs = unused};
    assert_int_equal(sample_one(rig, &bad, N), -1);
    assert_int_equal(bad.error, SAMPLE_ERROR_NOT_FINITE);
    kernel_rig_free(logits, N);
}

static void test_sample_given_token(void **state)
{
    (void)state;
    kernel_rig_for_all(check_given_token, workspace_bytes());
}

/* --- levels and batches ----------------------------------------------------------------------- */

static void check_batch(kernel_rig *rig)
{
    enum { ROWS = 24 };
    int32_t vocab_size = 4801;
    float *logits = kernel_rig_floats((int64_t)ROWS * vocab_size);
    token_id tokens[50];
    token_id masked[2] = {7, 4800};
    for (int32_t i = 0; i < 50; i++)
        tokens[i] = kernel_rig_int(0, 60);
    sample_row want[ROWS], got[ROWS];
    for (int32_t i = 0; i < ROWS; i++) {
        sample_row r = plain_row(logits + (int64_t)i * vocab_size);
        r.temperature = i % 4 == 0 ? 0 : 0.5f + 0.1f * (float)i;
        r.top_k = i % 3 == 1 ? kernel_rig_int(1, 200) : 0;
        r.top_p = i % 5 == 1 ? 0.9f : 1;
        r.min_p = i % 7 == 1 ? 0.05f : 0;
        r.tokens = tokens;
        r.n_prompt_tokens = 20;
        r.n_tokens = kernel_rig_int(20, 50);
        r.repetition_penalty = i % 2 ? 1.1f : 1;
        r.frequency_penalty = i % 6 == 3 ? 0.5f : 0;
        r.masked_ids = masked;
        r.n_masked_ids = i % 8 == 5 ? 2 : 0;
        r.seed = kernel_rig_u32();
        want[i] = got[i] = r;
    }
    for (int32_t i = 0; i < ROWS; i++) {
        sample_args one = {&want[i], 1, vocab_size};
        assert_int_equal(sample_ref(&one, &rig->alone), PGD_OK);
    }
    sample_args all = {got, ROWS, vocab_size};
    assert_int_equal(rig->ops->sample(&all, &rig->ctx), PGD_OK);
    for (int32_t i = 0; i < ROWS; i++) {
        if (got[i].token != want[i].token)
            fail_msg("%s row %d: token %d, expected %d", rig->ops->name, i, got[i].token,
                     want[i].token);
    }
    kernel_rig_free(logits, (int64_t)ROWS * vocab_size);
}

static void test_sample_batch_equals_reference(void **state)
{
    (void)state;
    kernel_rig_for_all(check_batch, workspace_bytes());
}

/* Vocabularies around the widths of the fast paths, flat and peaked logits, filters that keep one,
 * few and nearly all candidates: always the reference's token and log probabilities. */
static void check_against_reference(kernel_rig *rig)
{
    const int32_t vocabs[] = {1, 7, 63, 64, 65, 130, 1000, 8191, 49152};
    for (int32_t k = 0; k < 108; k++) {
        int32_t vocab_size = vocabs[k % 9];
        float *logits = kernel_rig_floats(vocab_size);
        for (int32_t i = 0; i < vocab_size; i++)
            logits[i] *= k % 4 == 0 ? 0.01f : k % 4 == 1 ? 5.0f : 1.0f;
        if (k % 4 == 3) {
            for (int32_t i = 0; i < vocab_size; i++)
                logits[i] = (float)kernel_rig_int(-4, 4);
        }
        sample_logprob want_logprobs[6], got_logprobs[6];
        token_id masked = kernel_rig_int(0, vocab_size - 1);
        sample_row want = plain_row(logits);
        want.temperature = k % 5 == 0 ? 0.1f : 0.9f;
        want.top_k = k % 3 == 1 ? kernel_rig_int(1, 2 * vocab_size) : 0;
        want.top_p = k % 7 == 1 ? 0.999f : k % 7 == 3 ? 0.5f : k % 7 == 4 ? 1e-6f : 1;
        want.min_p = k % 11 == 2 ? 1 : k % 11 == 5 ? 0.3f : 0;
        want.seed = ((uint64_t)kernel_rig_u32() << 32) | kernel_rig_u32();
        want.n_tokens = kernel_rig_int(0, 1000); /* no penalties: only the position counts */
        want.choice_idx = kernel_rig_int(0, 5);
        want.masked_ids = &masked;
        want.n_masked_ids = vocab_size > 1 && k % 6 == 5;
        want.n_logprobs = k % 8 < 3 ? PGD_MIN(vocab_size, 5) : -1;
        sample_row got = want;
        want.logprobs = want_logprobs;
        got.logprobs = got_logprobs;
        sample_args one = {&want, 1, vocab_size};
        assert_int_equal(sample_ref(&one, &rig->alone), PGD_OK);
        if (sample_one(rig, &got, vocab_size) != want.token)
            fail_msg("%s case %d: token %d, expected %d", rig->ops->name, k, got.token, want.token);
        for (int32_t i = 0; i <= want.n_logprobs; i++) {
            assert_int_equal(got_logprobs[i].id, want_logprobs[i].id);
            assert_true(fabsf(got_logprobs[i].logprob - want_logprobs[i].logprob) < 1e-5f);
        }
        kernel_rig_free(logits, vocab_size);
    }
}

static void test_sample_equals_reference(void **state)
{
    (void)state;
    kernel_rig_for_all(check_against_reference, workspace_bytes());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sample_philox_vectors),
        cmocka_unit_test(test_sample_greedy),
        cmocka_unit_test(test_sample_adjustments),
        cmocka_unit_test(test_sample_frequencies),
        cmocka_unit_test(test_sample_streams),
        cmocka_unit_test(test_sample_logprobs),
        cmocka_unit_test(test_sample_given_token),
        cmocka_unit_test(test_sample_batch_equals_reference),
        cmocka_unit_test(test_sample_equals_reference),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
