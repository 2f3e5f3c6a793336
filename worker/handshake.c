/* A link that failed is closed and another one opened, rather than used again: nothing that was
 * queued for one peer may reach the next.
 *
 * Nor does a listener live for ever: when a peer goes away at the wrong moment of connecting, NNG
 * 1.5.2 takes its error for the listener's own end and never accepts again (measured over ipc, every
 * second time). So it is opened anew every LISTEN_MS; who connects just then tries again.
 *
 * A peer that connects and then says nothing keeps others away for ANSWER_MS. Who can do that again
 * and again has to be kept off the address by the network or the directory; the token does not.
 */
#include "worker/handshake.h"

#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"

#define LISTEN_MS    3000
#define ANSWER_MS    5000
#define LAST_WORD_MS 1000 /* for the other side to read why it was refused */

static void refuse(engine_link *link, pgd_err err, const pgd_why *why)
{
    error_msg m = {.err = (int32_t)err, .is_fatal = 1};
    engine_frame f;
    snprintf(m.text, sizeof m.text, "%s", pgd_why_text(why, err));
    uint64_t end_us = clock_now_us() + LAST_WORD_MS * 1000u;
    pgd_err told = engine_link_send(link, WIRE_ERROR, &control_error_record, &m, false);
    while (told == PGD_OK && clock_now_us() < end_us) /* however much it says meanwhile */
        told = engine_link_recv_within(link, &f, LAST_WORD_MS, NULL);
}

static pgd_err take_attach(attach_terms *terms, attach_msg *m, const engine_frame *f, pgd_why *why)
{
    if (f->type == WIRE_ERROR) { /* the engine refuses us, and says why */
        error_msg e;
        PGD_TRY(control_decode_error(&e, f->data, f->n_bytes, why));
        return pgd_fail(why, PGD_ECLOSED, "refused by the engine: %s", e.text);
    }
    PGD_TRY(control_decode_attach(m, f->data, f->n_bytes, why));
    memcpy(terms->engine_nonce, m->nonce, sizeof terms->engine_nonce);
    terms->worker_epoch = f->worker_epoch;
    terms->max_frame_bytes = m->max_frame_bytes;
    return PGD_OK;
}

static pgd_err meet(uint8_t proof[CONTROL_PROOF_BYTES], engine_link *link, const attach_key *key,
                    int timeout_ms, pgd_why *why)
{
    attach_terms terms = {0};
    challenge_msg challenge;
    attach_msg attach;
    engine_frame f;
    PGD_TRY(attach_draw_nonce(challenge.nonce, why));
    memcpy(terms.worker_nonce, challenge.nonce, sizeof terms.worker_nonce);
    if (engine_link_send(link, WIRE_CHALLENGE, &control_challenge_record, &challenge, false) !=
        PGD_OK)
        return pgd_fail(why, PGD_ECLOSED, "the engine cannot be sent a challenge");
    PGD_TRY(engine_link_recv_within(link, &f, timeout_ms, why));
    PGD_TRY(take_attach(&terms, &attach, &f, why));
    PGD_TRY(attach_check(attach.proof, key, ATTACH_ENGINE, &terms, why));
    PGD_TRY(attach_prove(proof, key, ATTACH_WORKER, &terms));
    pgd_err err = engine_link_adopt(link, terms.worker_epoch, terms.max_frame_bytes);
    if (err == PGD_ERANGE)
        return pgd_fail(why, PGD_EPROTO,
                        "messages of up to %u MB are more than this worker can take: lower "
                        "max_num_seqs or max_model_len",
                        terms.max_frame_bytes >> 20);
    return err;
}

pgd_err handshake_run(uint8_t proof[CONTROL_PROOF_BYTES], engine_link *link, const attach_key *key,
                      int timeout_ms, pgd_why *why)
{
    pgd_err err = meet(proof, link, key, timeout_ms, why);
    if (err == PGD_EPROTO || err == PGD_EUNSUPPORTED)
        refuse(link, err, why);
    return err;
}

pgd_err handshake_await(engine_link **out, uint8_t proof[CONTROL_PROOF_BYTES], const char *url,
                        const attach_key *key, pgd_why *why)
{
    for (;;) {
        pgd_why refusal = {0};
        engine_link *link;
        PGD_TRY(engine_link_listen(&link, url, HANDSHAKE_MAX_RECV_BYTES, why));
        bool is_up = engine_link_wait(link, LISTEN_MS);
        pgd_err err = is_up ? handshake_run(proof, link, key, ANSWER_MS, &refusal) : PGD_EAGAIN;
        if (err == PGD_OK) {
            *out = link;
            return PGD_OK;
        }
        if (is_up)
            log_warn("worker", "refused an engine at %s: %s", url, pgd_why_text(&refusal, err));
        engine_link_close(link);
    }
}
