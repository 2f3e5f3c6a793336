/* One small allocation per large buffer; when even that fails, the buffer is freed at once. */
#include "engine/http/pool_free.h"

#include "common/mem.h"

typedef struct free_work {
    uv_work_t work;
    strbuf bytes;
} free_work;

static void free_on_pool(uv_work_t *work)
{
    free_work *w = work->data;
    strbuf_deinit(&w->bytes);
}

static void after_free(uv_work_t *work, int status)
{
    (void)status;
    mem_free(work->data);
}

void pool_free_strbuf(uv_loop_t *loop, strbuf *b)
{
    free_work *w = b->cap_bytes < POOL_FREE_MIN_BYTES ? NULL : mem_alloc(sizeof(*w));
    if (w == NULL) {
        strbuf_deinit(b);
        return;
    }
    w->work.data = w;
    w->bytes = *b;
    strbuf_init(b);
    int rc = uv_queue_work(loop, &w->work, free_on_pool, after_free);
    PGD_ASSERT(rc == 0);
}
