/* `paged config` and `paged inspect`, and what all commands share. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/resource.h>

#include "common/log.h"
#include "common/mem.h"
#include "engine/commands.h"
#include "engine/inspect.h"

bool command_load_config(config *cfg, int argc, char **argv, const char *const *extra, char **rest,
                         int *n_rest)
{
    pgd_why why = {0};
    log_level level;
    pgd_err err = config_load(cfg, argc, argv, extra, rest, n_rest, &why);
    if (err != PGD_OK) {
        fprintf(stderr, "paged: %s\n", pgd_why_text(&why, err));
        return false;
    }
    if (log_level_parse(&level, cfg->log_level))
        log_set_level(level);
    return true;
}

/* Below these NNG and libuv cannot start their threads and pipes, which they take badly: they abort,
 * crash or hang. */
bool command_check_limits(void)
{
    static const struct {
        int resource;
        rlim_t min;
        const char *what;
        const char *cure;
    } rows[] = {{RLIMIT_AS, 1u << 30, "bytes of address space", "ulimit -v, LimitAS"},
                {RLIMIT_NOFILE, 64, "open files", "ulimit -n, LimitNOFILE"}};
    for (size_t i = 0; i < PGD_ARRAY_LEN(rows); i++) {
        struct rlimit limit;
        if (getrlimit(rows[i].resource, &limit) != 0 || limit.rlim_cur >= rows[i].min)
            continue;
        fprintf(stderr, "paged: expected a limit of at least %llu %s, got %llu: raise it (%s)\n",
                (unsigned long long)rows[i].min, rows[i].what, (unsigned long long)limit.rlim_cur,
                rows[i].cure);
        return false;
    }
    return true;
}

void command_quiet_log(config *cfg)
{
    if (strcmp(cfg->log_level, "info") != 0)
        return;
    snprintf(cfg->log_level, sizeof(cfg->log_level), "warn");
    log_set_level(LOG_WARN);
}

int command_exit_status(pgd_err err)
{
    switch (err) {
    case PGD_EINVAL:
    case PGD_ERANGE:
        return EXIT_STATUS_USAGE;
    case PGD_ENOENT:
    case PGD_EFORMAT:
    case PGD_EUNSUPPORTED:
        return EXIT_STATUS_MODEL;
    default:
        return EXIT_STATUS_SYSTEM;
    }
}

int command_failed_status(const core_stats *stats)
{
    return stats->fail_err == PGD_OK ? EXIT_STATUS_WORKER : command_exit_status(stats->fail_err);
}

int cmd_config(int argc, char **argv)
{
    static const char *const extra[] = {"dump", NULL};
    config cfg;
    char *rest[64];
    int n_rest = 0;
    if (argc > (int)PGD_ARRAY_LEN(rest) ||
        !command_load_config(&cfg, argc, argv, extra, rest, &n_rest))
        return EXIT_STATUS_USAGE;
    bool dump = false;
    for (int i = 0; i < n_rest; i++) {
        if (strcmp(rest[i], "--dump") != 0) {
            fprintf(stderr, "paged config: unexpected %s\n", rest[i]);
            return EXIT_STATUS_USAGE;
        }
        dump = true;
    }
    if (dump)
        config_dump(&cfg, stdout, true);
    else
        puts("the configuration is good; --dump prints it");
    return 0;
}

int cmd_inspect(int argc, char **argv)
{
    if (argc != 1 || argv[0][0] == '-') {
        fputs("usage: paged inspect FILE\n", stderr);
        return EXIT_STATUS_USAGE;
    }
    return inspect_run(argv[0], stdout);
}
