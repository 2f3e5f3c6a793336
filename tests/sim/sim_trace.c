/* The members of a line are one table per struct, which reading and writing share. */
#include "tests/sim/sim_trace.h"

#include <stdlib.h>
#include <string.h>

typedef struct member {
    const char *name;
    size_t offset;
    int32_t min;
    int32_t max;
} member;

#define MEMBER(T, m, lo, hi)       \
    {                              \
#        m, offsetof(T, m), lo, hi \
    }

static const member config_members[] = {
    MEMBER(sim_config, block_size, 1, SIM_MAX_LEN),
    MEMBER(sim_config, n_blocks, 2, 1 << 20),
    MEMBER(sim_config, max_num_seqs, 1, SIM_MAX_SEQS),
    MEMBER(sim_config, max_num_batched_tokens, 1, SIM_MAX_BATCH),
    MEMBER(sim_config, long_prefill_token_threshold, 0, SIM_MAX_LEN),
    MEMBER(sim_config, max_model_len, 2, SIM_MAX_LEN),
    MEMBER(sim_config, max_queued_requests, 1, SIM_MAX_REQUESTS),
    MEMBER(sim_config, max_encoder_tokens, 0, 1000),
    MEMBER(sim_config, policy, 0, 1),
    MEMBER(sim_config, enable_chunked_prefill, 0, 1),
    MEMBER(sim_config, enable_prefix_caching, 0, 1),
    MEMBER(sim_config, is_async, 0, 1),
    MEMBER(sim_config, depth, 1, 4),
    MEMBER(sim_config, num_lookahead_tokens, 0, 8),
    MEMBER(sim_config, watermark_percent, 0, 99),
    MEMBER(sim_config, admit_partly, 0, 1),
    MEMBER(sim_config, use_eagle, 0, 1),
    MEMBER(sim_config, max_drafts, 0, PGD_MAX_DRAFT_TOKENS),
    MEMBER(sim_config, n_right_in_4, 0, 4),
    MEMBER(sim_config, n_tier_blocks, 0, 1 << 20),
    MEMBER(sim_config, n_disk_blocks, 0, 1 << 20),
    MEMBER(sim_config, n_ranks, 1, 2),
    MEMBER(sim_config, tier_uses_arc, 0, 1),
    MEMBER(sim_config, tier_threshold, 0, 10),
    MEMBER(sim_config, tier_step_blocks, 0, 1000),
    MEMBER(sim_config, tier_seed, 0, 1 << 30),
    MEMBER(sim_config, tier_delay, 0, 1000),
    MEMBER(sim_config, tier_faults, 0, 100),
    MEMBER(sim_config, is_cut, 0, 1),
    MEMBER(sim_config, check_every, 1, 1 << 20),
};

static const member group_members[] = {
    MEMBER(sim_group, kind, 0, ATTENTION_KIND_LAST),
    MEMBER(sim_group, block_size, 1, SIM_MAX_LEN),
    MEMBER(sim_group, window, 0, SIM_MAX_LEN),
    MEMBER(sim_group, zero_new_blocks, 0, 1),
    MEMBER(sim_group, is_eagle, 0, 1),
};

static const member request_members[] = {
    MEMBER(sim_request, id, 0, SIM_MAX_REQUESTS - 1),
    MEMBER(sim_request, n_prompt, 1, SIM_MAX_LEN - 1),
    MEMBER(sim_request, n_common, 0, SIM_MAX_LEN),
    MEMBER(sim_request, document, 0, 1000),
    MEMBER(sim_request, max_tokens, 1, SIM_MAX_LEN),
    MEMBER(sim_request, priority, 0, 1000),
    MEMBER(sim_request, salt, 0, 9),
    MEMBER(sim_request, ignore_eos, 0, 1),
    MEMBER(sim_request, n_scores, 0, SIM_MAX_SCORES),
    MEMBER(sim_request, skip_lookup, 0, 1),
    MEMBER(sim_request, error_at, 0, SIM_MAX_LEN),
    MEMBER(sim_request, n_encoder, 0, SIM_MAX_ENCODER),
};

static const char *const op_names[] = {"add", "step", "answer", "abort", "kill", "clear"};

sim_op *sim_trace_add(sim_trace *t, sim_op_kind kind)
{
    if (t->n_ops == SIM_MAX_OPS)
        return NULL;
    sim_op *op = &t->ops[t->n_ops++];
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->n_only = -1;
    return op;
}

static int32_t *value_at(const void *record, const member *m)
{
    return (int32_t *)((char *)record + m->offset);
}

static void write_members(FILE *file, const void *record, const member *members, size_t n_members)
{
    for (size_t i = 0; i < n_members; i++) {
        int32_t value = *value_at(record, &members[i]);
        if (value != 0)
            fprintf(file, " %s=%d", members[i].name, value);
    }
    fprintf(file, "\n");
}

void sim_trace_write(const sim_trace *t, FILE *file)
{
    fprintf(file, "config name=%s", t->config.name);
    write_members(file, &t->config, config_members, PGD_ARRAY_LEN(config_members));
    for (int32_t g = 0; g < t->config.n_groups; g++) {
        fprintf(file, "group");
        write_members(file, &t->config.groups[g], group_members, PGD_ARRAY_LEN(group_members));
    }
    for (int32_t i = 0; i < t->n_ops; i++) {
        const sim_op *op = &t->ops[i];
        fprintf(file, "%s", op_names[op->kind]);
        if (op->kind == SIM_OP_ADD) {
            write_members(file, &op->request, request_members, PGD_ARRAY_LEN(request_members));
            continue;
        }
        if (op->kind == SIM_OP_ABORT || op->arg != 0)
            fprintf(file, " %d", op->arg);
        if (op->kind == SIM_OP_STEP && op->n_only >= 0) {
            fprintf(file, " only");
            for (int32_t k = 0; k < op->n_only; k++)
                fprintf(file, " %d", op->only[k]);
        }
        fprintf(file, "\n");
    }
}

