/* What a completion's body asks for, worked out on the pool: the body is parsed, its prompts are
 * tokenized and their blocks are hashed. All that grows with the body happens here, so that one
 * client's long prompt is no pause in the others' streams.
 *
 * Owns:    the body, once started; what it makes belongs to params
 * Thread:  io; fn is called there
 */
#ifndef ENGINE_HTTP_COMPLETION_INTAKE_H
#define ENGINE_HTTP_COMPLETION_INTAKE_H

#include "engine/engine.h"
#include "engine/http/completion_params.h"
#include "engine/http/http_conn.h"

typedef struct completion_intake {
    completion_fault fault; /* status 0: params are good */

    /* private */
    completion_params *params;
    engine *engine;
    http_body body;
    int32_t max_model_len; /* or the encoder's, where the prompt is its input */
    void (*fn)(void *arg);
    void *arg;
    uv_work_t work;
} completion_intake;

/* Takes the body of the connection's request. params (zeroed, borrow until fn) must not be looked at
 * before fn is called, which happens exactly once, from inside this call only when nothing can be
 * started. */
void completion_intake_start(completion_intake *in, completion_params *params, engine *e,
                             http_conn *conn, void (*fn)(void *arg), void *arg);

#endif
