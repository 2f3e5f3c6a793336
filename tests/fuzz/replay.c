/* The main of a fuzz target in a build without libFuzzer: runs it over the files named, or else over
 * all of tests/fuzz/corpus/<target>, and over no bytes at all. Each name is printed first, so that
 * the last one printed is the input that failed. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dirent.h>

#include "common/file.h"
#include "common/mem.h"

#define MAX_INPUT_BYTES ((size_t)64 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv) __attribute__((weak));

/* On the heap with its exact size, so that AddressSanitizer sees a read beyond it. */
static void run(const void *data, size_t n_bytes)
{
    uint8_t *copy = malloc(n_bytes);
    if (copy == NULL && n_bytes > 0)
        abort();
    if (n_bytes > 0)
        memcpy(copy, data, n_bytes);
    (void)LLVMFuzzerTestOneInput(copy, n_bytes);
    free(copy);
}

static void run_file(const char *path)
{
    char *data;
    size_t n_bytes;
    pgd_why why;
    printf("%s\n", path);
    (void)fflush(stdout);
    if (file_read(&data, &n_bytes, path, MAX_INPUT_BYTES, &why) != PGD_OK) {
        fprintf(stderr, "%s\n", why.text);
        exit(1);
    }
    run(data, n_bytes);
    mem_free(data);
}

static int run_corpus(const char *program)
{
    char dir[256];
    char path[600];
    int n = 0;
    struct dirent *entry;
    const char *name = strrchr(program, '/');
    name = name != NULL ? name + 1 : program;
    name += strncmp(name, "fuzz_", 5) == 0 ? 5 : 0;
    (void)snprintf(dir, sizeof(dir), "tests/fuzz/corpus/%s", name);
    DIR *d = opendir(dir);
    while (d != NULL && (entry = readdir(d)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        (void)snprintf(path, sizeof(path), "%s/%s", dir, entry->d_name);
        run_file(path);
        n++;
    }
    if (d == NULL || n == 0) {
        fprintf(stderr, "expected inputs in %s, got none (run this at the root of the tree)\n",
                dir);
        exit(1);
    }
    (void)closedir(d);
    return n;
}

int main(int argc, char **argv)
{
    int n = argc - 1;
    if (LLVMFuzzerInitialize != NULL)
        (void)LLVMFuzzerInitialize(&argc, &argv);
    run(NULL, 0);
    for (int i = 1; i < argc; i++)
        run_file(argv[i]);
    if (argc == 1)
        n = run_corpus(argv[0]);
    printf("[  PASSED  ] %d test(s).\n", n); /* as scripts/run_unit counts them */
    return 0;
}
