/* Plans against the walk over the field table: the same frames out of the same messages, and of
 * hostile frames the same ones taken, with the same content. The plan's functions are this file's, so
 * that they can be switched off. */
#include "proto/wire_plan.h"
#include "tests/unit/proto_samples.h"

bool planned_make(wire_plan *p, const wire_record *rec, const wire_limits *limits);
#define wire_plan_make planned_make
#include "proto/wire_plan.c"
#undef wire_plan_make

static bool is_off;
static long n_read_by_plan;

bool wire_plan_make(wire_plan *p, const wire_record *rec, const wire_limits *limits)
{
    bool has_plan = !is_off && planned_make(p, rec, limits);
    n_read_by_plan += has_plan && limits != NULL;
    return has_plan;
}

static sample_arena arena_;
static wire_scratch scratches_[2];

typedef union any_msg {
    scheduler_output step;
    step_result result;
} any_msg;

static pgd_err decode(any_msg *out, wire_scratch *scratch, const frame *f, bool is_step,
                      pgd_why *why)
{
    if (is_step)
        return scheduler_output_decode(&out->step, scratch, f->data, f->n_bytes, &arena_.limits,
                                       why);
    return step_result_decode(&out->result, scratch, f->data, f->n_bytes, &arena_.limits, why);
}

static frame encode(const any_msg *m, bool is_step)
{
    return is_step ? frame_encode(WIRE_STEP, &scheduler_output_record, &m->step)
                   : frame_encode(WIRE_RESULT, &step_result_record, &m->result);
}

/* Both ways refuse it with the same words, or take it and make it again. */
static void check_both(const frame *f, bool is_step)
{
    any_msg m[2];
    pgd_why why[2] = {0};
    pgd_err err[2];
    for (int i = 0; i < 2; i++) {
        is_off = i == 1;
        err[i] = decode(&m[i], &scratches_[i], f, is_step, &why[i]);
    }
    assert_int_equal(err[0], err[1]);
    assert_string_equal(why[0].text, why[1].text);
    for (int i = 0; i < 4 && err[0] == PGD_OK; i++) {
        is_off = i % 2 == 1;
        frame again = encode(&m[i / 2], is_step);
        assert_int_equal(again.n_bytes, f->n_bytes);
        /* The header's epoch is the encoder's own. */
        assert_memory_equal(again.data + WIRE_HEADER_BYTES, f->data + WIRE_HEADER_BYTES,
                            f->n_bytes - WIRE_HEADER_BYTES);
        free(again.data);
    }
}

