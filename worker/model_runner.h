/* The worker's real runner: a model on the CPU behind the step_runner interface.
 *
 * Step: release finished and preempted rows, add new ones, append blocks of the others, zero
 * blocks, build the batch, forward, sample. Every message is checked against rows and tables; what
 * breaks the protocol is PGD_EPROTO, after which this worker's state must not be used any more.
 * Owns:    everything it loads, until destroy
 * Thread:  the worker's main thread
 */
#ifndef WORKER_MODEL_RUNNER_H
#define WORKER_MODEL_RUNNER_H

#include "worker/step_runner.h"

#endif
