/* libFuzzer target: any bytes as a GGUF file. Opens it, interprets its metadata, checks it against
 * the decoder, reads every byte of every tensor and all metadata. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <sys/mman.h>
#include <unistd.h>

#include "common/model/model_file.h"

static volatile uint64_t sink; /* what is read must not be optimised away */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void read_tensors(const model_file *f)
{
    for (int32_t i = 0; i < model_file_n_tensors(f); i++) {
        const model_tensor *t = model_file_get_tensor_at(f, i);
        const uint8_t *bytes = t->data;
        for (size_t j = 0; j < t->n_bytes; j++)
            sink += bytes[j];
        if (model_file_get_tensor(f, t->name) != t)
            abort();
    }
}

static void read_metadata(const gguf_file *gguf)
{
    for (int32_t i = 0; i < gguf_n_values(gguf); i++) {
        gguf_string key;
        gguf_string s;
        gguf_array_iter iter;
        const gguf_value *v = gguf_get_value_at(gguf, i, &key);
        gguf_array_begin(&iter, v);
        while (gguf_array_next_string(&iter, &s)) {
            for (size_t j = 0; j < s.n_bytes; j++)
                sink += (uint8_t)s.data[j];
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    char path[64];
    model_file *f = NULL;
    pgd_why why = {{0}};
    pgd_why config_why = {{0}};
    pgd_err config_err = PGD_OK;
    int fd = memfd_create("fuzz_gguf", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, n_bytes) != (ssize_t)n_bytes)
        abort();
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (model_file_open_listing(&f, path, &config_err, &config_why, &why) == PGD_OK) {
        read_tensors(f);
        read_metadata(model_file_get_gguf(f));
        if (model_file_check_runnable(f, &why) != PGD_OK && why.text[0] == '\0')
            abort();
        if (config_err != PGD_OK && config_why.text[0] == '\0')
            abort();
    } else if (why.text[0] == '\0') {
        abort(); /* a refusal without a message */
    }
    model_file_close(f);
    (void)close(fd);
    return 0;
}
