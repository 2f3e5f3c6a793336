/* A ring of steps, the oldest first. */
#include "engine/core/step_notes.h"

#include "common/mem.h"

struct step_notes {
    int32_t max_steps;
    int32_t max_seqs;
    int32_t first; /* the oldest */
    int32_t n_steps;
    step_note *steps;         /* [max_steps] */
    poison_suspect *suspects; /* [max_steps * max_seqs] */
};

pgd_err step_notes_create(step_notes **out, int32_t max_steps, int32_t max_seqs)
{
    step_notes *n = mem_calloc(1, sizeof *n);
    if (n == NULL)
        return PGD_ENOMEM;
    size_t n_seqs = (size_t)max_seqs;
    n->max_steps = max_steps;
    n->max_seqs = max_seqs;
    n->steps = mem_calloc((size_t)max_steps, sizeof *n->steps);
    n->suspects = mem_calloc((size_t)max_steps * n_seqs, sizeof *n->suspects);
    bool ok = n->steps != NULL && n->suspects != NULL;
    for (int32_t i = 0; i < max_steps && ok; i++) {
        step_note *s = &n->steps[i];
        s->ids = mem_calloc(n_seqs, sizeof *s->ids);
        s->n_computed = mem_calloc(n_seqs, sizeof *s->n_computed);
        s->n_scheduled = mem_calloc(n_seqs, sizeof *s->n_scheduled);
        ok = s->ids != NULL && s->n_computed != NULL && s->n_scheduled != NULL;
    }
    if (!ok) {
        step_notes_destroy(n);
        return PGD_ENOMEM;
    }
    *out = n;
    return PGD_OK;
}

void step_notes_destroy(step_notes *n)
{
    if (n == NULL)
        return;
    for (int32_t i = 0; n->steps != NULL && i < n->max_steps; i++) {
        mem_free(n->steps[i].ids);
        mem_free(n->steps[i].n_computed);
        mem_free(n->steps[i].n_scheduled);
    }
    mem_free(n->steps);
    mem_free(n->suspects);
    mem_free(n);
}

void step_notes_reset(step_notes *n)
{
    n->n_steps = 0;
}

int32_t step_notes_n_steps(const step_notes *n)
{
    return n->n_steps;
}

static step_note *note_at(const step_notes *n, int32_t i)
{
    return &n->steps[(n->first + i) % n->max_steps];
}

static void add_request(step_note *s, uint64_t id, int32_t n_computed, int32_t n_scheduled)
{
    s->ids[s->n_requests] = id;
    s->n_computed[s->n_requests] = n_computed;
    s->n_scheduled[s->n_requests++] = n_scheduled;
    s->n_tokens += n_scheduled;
}

void step_notes_add(step_notes *n, const scheduler_output *out)
{
    PGD_ASSERTF(n->n_steps < n->max_steps && out->n_new + out->n_cached <= n->max_seqs,
                "%d steps in flight, one more of %d requests", n->n_steps,
                out->n_new + out->n_cached);
    step_note *s = note_at(n, n->n_steps++);
    s->n_requests = s->n_tokens = 0;
    for (int32_t i = 0; i < out->n_new; i++)
        add_request(s, out->new_requests[i].request_id, out->new_requests[i].n_computed_tokens,
                    out->new_requests[i].n_scheduled_tokens);
    for (int32_t i = 0; i < out->n_cached; i++)
        add_request(s, out->cached_requests[i].request_id,
                    out->cached_requests[i].n_computed_tokens,
                    out->cached_requests[i].n_scheduled_tokens);
}

const step_note *step_notes_take(step_notes *n)
{
    PGD_ASSERT(n->n_steps > 0);
    const step_note *s = note_at(n, 0);
    n->first = (n->first + 1) % n->max_steps;
    n->n_steps--;
    return s;
}

int32_t step_notes_gather(step_notes *n, const poison_suspect **suspects)
{
    int32_t n_found = 0;
    for (int32_t i = 0; i < n->n_steps; i++) {
        const step_note *s = note_at(n, i);
        for (int32_t k = 0; k < s->n_requests; k++) {
            int32_t at = 0;
            while (at < n_found && n->suspects[at].id != s->ids[k])
                at++;
            if (at == n_found)
                n->suspects[n_found++] = (poison_suspect){s->ids[k], s->n_computed[k]};
        }
    }
    *suspects = n->suspects;
    return n_found;
}
