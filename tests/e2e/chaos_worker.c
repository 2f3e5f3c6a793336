/* The real worker with trouble planted at its message boundaries: worker/main.c and all of its
 * layers, linked with --wrap around three functions, so that the product itself holds no sabotage.
 *
 * PAGED_CHAOS is a list of "LIFE:ACTION@POINT", with commas:
 *   LIFE    1 = the first process, 2 = the next ... (counted in the file PAGED_CHAOS_COUNT), * = each
 *   POINT   before-TYPE or after-TYPE, .N behind it for the N-th such message (1); messages that are
 *           received have only after-
 *   ACTION  of the process: kill exit0 exit1 stop close hang
 *           of the message, at before- of one that is sent or after- of one that is received: epoch
 *           magic version type short long noise huge step; of one that is sent: drop twice flood;
 *           of the result: token many stranger none
 */
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nng/nng.h>

#include "worker/step_runner.h"

#define MAX_FAULTS 32
#define N_FLOOD    3000
#define SENT_US    50000 /* until a sent message is with the engine */

typedef struct fault {
    char action[16];
    bool is_before;
    wire_type type;
    int n; /* which one of its type */
} fault;

static fault faults_[MAX_FAULTS];
static int n_faults_;
static int n_before_[WIRE_TYPE_LAST + 1];
static int n_after_[WIRE_TYPE_LAST + 1];

/* --- what to do where ------------------------------------------------------------------------- */

static wire_type type_by_name(const char *name)
{
    for (int t = 1; t <= WIRE_TYPE_LAST; t++)
        if (strcmp(wire_type_name((wire_type)t), name) == 0)
            return (wire_type)t;
    fprintf(stderr, "chaos: no message %s\n", name);
    exit(99);
}

static int count_life(void)
{
    const char *path = getenv("PAGED_CHAOS_COUNT");
    struct stat st;
    int fd = path != NULL ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (fd < 0 || write(fd, "x", 1) != 1 || fstat(fd, &st) != 0) {
        fputs("chaos: PAGED_CHAOS_COUNT must name a file\n", stderr);
        exit(99);
    }
    close(fd);
    return (int)st.st_size;
}

__attribute__((constructor)) static void read_plan(void)
{
    char plan[2048];
    char *save;
    int life = count_life();
    snprintf(plan, sizeof plan, "%s", getenv("PAGED_CHAOS") != NULL ? getenv("PAGED_CHAOS") : "");
    for (char *p = strtok_r(plan, ",", &save); p != NULL; p = strtok_r(NULL, ",", &save)) {
        char which[8];
        char when[8];
        char type[16];
        fault f = {.n = 1};
        if (sscanf(p, "%7[0-9*]:%15[a-z0-9]@%7[a-z]-%15[a-z_].%d", which, f.action, when, type,
                   &f.n) < 4 ||
            n_faults_ == MAX_FAULTS) {
            fprintf(stderr, "chaos: cannot read %s\n", p);
            exit(99);
        }
        f.is_before = strcmp(when, "before") == 0;
        f.type = type_by_name(type);
        if (which[0] == '*' || atoi(which) == life)
            faults_[n_faults_++] = f;
    }
}

static void close_sockets(void)
{
    for (int fd = 3; fd < 256; fd++)
        (void)shutdown(fd, SHUT_RDWR);
}

/* Actions of the process happen here; the name of one of the message is returned. */
static const char *reach(bool is_before, wire_type type)
{
    int n = ++(is_before ? n_before_ : n_after_)[type];
    for (int i = 0; i < n_faults_; i++) {
        const fault *f = &faults_[i];
        if (f->is_before != is_before || f->type != type || f->n != n)
            continue;
        if (!is_before)
            usleep(SENT_US);
        fprintf(stderr, "chaos: %s\n", f->action);
        if (strcmp(f->action, "kill") == 0)
            raise(SIGKILL);
        else if (strcmp(f->action, "exit0") == 0)
            _exit(0);
        else if (strcmp(f->action, "exit1") == 0)
            _exit(1);
        else if (strcmp(f->action, "stop") == 0)
            raise(SIGSTOP);
        else if (strcmp(f->action, "close") == 0)
            close_sockets();
        else if (strcmp(f->action, "hang") == 0)
            for (;;)
                pause();
        else
            return f->action;
        if (strcmp(f->action, "close") == 0)
            raise(SIGSTOP); /* so that the closing alone must tell */
    }
    return "";
}

/* --- messages --------------------------------------------------------------------------------- */

