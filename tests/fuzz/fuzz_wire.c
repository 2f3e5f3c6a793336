/* Any bytes as any message: refused with a reason, or decoded to a message that encodes to the same
 * bytes. */
#include <stdlib.h>
#include <string.h>

#include "proto/control.h"
#include "proto/scheduler_output.h"
#include "proto/step_result.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void check_same(const uint8_t *frame, size_t n_bytes, const wire_header *h,
                       const wire_record *rec, const void *msg)
{
    PGD_ASSERT(wire_frame_bytes(rec, msg) == n_bytes);
    uint8_t *again = malloc(n_bytes);
    wire_encode(again, n_bytes, h->type, h->worker_epoch, rec, msg);
    PGD_ASSERT(memcmp(again, frame, n_bytes) == 0);
    free(again);
}

static void try_decode(const uint8_t *frame, size_t n_bytes, const wire_header *h)
{
    static uint64_t room[1 << 15];
    wire_scratch scratch = {.data = (uint8_t *)room, .cap_bytes = sizeof room};
    wire_limits limits = {.max_num_seqs = 12,
                          .max_num_batched_tokens = 64,
                          .max_model_len = 96,
                          .vocab_size = 300,
                          .n_blocks = 50,
                          .block_sizes = {8, 16, 12},
                          .n_groups = 1 + (int32_t)(h->worker_epoch % 3),
                          .max_encoder_tokens = 40,
                          .max_logprobs = 5};
    pgd_why why;
    if (wire_limits_derive(&limits, &why) != PGD_OK)
        abort();
    switch (h->type) {
#define CASE(name, type)                                                 \
    case type: {                                                         \
        name##_msg m;                                                    \
        if (control_decode_##name(&m, frame, n_bytes, &why) == PGD_OK)   \
            check_same(frame, n_bytes, h, &control_##name##_record, &m); \
        break;                                                           \
    }
        CONTROL_MESSAGES(CASE)
    case WIRE_PONG: {
        heartbeat_msg m;
        if (control_decode_pong(&m, frame, n_bytes, &why) == PGD_OK)
            check_same(frame, n_bytes, h, &control_heartbeat_record, &m);
        break;
    }
    case WIRE_STEP: {
        scheduler_output m;
        if (scheduler_output_decode(&m, &scratch, frame, n_bytes, &limits, &why) == PGD_OK)
            check_same(frame, n_bytes, h, &scheduler_output_record, &m);
        break;
    }
    case WIRE_RESULT: {
        step_result m;
        if (step_result_decode(&m, &scratch, frame, n_bytes, &limits, &why) == PGD_OK)
            check_same(frame, n_bytes, h, &step_result_record, &m);
        break;
    }
    default:
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    /* Version and length are set right, so that the fuzzer spends its time in the records. */
    uint64_t len = n_bytes;
    uint16_t version = WIRE_VERSION;
    wire_header h;
    if (n_bytes < WIRE_HEADER_BYTES)
        return 0;
    uint8_t *frame = malloc(n_bytes);
    memcpy(frame, data, n_bytes);
    memcpy(frame + 4, &version, 2);
    memcpy(frame + 16, &len, 8);
    if (wire_decode_header(&h, frame, n_bytes, NULL) == PGD_OK)
        try_decode(frame, n_bytes, &h);
    free(frame);
    return 0;
}
