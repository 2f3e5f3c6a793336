/* A pool serves all its rows: it is aged once, then crowd after crowd comes and goes, as in a daemon.
 * A pool of just enough blocks is made for each number of running requests.
 *
 * Rows show the median over samples, so that other load on the machine does not decide, and beside
 * the times what this machine's memory does in the same minute. Never fails on speed. */
#include "engine/bench/bench_sched.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "engine/bench/machine_speed.h"
#include "engine/bench/sched_rig.h"
#include "engine/commands.h"

#define MAX_VALUES     16
#define MAX_ROWS       1024
#define MAX_SAMPLES    SCHED_RIG_MAX_STEPS
#define MAX_ADMISSIONS 48
#define GOAL_STEP_US   5.0
#define GOAL_EACH_NS   100.0
#define GOAL_ADMIT_US  300.0

typedef struct value_list {
    double values[MAX_VALUES];
    int n_values;
} value_list;

typedef struct sched_opts {
    value_list running;
    value_list pool_blocks; /* 0 = just enough */
    value_list groups;
    value_list hit_rate;
    int64_t n_steps;
    bool json;
} sched_opts;

typedef struct sched_row {
    int32_t n_running;
    int32_t n_blocks;
    bool is_just_enough;
    int32_t n_groups;
    double hit_rate;
    double measured_hit_rate;
    sched_rig_step step;
    double best_us;
    double p99_us;
    double allocations_per_step;
    double admission_us;
    double admission_p99_us;
} sched_row;

typedef struct sched_bench {
    sched_opts opts;
    machine_speed machine;
    sched_rig_step samples[MAX_SAMPLES];
    sched_row rows[MAX_ROWS];
    int n_rows;
} sched_bench;

/* --- options ---------------------------------------------------------------------------------- */

static bool parse_list(value_list *out, const char *text, double min, double max, bool is_whole)
{
    out->n_values = 0;
    while (out->n_values < MAX_VALUES) {
        char *end;
        double v = strtod(text, &end);
        if (end == text || !(v >= min && v <= max) || (is_whole && v != (double)(int64_t)v))
            return false;
        out->values[out->n_values++] = v;
        if (*end == '\0')
            return true;
        if (*end != ',')
            return false;
        text = end + 1;
    }
    return false;
}

static bool parse(sched_opts *o, int argc, char **argv)
{
    value_list steps;
    const struct {
        const char *name;
        value_list *list;
        double min, max;
        bool is_whole;
    } rows[] = {{"--running", &o->running, 1, 65536, true},
                {"--pool-blocks", &o->pool_blocks, 0, 1 << 29, true},
                {"--groups", &o->groups, 1, PGD_MAX_KV_GROUPS, true},
                {"--hit-rate", &o->hit_rate, 0, 1, false},
                {"--steps", &steps, 1, SCHED_RIG_MAX_STEPS, true}};
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            o->json = true;
            continue;
        }
        size_t len = strcspn(argv[i], "=");
        size_t r = 0;
        while (r < PGD_ARRAY_LEN(rows) &&
               (strlen(rows[r].name) != len || strncmp(rows[r].name, argv[i], len) != 0))
            r++;
        if (r == PGD_ARRAY_LEN(rows)) {
            fprintf(stderr, "paged bench: unexpected %s\n", argv[i]);
            return false;
        }
        const char *name = rows[r].name;
        const char *value = argv[i][len] == '=' ? argv[i] + len + 1 : argv[++i];
        if (value == NULL || i >= argc) {
            fprintf(stderr, "paged bench: %s expects a value\n", name);
            return false;
        }
        if (!parse_list(rows[r].list, value, rows[r].min, rows[r].max, rows[r].is_whole) ||
            (rows[r].list == &steps && steps.n_values != 1)) {
            fprintf(stderr, "paged bench: %s: expected %s%s of %g to %g, got %s\n", name,
                    rows[r].is_whole ? "whole numbers" : "numbers",
                    rows[r].list == &steps ? ", one," : " with commas between them,", rows[r].min,
                    rows[r].max, value);
            return false;
        }
        if (rows[r].list == &steps)
            o->n_steps = (int64_t)steps.values[0];
    }
    return true;
}

