/* KV events for people, a line each, and for scripts, an object each.
 *
 * Thread:  any
 */
#ifndef ENGINE_STATUS_EVENT_REPORT_H
#define ENGINE_STATUS_EVENT_REPORT_H

#include "common/strbuf.h"
#include "engine/kv/kv_event_unpack.h"

/* The events of a batch, each line ending in \n. Errors: those of kv_event_unpack; what was read
 * before is in *out. */
PGD_MUST_USE pgd_err event_report_batch(strbuf *out, bool is_json, uint64_t seq, const void *batch,
                                        size_t n_bytes, pgd_why *why);
/* Numbers [first, end) were missed. */
void event_report_gap(strbuf *out, bool is_json, uint64_t first, uint64_t end);

#endif
