/* Small model files built in memory by tests: a GGUF with every weight type and a safetensors
 * directory.
 *
 * The place of every header field is recorded, so that a test can damage each of them.
 */
#ifndef TESTS_UNIT_MODEL_BUILDER_H
#define TESTS_UNIT_MODEL_BUILDER_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/stat.h>
#include <unistd.h>

#include "common/model/dtype.h"
#include "common/model/gguf.h"

enum { BUILDER_MAX_FIELDS = 1024, BUILDER_MAX_TENSORS = 64 };

/* One field of the header: a count, a length, a type, a dimension, an offset or a value. */
typedef struct builder_field {
    size_t at;
    int n_bytes;
} builder_field;

typedef struct builder {
    uint8_t *data;
    size_t n_bytes;
    size_t cap_bytes;
    size_t header_bytes;
    uint32_t n_tensors;
    uint32_t n_values;
    uint64_t next_offset;
    builder_field fields[BUILDER_MAX_FIELDS];
    int n_fields;
} builder;

static inline void builder_put(builder *b, const void *data, size_t n_bytes)
{
    if (b->n_bytes + n_bytes > b->cap_bytes) {
        b->cap_bytes = (b->n_bytes + n_bytes) * 2;
        b->data = realloc(b->data, b->cap_bytes);
        if (b->data == NULL)
            abort();
    }
    memcpy(b->data + b->n_bytes, data, n_bytes);
    b->n_bytes += n_bytes;
}

static inline void builder_put_field(builder *b, const void *data, int n_bytes)
{
    if (b->n_fields == BUILDER_MAX_FIELDS)
        abort();
    b->fields[b->n_fields++] = (builder_field){b->n_bytes, n_bytes};
    builder_put(b, data, (size_t)n_bytes);
}

static inline void builder_u32(builder *b, uint32_t v)
{
    builder_put_field(b, &v, 4);
}

static inline void builder_u64(builder *b, uint64_t v)
{
    builder_put_field(b, &v, 8);
}

static inline void builder_string(builder *b, const char *text)
{
    builder_u64(b, strlen(text));
    builder_put(b, text, strlen(text));
}

static inline void builder_begin(builder *b)
{
    memset(b, 0, sizeof(*b));
    builder_put(b, "GGUF", 4);
    builder_u32(b, 3);
    builder_u64(b, 0); /* n_tensors, n_values: set at the end */
    builder_u64(b, 0);
}

static inline void builder_key(builder *b, const char *key, gguf_value_type type)
{
    b->n_values++;
    builder_string(b, key);
    builder_u32(b, (uint32_t)type);
}

static inline void builder_kv_u32(builder *b, const char *key, uint32_t v)
{
    builder_key(b, key, GGUF_U32);
    builder_u32(b, v);
}

static inline void builder_kv_f32(builder *b, const char *key, float v)
{
    builder_key(b, key, GGUF_F32);
    builder_put_field(b, &v, 4);
}

static inline void builder_kv_string(builder *b, const char *key, const char *text)
{
    builder_key(b, key, GGUF_STRING);
    builder_string(b, text);
}

static inline void builder_kv_bool(builder *b, const char *key, bool v)
{
    uint8_t byte = v;
    builder_key(b, key, GGUF_BOOL);
    builder_put_field(b, &byte, 1);
}

static inline void builder_kv_array(builder *b, const char *key, gguf_value_type elem_type,
                                    uint64_t n)
{
    builder_key(b, key, GGUF_ARRAY);
    builder_u32(b, (uint32_t)elem_type);
    builder_u64(b, n);
}

/* rows == 0 makes a vector of cols. The data follow with builder_end. */
static inline void builder_tensor(builder *b, const char *name, dtype type, int64_t rows,
                                  int64_t cols)
{
    size_t n_bytes = dtype_row_bytes(type, cols) * (size_t)(rows > 0 ? rows : 1);
    b->n_tensors++;
    builder_string(b, name);
    builder_u32(b, rows > 0 ? 2 : 1);
    builder_u64(b, (uint64_t)cols);
    if (rows > 0)
        builder_u64(b, (uint64_t)rows);
    builder_u32(b, (uint32_t)type);
    builder_u64(b, b->next_offset);
    b->next_offset += (n_bytes + 31) / 32 * 32;
}

/* Sets the counts, pads, and appends tensor data of a fixed pattern. */
static inline void builder_end(builder *b)
{
    uint64_t n_tensors = b->n_tensors;
    uint64_t n_values = b->n_values;
    memcpy(b->data + 8, &n_tensors, 8);
    memcpy(b->data + 16, &n_values, 8);
    b->header_bytes = b->n_bytes;
    while (b->n_bytes % 32 != 0)
        builder_put(b, "", 1);
    size_t n_data = (size_t)b->next_offset;
    for (size_t i = 0; i < n_data; i++) {
        uint8_t byte = (uint8_t)(i * 37 + i / 256);
        builder_put(b, &byte, 1);
    }
}

static inline void builder_free(builder *b)
{
    free(b->data);
    b->data = NULL;
}

/* A llama of one layer with every weight type this build computes with; hidden size 256, 4 heads of
 * 64, 2 KV heads, vocabulary 48. */