static void check_frame(frame *f, bool is_step)
{
    static const uint8_t values[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    uint64_t n_all = f->n_bytes;
    check_both(f, is_step);
    for (size_t i = WIRE_HEADER_BYTES; i < f->n_bytes; i++) {
        uint8_t was = f->data[i];
        for (size_t k = 0; k < sizeof values; k++) {
            f->data[i] = values[k];
            check_both(f, is_step);
        }
        f->data[i] = was;
    }
    for (uint64_t n = n_all - 1; n > WIRE_HEADER_BYTES; n--) { /* cut, and the header owns up */
        frame cut = {.data = malloc(n), .n_bytes = n};
        memcpy(cut.data, f->data, n);
        memcpy(cut.data + 16, &n, 8);
        check_both(&cut, is_step);
        free(cut.data);
    }
}

static void start(uint64_t seed)
{
    sample_arena_init(&arena_, seed);
    for (int i = 0; i < 2; i++) {
        free(scratches_[i].data);
        scratches_[i] = scratch_make(PGD_MAX(scheduler_output_scratch_bytes(&arena_.limits),
                                             step_result_scratch_bytes(&arena_.limits)));
        /* What a decoder leaves as it was must not matter. */
        memset(scratches_[i].data, i == 0 ? 0xa5 : 0x5a, scratches_[i].cap_bytes);
    }
}

/* Rows of which most look alike, as in a step of decodes. */
static void sample_alike(any_msg *m, bool is_step)
{
    sample_rng *r = &arena_.rng;
    int32_t n_rows = arena_.limits.max_num_seqs;
    if (is_step) {
        cached_request_msg *rows = sample_alloc(&arena_, (size_t)n_rows * sizeof *rows);
        block_append_msg *appends = sample_alloc(&arena_, (size_t)n_rows * sizeof *appends);
        m->step = (scheduler_output){.n_groups = arena_.limits.n_groups,
                                     .n_cached = n_rows,
                                     .total_scheduled_tokens = n_rows,
                                     .cached_requests = rows,
                                     .n_appends = n_rows,
                                     .appends = appends};
        for (int32_t i = 0; i < n_rows; i++) {
            rows[i] = (cached_request_msg){.request_id = sample_u64(r),
                                           .n_computed_tokens = sample_int(r, 1, 80),
                                           .n_scheduled_tokens = 1};
            rows[i].n_draft_tokens = sample_int(r, 0, 5) == 0 ? 1 : 0;
            rows[i].n_scheduled_tokens += rows[i].n_draft_tokens;
            m->step.total_scheduled_tokens += rows[i].n_draft_tokens;
            rows[i].first_draft_token = m->step.n_draft_tokens;
            m->step.n_draft_tokens += rows[i].n_draft_tokens;
            appends[i] = (block_append_msg){.request_id = rows[i].request_id};
            sample_blocks(&arena_, &appends[i].blocks, 1, 1 + (sample_int(r, 0, 5) == 0));
        }
        m->step.draft_tokens = sample_ints(&arena_, m->step.n_draft_tokens, 9);
        return;
    }
    request_result_msg *rows = sample_alloc(&arena_, (size_t)n_rows * sizeof *rows);
    m->result = (step_result){.n_results = n_rows, .results = rows};
    for (int32_t i = 0; i < n_rows; i++) {
        rows[i] = (request_result_msg){.request_id = sample_u64(r), .n_tokens = 1};
        rows[i].tokens[0] = sample_int(r, 0, arena_.limits.max_token_id);
        if (sample_int(r, 0, 5) == 0)
            rows[i].n_drafts = sample_int(r, 0, PGD_MAX_DRAFT_TOKENS);
    }
}

static void check_random(bool is_step)
{
    for (uint64_t seed = 1; seed <= 60; seed++) {
        any_msg m;
        start(seed);
        if (seed % 2 == 0)
            sample_alike(&m, is_step);
        else if (is_step)
            sample_step(&arena_, &m.step);
        else
            sample_result(&arena_, &m.result);
        is_off = false;
        frame f = encode(&m, is_step);
        is_off = true;
        frame walked = encode(&m, is_step);
        assert_int_equal(f.n_bytes, walked.n_bytes);
        assert_memory_equal(f.data, walked.data, f.n_bytes);
        if (seed <= 6)
            check_frame(&f, is_step);
        else
            check_both(&f, is_step);
        free(f.data);
        free(walked.data);
    }
}

static void test_wire_plan_of_steps(void **state)
{
    (void)state;
    check_random(true);
}

static void test_wire_plan_of_results(void **state)
{
    (void)state;
    check_random(false);
}

/* The messages of a step, of which there are many, are not left to the walk. */
static void test_wire_plan_covers_what_is_frequent(void **state)
{
    (void)state;
    wire_plan p;
    start(1);
    for (uint32_t i = 0; i < scheduler_output_record.n_fields; i++) {
        const wire_field *f = &scheduler_output_record.fields[i];
        if (f->elem == WIRE_KIND_RECORD && f->record != NULL)
            assert_true(planned_make(&p, f->record, &arena_.limits));
    }
    for (uint32_t i = 0; i < step_result_record.n_fields; i++) {
        const wire_field *f = &step_result_record.fields[i];
        if (f->elem == WIRE_KIND_RECORD && f->record != NULL)
            assert_true(planned_make(&p, f->record, &arena_.limits));
    }
    assert_true(n_read_by_plan > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wire_plan_of_steps),
        cmocka_unit_test(test_wire_plan_of_results),
        cmocka_unit_test(test_wire_plan_covers_what_is_frequent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