void bench_sched_help(FILE *out)
{
    fputs("usage: paged bench sched [options]\n\n"
          "What a step costs without a model: schedule, encode and decode of its message, update; "
          "beside it,\nencode and decode of its result. Lists have commas between their values; "
          "each combination is one row. The "
          "options of paged serve do not apply.\n\n"
          "  --running LIST            Decoding requests. Default 1,16,256,1024,4096.\n"
          "  --pool-blocks LIST        KV blocks; 0 = just enough. Default 0,4194304.\n"
          "  --groups LIST             KV-cache groups: full attention, then sliding windows. "
          "Default "
          "1,3.\n"
          "  --hit-rate LIST           Part of each prompt that is cached when it comes. Default "
          "0,0.5,1.\n"
          "  --steps N                 Steps of a row. Default 256.\n"
          "  --json                    One array of objects instead of a table.\n",
          out);
}

/* --- measuring -------------------------------------------------------------------------------- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Sorts the values. */
static double quantile(double *values, int32_t n, double q)
{
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return values[(int32_t)(q * (n - 1) + 0.5)];
}

static double member_quantile(const sched_rig_run *run, size_t offset, double q)
{
    double values[MAX_SAMPLES];
    for (int32_t i = 0; i < run->n_samples; i++)
        memcpy(&values[i], (const char *)&run->samples[i] + offset, sizeof values[i]);
    return quantile(values, run->n_samples, q);
}

static void summarise(sched_row *row, const sched_rig_run *run)
{
    static const size_t members[] = {
        offsetof(sched_rig_step, schedule_us), offsetof(sched_rig_step, encode_us),
        offsetof(sched_rig_step, decode_us),   offsetof(sched_rig_step, result_us),
        offsetof(sched_rig_step, update_us),   offsetof(sched_rig_step, total_us)};
    for (size_t m = 0; m < PGD_ARRAY_LEN(members); m++) {
        double v = member_quantile(run, members[m], 0.5);
        memcpy((char *)&row->step + members[m], &v, sizeof v);
    }
    row->best_us = member_quantile(run, offsetof(sched_rig_step, total_us), 0);
    row->p99_us = member_quantile(run, offsetof(sched_rig_step, total_us), 0.99);
    row->allocations_per_step = run->allocations_per_step;
    row->measured_hit_rate = run->hit_rate;
}

/* Rows of all hit rates with one number of running requests. */
static pgd_err run_rows(sched_bench *b, sched_rig *rig, const sched_row *like, int32_t n_running)
{
    for (int h = 0; h < b->opts.hit_rate.n_values; h++) {
        if (b->n_rows == MAX_ROWS)
            return PGD_EINVAL;
        sched_row *row = &b->rows[b->n_rows];
        sched_rig_run run = {.samples = b->samples, .max_samples = MAX_SAMPLES};
        *row = *like;
        row->n_running = n_running;
        row->hit_rate = b->opts.hit_rate.values[h];
        PGD_TRY(sched_rig_decode(&run, rig, n_running, row->hit_rate, (int32_t)b->opts.n_steps));
        summarise(row, &run);
        b->n_rows++;
    }
    return PGD_OK;
}

static int32_t max_running(const sched_opts *o)
{
    double n = 0;
    for (int i = 0; i < o->running.n_values; i++)
        n = PGD_MAX(n, o->running.values[i]);
    return (int32_t)n;
}

