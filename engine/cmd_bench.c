/* `paged bench`: chooses what is measured. */
#include <stdio.h>
#include <string.h>

#include "engine/bench/bench_offline.h"
#include "engine/bench/bench_offload.h"
#include "engine/bench/bench_sched.h"
#include "engine/bench/bench_serve.h"
#include "engine/commands.h"

static bool is_word(int argc, char **argv, const char *word)
{
    return argc >= 1 && strcmp(argv[0], word) == 0;
}

void cmd_bench_help(FILE *out, int argc, char **argv)
{
    if (is_word(argc, argv, "sched")) {
        bench_sched_help(out);
        return;
    }
    if (is_word(argc, argv, "offload")) {
        bench_offload_help(out);
    } else if (is_word(argc, argv, "serve")) {
        bench_serve_help(out);
    } else if (is_word(argc, argv, "latency") || is_word(argc, argv, "throughput")) {
        bench_offline_help(out);
    } else {
        bench_offline_help(out);
        fputc('\n', out);
        bench_offload_help(out);
        fputc('\n', out);
        bench_serve_help(out);
        fputc('\n', out);
        bench_sched_help(out);
    }
    fputs("\nThe options of paged serve apply too; paged --help lists them.\n", out);
}

int cmd_bench(int argc, char **argv)
{
    if (is_word(argc, argv, "serve"))
        return bench_serve_main(argc - 1, argv + 1);
    if (is_word(argc, argv, "sched"))
        return bench_sched_main(argc - 1, argv + 1);
    if (is_word(argc, argv, "offload"))
        return bench_offload_main(argc - 1, argv + 1);
    if (is_word(argc, argv, "latency") || is_word(argc, argv, "throughput"))
        return bench_offline_main(argc - 1, argv + 1, is_word(argc, argv, "latency"));
    fputs("usage: paged bench latency|throughput|offload|serve|sched [options]; paged bench --help "
          "lists "
          "them\n",
          stderr);
    return EXIT_STATUS_USAGE;
}
