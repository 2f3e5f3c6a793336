/* One child process: the worker. Starts it, carries its stderr, sees its end, makes sure that it is
 * gone.
 *
 * The child leads its own process group. Its stdin is a pipe that stays open as long as this
 * process lives: the child reads its secrets there and takes the end of file as the engine's death.
 * Its stderr lines go to our stderr as they are; the last ones are kept for the message about its
 * end. Nothing blocks: supervisor_poll is called when one of the descriptors is ready, and now and
 * then.
 * Owns:    the child and its pipes
 * Thread:  one at a time, and always the one that started the child (the kernel's parent-death
 *          signal goes by thread)
 */
#ifndef ENGINE_SUPERVISOR_H
#define ENGINE_SUPERVISOR_H

#include <sys/types.h>

#include "common/err.h"

#define SUPERVISOR_MAX_FDS    2
#define SUPERVISOR_TEXT_BYTES 1024

typedef struct supervisor supervisor;

PGD_MUST_USE pgd_err supervisor_create(supervisor **out);
/* Kills the child if it lives and waits for its end. */
void supervisor_destroy(supervisor *s);

/* Starts path with argv (NULL-terminated, borrow for the call) and writes stdin_text to its stdin.
 * The child before must have been reaped. Errors: PGD_ENOENT (no program that can be started),
 * PGD_EIO */
PGD_MUST_USE pgd_err supervisor_start(supervisor *s, const char *path, const char *const argv[],
                                      const char *stdin_text, pgd_why *why);
/* Descriptors to poll for reading; at most SUPERVISOR_MAX_FDS. */
int supervisor_get_fds(const supervisor *s, int fds[SUPERVISOR_MAX_FDS]);
/* Carries stderr and reaps. True when there is no child, or no longer. */
bool supervisor_poll(supervisor *s);
/* SIGKILL to the child's whole group; its end shows in supervisor_poll. */
void supervisor_kill(supervisor *s);
/* 0 when there is none. */
pid_t supervisor_get_pid(const supervisor *s);
/* How the last child ended and its last lines: "killed by signal 9 (Killed); it said: ...". Lines
 * of our own log below warn are left out, and so are those that came long before the end. Borrow
 * until the next start. */
const char *supervisor_get_epitaph(const supervisor *s);
/* The second half of it, "; it said: ...", or "". */
const char *supervisor_get_last_words(const supervisor *s);
/* The signal that ended the last child; 0 = none, it exited. */
int supervisor_get_signal(const supervisor *s);

#endif