/* One pool. n_running 0: all numbers that it holds. */
static pgd_err run_pool(sched_bench *b, int32_t n_blocks, int32_t n_groups, int32_t n_running)
{
    sched_rig *rig;
    double us[MAX_ADMISSIONS];
    int32_t n_admissions = (int32_t)PGD_MIN(b->opts.n_steps, (int64_t)MAX_ADMISSIONS);
    sched_row like = {.n_blocks = n_blocks, .n_groups = n_groups, .is_just_enough = n_running > 0};
    sched_rig_opts opts = {.max_running = n_running > 0 ? n_running : max_running(&b->opts),
                           .n_blocks = n_blocks,
                           .n_groups = n_groups};
    PGD_TRY(sched_rig_create(&rig, &opts));
    pgd_err err = sched_rig_age(rig);
    if (err == PGD_OK)
        err = sched_rig_admit(us, rig, n_admissions);
    if (err == PGD_OK) {
        like.admission_us = quantile(us, n_admissions, 0.5);
        like.admission_p99_us = quantile(us, n_admissions, 0.99);
    }
    if (n_running > 0 && err == PGD_OK)
        err = run_rows(b, rig, &like, n_running);
    for (int i = 0; n_running == 0 && i < b->opts.running.n_values && err == PGD_OK; i++) {
        int32_t n = (int32_t)b->opts.running.values[i];
        if (sched_rig_n_blocks_for(n, (int32_t)b->opts.n_steps, n_groups) <= n_blocks)
            err = run_rows(b, rig, &like, n);
    }
    sched_rig_destroy(rig);
    return err;
}

static pgd_err run_all(sched_bench *b)
{
    const sched_opts *o = &b->opts;
    for (int g = 0; g < o->groups.n_values; g++) {
        int32_t n_groups = (int32_t)o->groups.values[g];
        for (int p = 0; p < o->pool_blocks.n_values; p++) {
            int32_t n_blocks = (int32_t)o->pool_blocks.values[p];
            if (n_blocks > 0)
                PGD_TRY(run_pool(b, n_blocks, n_groups, 0));
            for (int i = 0; n_blocks == 0 && i < o->running.n_values; i++) {
                int32_t n = (int32_t)o->running.values[i];
                PGD_TRY(run_pool(b, sched_rig_n_blocks_for(n, (int32_t)o->n_steps, n_groups),
                                 n_groups, n));
            }
        }
    }
    return PGD_OK;
}

/* --- output ----------------------------------------------------------------------------------- */

static double per_request_ns(const sched_row *r)
{
    return r->step.total_us * 1e3 / r->n_running;
}

static double of_goal(const sched_row *r)
{
    return r->step.total_us / (GOAL_STEP_US + r->n_running * GOAL_EACH_NS / 1e3);
}

static void print_json(const sched_bench *b)
{
    fputs("[", stdout);
    for (int i = 0; i < b->n_rows; i++) {
        const sched_row *r = &b->rows[i];
        printf("%s\n{\"running\":%d,\"pool_blocks\":%d,\"groups\":%d,\"hit_rate\":%.6g"
               ",\"ns_per_request_step\":%.2f,\"us_per_step\":%.3f,\"allocations_per_step\":%.6g",
               i > 0 ? "," : "", r->n_running, r->n_blocks, r->n_groups, r->hit_rate,
               per_request_ns(r), r->step.total_us, r->allocations_per_step);
        printf(",\"best_us_per_step\":%.3f,\"p99_us_per_step\":%.3f,\"schedule_us\":%.3f,\"encode_"
               "us\":%.3f"
               ",\"decode_us\":%.3f,\"result_us\":%.3f,\"update_us\":%.3f"
               ",\"measured_hit_rate\":%.4f,\"admission_us\":%.1f,\"admission_p99_us\":%.1f",
               r->best_us, r->p99_us, r->step.schedule_us, r->step.encode_us, r->step.decode_us,
               r->step.result_us, r->step.update_us, r->measured_hit_rate, r->admission_us,
               r->admission_p99_us);
        printf(",\"random_read_ns\":%.1f,\"cache_read_ns\":%.1f,\"read_gb_s\":%.2f}",
               b->machine.random_read_ns, b->machine.cache_read_ns, b->machine.read_gb_s);
    }
    fputs("\n]\n", stdout);
}

/* The row with the same groups and hit rate and one other value, NULL when there is none. */
static const sched_row *find_row(const sched_bench *b, const sched_row *r, int32_t n_running,
                                 bool is_just_enough)
{
    for (int i = 0; i < b->n_rows; i++) {
        const sched_row *x = &b->rows[i];
        if (x->n_groups == r->n_groups && x->hit_rate == r->hit_rate && x->n_running == n_running &&
            x->is_just_enough == is_just_enough && (is_just_enough || x->n_blocks == r->n_blocks))
            return x;
    }
    return NULL;
}

