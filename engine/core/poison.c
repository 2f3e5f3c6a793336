/* Bisection with three lists. After a death the other half runs next, not the half that died: it is
 * most likely clean, and its acknowledged steps keep the count of restarts without one from running
 * up while the search goes on.
 *
 *   trial  runs now        death ──► bad, next trial = rest, then the halves of bad
 *   rest   runs next       progress of all of trial ──► cleared, next trial = halves of bad + rest
 *   bad    has died
 *
 * A strike list per pair of requests ("dies only together with") was rejected: such a pair is
 * cleared member by member and found again at its next two deaths; it costs restarts, not
 * somebody's request.
 */
#include "engine/core/poison.h"

#include <string.h>

#include "common/mem.h"

#define STRIKES_TO_SUSPECT 2
#define STRIKES_TO_FAIL    4 /* and two deaths alone */

typedef struct id_list {
    uint64_t *ids;
    int32_t n_ids;
} id_list;

struct poison {
    int32_t max_suspects;
    poison_find_fn find;
    void *arg;
    id_list trial;
    id_list rest;
    id_list bad;
};

pgd_err poison_create(poison **out, int32_t max_suspects, poison_find_fn find, void *arg)
{
    poison *p = mem_calloc(1, sizeof *p);
    if (p == NULL)
        return PGD_ENOMEM;
    p->max_suspects = max_suspects;
    p->find = find;
    p->arg = arg;
    id_list *lists[] = {&p->trial, &p->rest, &p->bad};
    for (size_t i = 0; i < PGD_ARRAY_LEN(lists); i++) {
        lists[i]->ids = mem_calloc((size_t)max_suspects, sizeof(uint64_t));
        if (lists[i]->ids == NULL) {
            poison_destroy(p);
            return PGD_ENOMEM;
        }
    }
    *out = p;
    return PGD_OK;
}

void poison_destroy(poison *p)
{
    if (p == NULL)
        return;
    mem_free(p->trial.ids);
    mem_free(p->rest.ids);
    mem_free(p->bad.ids);
    mem_free(p);
}

static void add(poison *p, id_list *l, uint64_t id)
{
    PGD_ASSERTF(l->n_ids < p->max_suspects, "poison: more than %d suspects", p->max_suspects);
    l->ids[l->n_ids++] = id;
}

static bool drop(id_list *l, uint64_t id)
{
    for (int32_t i = 0; i < l->n_ids; i++) {
        if (l->ids[i] != id)
            continue;
        memmove(&l->ids[i], &l->ids[i + 1], (size_t)(l->n_ids - i - 1) * sizeof l->ids[0]);
        l->n_ids--;
        return true;
    }
    return false;
}

static void move_all(poison *p, id_list *to, id_list *from)
{
    for (int32_t i = 0; i < from->n_ids; i++)
        add(p, to, from->ids[i]);
    from->n_ids = 0;
}

static void pick_next_trial(poison *p)
{
    PGD_ASSERT(p->trial.n_ids == 0);
    if (p->bad.n_ids > 0 && p->rest.n_ids > 0) {
        move_all(p, &p->trial, &p->rest);
        return;
    }
    move_all(p, &p->bad, &p->rest);
    int32_t n_first = (p->bad.n_ids + 1) / 2;
    for (int32_t i = 0; i < p->bad.n_ids; i++)
        add(p, i < n_first ? &p->trial : &p->rest, p->bad.ids[i]);
    p->bad.n_ids = 0;
}

/* Counts the strike; false when the request is no longer there. */
static bool strike(poison *p, const poison_suspect *s)
{
    request *r = p->find(p->arg, s->id);
    if (r == NULL)
        return false;
    bool got_further = r->n_strikes > 0 && s->position > r->progress_at_strike;
    r->n_strikes = got_further ? 1 : r->n_strikes + 1;
    r->progress_at_strike = PGD_MAX(s->position, r->progress_at_strike);
    return true;
}

static void start_search(poison *p, const poison_suspect *suspects, int32_t n_suspects)
{
    for (int32_t i = 0; i < n_suspects; i++) {
        if (strike(p, &suspects[i]) &&
            p->find(p->arg, suspects[i].id)->n_strikes >= STRIKES_TO_SUSPECT)
            add(p, &p->bad, suspects[i].id);
    }
    if (p->bad.n_ids > 0)
        pick_next_trial(p);
}

/* One ran alone and died. True: it is the culprit. */
static bool judge_single(poison *p, const poison_suspect *s)
{
    drop(&p->trial, s->id);
    if (!strike(p, s))
        return false;
    int32_t n_strikes = p->find(p->arg, s->id)->n_strikes;
    if (n_strikes >= STRIKES_TO_FAIL)
        return true;
    if (n_strikes >= STRIKES_TO_SUSPECT)
        add(p, &p->bad, s->id);
    return false;
}

poison_verdict poison_note_death(poison *p, const poison_suspect *suspects, int32_t n_suspects,
                                 uint64_t *culprit)
{
    poison_verdict verdict = POISON_SEARCHING;
    if (p->trial.n_ids == 0) {
        start_search(p, suspects, n_suspects);
        return POISON_UNKNOWN;
    }
    if (n_suspects == 0)
        return POISON_UNKNOWN; /* nothing ran: nothing is learned */
    if (p->trial.n_ids == 1 && n_suspects == 1) {
        *culprit = suspects[0].id;
        if (judge_single(p, &suspects[0]))
            verdict = POISON_FOUND;
    } else {
        p->bad.n_ids = 0; /* the other half died as well: start over with this one */
        for (int32_t i = 0; i < n_suspects; i++)
            if (drop(&p->trial, suspects[i].id))
                add(p, &p->bad, suspects[i].id);
        move_all(p, &p->rest, &p->trial);
    }
    if (p->trial.n_ids == 0)
        pick_next_trial(p);
    return verdict;
}

void poison_note_progress(poison *p, uint64_t id, int32_t position)
{
    if (p->trial.n_ids == 0)
        return;
    request *r = p->find(p->arg, id);
    if (r == NULL || position <= r->progress_at_strike || !drop(&p->trial, id))
        return;
    r->n_strikes = 0;
    if (p->trial.n_ids == 0)
        pick_next_trial(p);
}

void poison_forget(poison *p, uint64_t id)
{
    bool was_trial = drop(&p->trial, id);
    drop(&p->rest, id);
    drop(&p->bad, id);
    if (was_trial && p->trial.n_ids == 0)
        pick_next_trial(p);
}

const uint64_t *poison_get_only(const poison *p, int32_t *n_only)
{
    *n_only = p->trial.n_ids;
    return p->trial.n_ids > 0 ? p->trial.ids : NULL;
}
