/* The sub-commands of paged. Each takes the words behind its name and returns the process's exit
 * status: 0 done, 64 usage or configuration, 66 model not readable, 70 the worker could not be kept
 * running, 71 the system refused something.
 *
 * Thread:  main (it becomes the io thread)
 */
#ifndef ENGINE_COMMANDS_H
#define ENGINE_COMMANDS_H

#include <stdio.h>

#include "common/err.h"
#include "config/config.h"
#include "engine/core/core_loop.h"

#define EXIT_STATUS_USAGE  64
#define EXIT_STATUS_MODEL  66
#define EXIT_STATUS_WORKER 70
#define EXIT_STATUS_SYSTEM 71

int cmd_serve(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_bench(int argc, char **argv);
void cmd_bench_help(FILE *out, int argc, char **argv);
int cmd_status(int argc, char **argv);
void cmd_status_help(FILE *out, int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_config(int argc, char **argv);

/* Loads the configuration, initialises the log; on failure prints the reason and returns false. */
bool command_load_config(config *cfg, int argc, char **argv, const char *const *extra, char **rest,
                         int *n_rest);
/* Does this process get what every command with a worker needs? Prints what is missing. */
bool command_check_limits(void);
/* Raises the log level from info to warn, here and for the worker, unless the user chose it. */
void command_quiet_log(config *cfg);
/* Exit status that fits an error of engine_create. */
int command_exit_status(pgd_err err);
/* The same for a core loop that is CORE_FAILED. */
int command_failed_status(const core_stats *stats);

#endif