static inline void builder_llama_meta(builder *b)
{
    builder_kv_string(b, "general.architecture", "llama");
    builder_kv_string(b, "general.name", "test model");
    builder_kv_u32(b, "general.alignment", 32);
    builder_kv_u32(b, "llama.block_count", 1);
    builder_kv_u32(b, "llama.context_length", 512);
    builder_kv_u32(b, "llama.embedding_length", 256);
    builder_kv_u32(b, "llama.feed_forward_length", 256);
    builder_kv_u32(b, "llama.attention.head_count", 4);
    builder_kv_u32(b, "llama.attention.head_count_kv", 2);
    builder_kv_f32(b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    builder_kv_u32(b, "llama.rope.dimension_count", 64);
    builder_kv_f32(b, "llama.rope.freq_base", 50000.0f);
}

static inline void builder_llama_tokenizer(builder *b)
{
    builder_kv_string(b, "tokenizer.ggml.model", "gpt2");
    builder_kv_array(b, "tokenizer.ggml.tokens", GGUF_STRING, 48);
    for (int i = 0; i < 48; i++) {
        char token[16];
        (void)snprintf(token, sizeof(token), "t%d", i);
        builder_string(b, i == 47 ? "<|im_end|>" : token);
    }
    builder_kv_array(b, "tokenizer.ggml.token_type", GGUF_I32, 48);
    for (int i = 0; i < 48; i++) {
        int32_t type = i >= 46 ? 3 : 1;
        builder_put(b, &type, 4);
    }
    builder_kv_u32(b, "tokenizer.ggml.bos_token_id", 1);
    builder_kv_u32(b, "tokenizer.ggml.eos_token_id", 2);
    builder_kv_bool(b, "tokenizer.ggml.add_bos_token", true);
}

static inline void builder_llama_tensors(builder *b)
{
    builder_tensor(b, "token_embd.weight", DTYPE_Q8_0, 48, 256);
    builder_tensor(b, "rope_freqs.weight", DTYPE_F32, 0, 32);
    builder_tensor(b, "blk.0.attn_norm.weight", DTYPE_F32, 0, 256);
    builder_tensor(b, "blk.0.attn_q.weight", DTYPE_Q4_0, 256, 256);
    builder_tensor(b, "blk.0.attn_k.weight", DTYPE_Q4_1, 128, 256);
    builder_tensor(b, "blk.0.attn_v.weight", DTYPE_Q5_0, 128, 256);
    builder_tensor(b, "blk.0.attn_output.weight", DTYPE_Q5_1, 256, 256);
    builder_tensor(b, "blk.0.ffn_norm.weight", DTYPE_F16, 0, 256);
    builder_tensor(b, "blk.0.ffn_gate.weight", DTYPE_Q4_K, 256, 256);
    builder_tensor(b, "blk.0.ffn_up.weight", DTYPE_Q5_K, 256, 256);
    builder_tensor(b, "blk.0.ffn_down.weight", DTYPE_Q6_K, 256, 256);
    builder_tensor(b, "output_norm.weight", DTYPE_BF16, 0, 256);
    builder_tensor(b, "output.weight", DTYPE_F16, 48, 256);
}

static inline void builder_llama(builder *b)
{
    builder_begin(b);
    builder_llama_meta(b);
    builder_llama_tokenizer(b);
    /* Arrays of arrays occur in no model we know, but the format has them. */
    builder_kv_array(b, "test.nested", GGUF_ARRAY, 2);
    for (uint8_t i = 0; i < 2; i++) {
        builder_u32(b, GGUF_U8);
        builder_u64(b, 3);
        builder_put(b, "abc", 3);
    }
    builder_llama_tensors(b);
    builder_end(b);
}

/* A directory of its own for one test program, in memory where that is possible; removed by
 * builder_remove_dir. */
static inline const char *builder_make_dir(char out[64])
{
    const char *parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    (void)snprintf(out, 64, "%s/paged-test-model-XXXXXX", parent);
    if (mkdtemp(out) == NULL)
        abort();
    return out;
}

static inline void builder_remove_dir(const char *dir)
{
    char command[128];
    (void)snprintf(command, sizeof(command), "rm -rf '%s'", dir);
    if (system(command) != 0)
        abort();
}

static inline void builder_write(const char *path, const void *data, size_t n_bytes)
{
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(data, 1, n_bytes, f) != n_bytes || fclose(f) != 0)
        abort();
}

static inline void builder_write_text(const char *dir, const char *name, const char *text)
{
    char path[256];
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    builder_write(path, text, strlen(text));
}

/* Writes n_bytes of the header given as text plus n_data bytes of data to dir/name. */
static inline void builder_write_safetensors(const char *dir, const char *name, const char *header,
                                             size_t n_data)
{
    char path[256];
    uint64_t n_header = strlen(header);
    uint8_t *all = calloc(1, 8 + n_header + n_data);
    if (all == NULL)
        abort();
    memcpy(all, &n_header, 8);
    memcpy(all + 8, header, n_header);
    for (size_t i = 0; i < n_data; i++)
        all[8 + n_header + i] = (uint8_t)(i * 29 + 1);
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    builder_write(path, all, 8 + n_header + n_data);
    free(all);
}

#endif