int __real_nng_sendmsg(nng_socket s, nng_msg *m, int flags);
int __wrap_nng_sendmsg(nng_socket s, nng_msg *m, int flags);
int __real_nng_recvmsg(nng_socket s, nng_msg **m, int flags);
int __wrap_nng_recvmsg(nng_socket s, nng_msg **m, int flags);

static void send_again(nng_socket s, const nng_msg *m, int n)
{
    for (int i = 0; i < n; i++) {
        nng_msg *copy;
        if (nng_msg_dup(&copy, m) == 0 && __real_nng_sendmsg(s, copy, 0) != 0)
            nng_msg_free(copy);
    }
}

/* header: [magic u32][version u16][type u16][epoch u32][0 u32][frame_bytes u64], then the record */
static void spoil(nng_msg *m, const char *action)
{
    uint8_t *frame = nng_msg_body(m);
    size_t n_bytes = nng_msg_len(m);
    uint64_t huge = 64 << 20;
    if (strcmp(action, "magic") == 0)
        frame[0] ^= 0xff;
    else if (strcmp(action, "version") == 0)
        frame[4] ^= 0xff;
    else if (strcmp(action, "type") == 0)
        frame[6] = WIRE_KV_CONFIG; /* not a worker's to send, nor the engine's again */
    else if (strcmp(action, "epoch") == 0)
        frame[8] ^= 0xff;
    else if (strcmp(action, "short") == 0)
        (void)nng_msg_chop(m, 5);
    else if (strcmp(action, "long") == 0)
        (void)nng_msg_append(m, "01234567", 8);
    else if (strcmp(action, "step") == 0)
        frame[WIRE_HEADER_BYTES] += 1;
    else if (strcmp(action, "huge") == 0)
        (void)nng_msg_realloc(m, huge);
    else if (strcmp(action, "noise") == 0)
        for (size_t i = WIRE_HEADER_BYTES; i < n_bytes; i++)
            frame[i] = (uint8_t)(i * 167 + 13);
}

int __wrap_nng_sendmsg(nng_socket s, nng_msg *m, int flags)
{
    wire_header h;
    if (wire_decode_header(&h, nng_msg_body(m), nng_msg_len(m), NULL) != PGD_OK)
        return __real_nng_sendmsg(s, m, flags);
    const char *action = reach(true, h.type);
    if (strcmp(action, "twice") == 0)
        send_again(s, m, 1);
    else if (strcmp(action, "flood") == 0)
        send_again(s, m, N_FLOOD);
    spoil(m, action);
    if (strcmp(action, "drop") == 0) {
        nng_msg_free(m);
        return 0;
    }
    int rv = __real_nng_sendmsg(s, m, flags);
    if (rv == 0)
        (void)reach(false, h.type);
    return rv;
}

int __wrap_nng_recvmsg(nng_socket s, nng_msg **m, int flags)
{
    wire_header h;
    int rv = __real_nng_recvmsg(s, m, flags);
    if (rv == 0 && wire_decode_header(&h, nng_msg_body(*m), nng_msg_len(*m), NULL) == PGD_OK)
        spoil(*m, reach(false, h.type));
    return rv;
}

/* --- results ---------------------------------------------------------------------------------- */

pgd_err __real_sim_runner_create(step_runner **out, pgd_why *why);
pgd_err __wrap_sim_runner_create(step_runner **out, pgd_why *why);

static const step_runner_vtbl *real_;
static step_runner_vtbl spoilt_;

static pgd_err step(step_runner *r, const scheduler_output *in, step_result *out, pgd_why *why)
{
    pgd_err err = real_->step(r, in, out, why);
    request_result_msg *res = (request_result_msg *)(uintptr_t)out->results;
    if (err != PGD_OK || out->n_results == 0)
        return err;
    for (int i = 0; i < n_faults_; i++) {
        const fault *f = &faults_[i];
        if (!f->is_before || f->type != WIRE_RESULT || f->n != n_before_[WIRE_RESULT] + 1)
            continue;
        if (strcmp(f->action, "token") == 0)
            res[0].tokens[0] = 1 << 30;
        else if (strcmp(f->action, "many") == 0)
            res[0].n_tokens = 2;
        else if (strcmp(f->action, "stranger") == 0)
            res[0].request_id += 1000000;
        else if (strcmp(f->action, "none") == 0)
            out->n_results = 0;
    }
    return err;
}

pgd_err __wrap_sim_runner_create(step_runner **out, pgd_why *why)
{
    PGD_TRY(__real_sim_runner_create(out, why));
    real_ = (*out)->vtbl;
    spoilt_ = *real_;
    spoilt_.step = step;
    (*out)->vtbl = &spoilt_;
    return PGD_OK;
}
