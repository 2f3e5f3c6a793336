/* paged: chooses the sub-command. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include <fcntl.h>
#include <unistd.h>

#include "common/log.h"
#include "engine/commands.h"

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
    /* What --help behind the name prints; NULL = the whole program's. */
    void (*print_help)(FILE *out, int argc, char **argv);
} command;

static const command commands[] = {
    {"serve", cmd_serve, "run the daemon: HTTP completions on 127.0.0.1:8000"},
    {"run", cmd_run, "one completion on the terminal: paged run --model PATH -p PROMPT"},
    {"bench", cmd_bench,
     "measure: paged bench latency|throughput|offload|serve --model PATH, or sched",
     cmd_bench_help},
    {"status", cmd_status,
     "what a running server does: requests, tokens per second, caches, workers", cmd_status_help},
    {"inspect", cmd_inspect, "tell what a model file holds and whether this build runs it"},
    {"config", cmd_config, "check the configuration; --dump prints all of it, annotated"},
};

static void print_help(FILE *out)
{
    fputs("paged " PGD_VERSION_STRING
          ": serves language models\n\nusage: paged COMMAND [options]\n\n",
          out);
    for (size_t i = 0; i < PGD_ARRAY_LEN(commands); i++)
        fprintf(out, "  %-8s %s\n", commands[i].name, commands[i].help);
    fputs(
        "\noptions, each also a line of the file given by --config and a variable PAGED_NAME:\n\n",
        out);
    config_help(out);
}

static const command *find_command(const char *name)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(commands); i++) {
        if (strcmp(name, commands[i].name) == 0)
            return &commands[i];
    }
    return NULL;
}

static bool asks_for_help(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--") == 0)
            return false;
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return true;
    }
    return argc >= 2 && strcmp(argv[1], "help") == 0;
}

/* A descriptor below 3 that the caller left closed would be the next socket's: log lines would go
 * into it. */
static void open_standard_files(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0)
        close(fd);
}

int main(int argc, char **argv)
{
    open_standard_files();
    signal(SIGPIPE, SIG_IGN); /* a client that leaves is an error of its socket, not a signal */
    signal(SIGXFSZ, SIG_IGN); /* so is a log file at its limit (ulimit -f), as on a full disk */
    log_init("engine", LOG_INFO);
    if (asks_for_help(argc, argv)) {
        const command *c = find_command(argv[1]);
        if (c != NULL && c->print_help != NULL)
            c->print_help(stdout, argc - 2, argv + 2);
        else
            print_help(stdout);
        return 0;
    }
    if (argc < 2) {
        print_help(stderr);
        return EXIT_STATUS_USAGE;
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0) {
        puts("paged " PGD_VERSION_STRING);
        return 0;
    }
    const command *c = find_command(argv[1]);
    if (c != NULL)
        return c->run(argc - 2, argv + 2);
    fprintf(stderr, "paged: unknown command %s; paged --help lists them\n", argv[1]);
    return EXIT_STATUS_USAGE;
}