static bool set_member(void *record, const member *members, size_t n_members, const char *word)
{
    const char *equals = strchr(word, '=');
    for (size_t i = 0; equals != NULL && i < n_members; i++) {
        size_t n = (size_t)(equals - word);
        if (strlen(members[i].name) != n || memcmp(members[i].name, word, n) != 0)
            continue;
        *value_at(record, &members[i]) = (int32_t)strtol(equals + 1, NULL, 10);
        return true;
    }
    return false;
}

/* The rest of a line after its first word. */
static bool read_members(void *record, const member *members, size_t n_members, char **save)
{
    for (char *word; (word = strtok_r(NULL, " \t\r\n", save)) != NULL;) {
        if (!set_member(record, members, n_members, word)) {
            fprintf(stderr, "trace: expected name=number, got \"%s\"\n", word);
            return false;
        }
    }
    return true;
}

static bool read_config(sim_config *c, char **save)
{
    for (char *word; (word = strtok_r(NULL, " \t\r\n", save)) != NULL;) {
        if (strncmp(word, "name=", 5) == 0) {
            snprintf(c->name, sizeof c->name, "%s", word + 5);
        } else if (!set_member(c, config_members, PGD_ARRAY_LEN(config_members), word)) {
            fprintf(stderr, "trace: expected name=number, got \"%s\"\n", word);
            return false;
        }
    }
    return true;
}

static bool read_op(sim_trace *t, const char *name, char **save)
{
    int32_t kind = 0;
    while (kind <= SIM_OP_LAST && strcmp(op_names[kind], name) != 0)
        kind++;
    sim_op *op = kind <= SIM_OP_LAST ? sim_trace_add(t, (sim_op_kind)kind) : NULL;
    if (op == NULL) {
        fprintf(stderr, "trace: expected one of %d operations, got \"%s\"\n", SIM_MAX_OPS, name);
        return false;
    }
    if (kind == SIM_OP_ADD)
        return read_members(&op->request, request_members, PGD_ARRAY_LEN(request_members), save);
    for (char *word; (word = strtok_r(NULL, " \t\r\n", save)) != NULL;) {
        if (kind == SIM_OP_STEP && strcmp(word, "only") == 0)
            op->n_only = 0;
        else if (kind == SIM_OP_STEP && op->n_only >= 0 && op->n_only < SIM_MAX_ONLY)
            op->only[op->n_only++] = (int32_t)strtol(word, NULL, 10);
        else
            op->arg = (int32_t)strtol(word, NULL, 10);
    }
    return true;
}

bool sim_trace_read(sim_trace *t, FILE *file)
{
    char line[1024];
    memset(t, 0, sizeof *t);
    while (fgets(line, sizeof line, file) != NULL) {
        char *save;
        char *name = strtok_r(line, " \t\r\n", &save);
        bool is_good = true;
        if (name == NULL || name[0] == '#')
            continue;
        if (strcmp(name, "config") == 0)
            is_good = read_config(&t->config, &save);
        else if (strcmp(name, "group") == 0)
            is_good = t->config.n_groups < SIM_MAX_GROUPS &&
                      read_members(&t->config.groups[t->config.n_groups++], group_members,
                                   PGD_ARRAY_LEN(group_members), &save);
        else
            is_good = read_op(t, name, &save);
        if (!is_good)
            return false;
    }
    if (!sim_trace_is_valid(t)) {
        fprintf(stderr, "trace: a number is missing or out of range\n");
        return false;
    }
    return true;
}

static bool is_in_range(const void *record, const member *members, size_t n_members)
{
    for (size_t i = 0; i < n_members; i++) {
        int32_t value = *value_at(record, &members[i]);
        if (value < members[i].min || value > members[i].max)
            return false;
    }
    return true;
}

bool sim_trace_is_valid(const sim_trace *t)
{
    const sim_config *c = &t->config;
    bool is_used[SIM_MAX_REQUESTS] = {false};
    if (!is_in_range(c, config_members, PGD_ARRAY_LEN(config_members)) || c->n_groups < 1)
        return false;
    for (int32_t g = 0; g < c->n_groups; g++) {
        const sim_group *group = &c->groups[g];
        if (!is_in_range(group, group_members, PGD_ARRAY_LEN(group_members)))
            return false;
        if ((group->kind == ATTENTION_SLIDING || group->kind == ATTENTION_CHUNKED) &&
            group->window < 1)
            return false;
    }
    for (int32_t i = 0; i < t->n_ops; i++) {
        const sim_op *op = &t->ops[i];
        if (op->kind == SIM_OP_ABORT && (op->arg < 0 || op->arg >= SIM_MAX_REQUESTS))
            return false;
        if (op->kind != SIM_OP_ADD)
            continue;
        if (!is_in_range(&op->request, request_members, PGD_ARRAY_LEN(request_members)) ||
            is_used[op->request.id] || op->request.n_prompt >= c->max_model_len)
            return false;
        is_used[op->request.id] = true;
    }
    return true;
}