static void print_growth(const sched_row *r, const sched_row *base, double linear)
{
    if (base != NULL && base != r)
        printf(" %8.2f", r->step.total_us / base->step.total_us / linear);
    else
        printf(" %8s", "-");
}

static void print_row(const sched_bench *b, const sched_row *r)
{
    int32_t base = (int32_t)b->opts.running.values[0];
    for (int i = 0; i < b->opts.running.n_values; i++) {
        if (b->opts.running.values[i] >= 256) { /* below it the fixed part of a step counts */
            base = (int32_t)b->opts.running.values[i];
            break;
        }
    }
    printf("%7d %9d %6d %5.2f %9.2f %9.1f %6.2f %8.2f %8.2f %8.2f %8.2f %8.2f %8.2f %8.2f %6.3g",
           r->n_running, r->n_blocks, r->n_groups, r->hit_rate, r->step.total_us, per_request_ns(r),
           of_goal(r), r->best_us, r->p99_us, r->step.schedule_us, r->step.encode_us,
           r->step.decode_us, r->step.update_us, r->step.result_us, r->allocations_per_step);
    print_growth(r, r->n_running > base ? find_row(b, r, base, r->is_just_enough) : NULL,
                 (double)r->n_running / base);
    print_growth(r, find_row(b, r, r->n_running, true), 1);
    printf("\n");
}

static void print_text(const sched_bench *b)
{
    const sched_row *last = NULL;
    printf("this machine: a random read %.0f ns in 256 MB, %.1f ns in 512 KB; %.1f GB/s in "
           "order\n\n",
           b->machine.random_read_ns, b->machine.cache_read_ns, b->machine.read_gb_s);
    printf("                             us per   ns per     of     best      p99                  "
           "   us "
           "per step   beside it   allocs    grown as\n"
           "running    blocks groups  hits     step  request   goal     step     step schedule   "
           "encode "
           "  decode   update   result  /step  running     pool\n");
    for (int i = 0; i < b->n_rows; i++)
        print_row(b, &b->rows[i]);
    printf("\ngoal: %.0f ns for each running request + %.0f us; running: against linear growth; "
           "pool: against just enough blocks\n"
           "admission of a cached prompt of %d tokens, out of cold CPU caches, goal %.0f us:\n",
           GOAL_EACH_NS, GOAL_STEP_US, SCHED_RIG_LONG_PROMPT, GOAL_ADMIT_US);
    for (int i = 0; i < b->n_rows; i++) {
        const sched_row *r = &b->rows[i];
        if (last == NULL || last->n_blocks != r->n_blocks || last->n_groups != r->n_groups)
            printf("  %9d blocks %2d groups: median %6.1f us, p99 %6.1f us, %.0f random reads\n",
                   r->n_blocks, r->n_groups, r->admission_us, r->admission_p99_us,
                   r->admission_us * 1e3 / b->machine.random_read_ns);
        last = r;
    }
}

int bench_sched_main(int argc, char **argv)
{
    sched_bench *b = mem_calloc(1, sizeof *b);
    if (b == NULL)
        return EXIT_STATUS_SYSTEM;
    b->opts = (sched_opts){.running = {{1, 16, 256, 1024, 4096}, 5},
                           .pool_blocks = {{0, 4194304}, 2},
                           .groups = {{1, 3}, 2},
                           .hit_rate = {{0, 0.5, 1}, 3},
                           .n_steps = 256};
    int status = EXIT_STATUS_USAGE;
    if (parse(&b->opts, argc, argv)) {
        pgd_err err = machine_speed_measure(&b->machine);
        if (err == PGD_OK)
            err = run_all(b);
        if (err != PGD_OK)
            fprintf(stderr, "paged bench: the scheduler: %s\n", pgd_err_text(err));
        status = err == PGD_OK ? 0 : EXIT_STATUS_SYSTEM;
    }
    if (status == 0 && b->opts.json)
        print_json(b);
    else if (status == 0)
        print_text(b);
    mem_free(b);
    return status;
}
