/* libFuzzer target: any bytes as a .safetensors file. Reads every byte of every tensor it offers.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <sys/mman.h>
#include <unistd.h>

#include "common/model/model_hf_names.h"
#include "common/model/safetensors.h"

static volatile uint64_t sink; /* what is read must not be optimised away */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    char path[64];
    char mapped[64];
    safetensors_file *f = NULL;
    pgd_why why = {{0}};
    int fd = memfd_create("fuzz_safetensors", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, n_bytes) != (ssize_t)n_bytes)
        abort();
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (safetensors_open(&f, path, &why) == PGD_OK) {
        for (int32_t i = 0; i < safetensors_n_tensors(f); i++) {
            const safetensors_tensor *t = safetensors_get_tensor_at(f, i);
            for (size_t j = 0; j < t->n_bytes; j++)
                sink += t->data[j];
            if (safetensors_get_tensor(f, t->name) != t)
                abort();
            sink += model_hf_names_map(mapped, sizeof(mapped), t->name, t->name[0] % 2 != 0);
        }
    } else if (why.text[0] == '\0') {
        abort(); /* a refusal without a message */
    }
    safetensors_close(f);
    (void)close(fd);
    return 0;
}
