/* One input for the HMAC, written byte by byte: its layout is part of the protocol, and goes with
 * WIRE_VERSION. Both sides call the same function for both roles, so that they cannot drift. */
#include "proto/attach.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/hash.h"

static const char *const ROLES[] = {
    [ATTACH_ENGINE] = "paged engine", [ATTACH_WORKER] = "paged worker"};
static_assert(HASH_SHA256_BYTES == CONTROL_PROOF_BYTES, "a proof is one HMAC");

/* --- proofs ----------------------------------------------------------------------------------- */

pgd_err attach_draw_nonce(uint8_t nonce[CONTROL_NONCE_BYTES], pgd_why *why)
{
    if (getrandom(nonce, CONTROL_NONCE_BYTES, 0) != CONTROL_NONCE_BYTES)
        return pgd_fail(why, PGD_EIO, "no random numbers from the system");
    return PGD_OK;
}

static size_t put_le(uint8_t *out, uint64_t x, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        out[i] = (uint8_t)(x >> (8 * i));
    return n_bytes;
}

pgd_err attach_prove(uint8_t proof[CONTROL_PROOF_BYTES], const attach_key *key, attach_role role,
                     const attach_terms *terms)
{
    uint8_t text[128];
    size_t n = strlen(ROLES[role]);
    memcpy(text, ROLES[role], n);
    n += put_le(text + n, WIRE_VERSION, 2);
    memcpy(text + n, terms->worker_nonce, CONTROL_NONCE_BYTES);
    n += CONTROL_NONCE_BYTES;
    memcpy(text + n, terms->engine_nonce, CONTROL_NONCE_BYTES);
    n += CONTROL_NONCE_BYTES;
    n += put_le(text + n, terms->worker_epoch, 4);
    n += put_le(text + n, terms->max_frame_bytes, 4);
    return hash_hmac_sha256(proof, key->data, key->n_bytes, text, n) ? PGD_OK : PGD_ENOMEM;
}

pgd_err attach_check(const uint8_t proof[CONTROL_PROOF_BYTES], const attach_key *key,
                     attach_role role, const attach_terms *terms, pgd_why *why)
{
    uint8_t expected[CONTROL_PROOF_BYTES];
    PGD_TRY(attach_prove(expected, key, role, terms));
    if (hash_is_equal(proof, expected, sizeof expected))
        return PGD_OK;
    return pgd_fail(why, PGD_EPROTO, "expected the proof of %s token, got another one",
                    key->n_bytes > 0 ? "the same worker" : "having no worker");
}

/* --- the key's file --------------------------------------------------------------------------- */

/* systemd hands out credentials through an access list, whose mask shows as group bits. */
static bool is_credential(const char *path)
{
    const char *dir = getenv("CREDENTIALS_DIRECTORY");
    size_t n = dir != NULL ? strlen(dir) : 0;
    return n > 0 && strncmp(path, dir, n) == 0 && path[n] == '/';
}

static pgd_err check_file(int fd, const char *path, pgd_why *why)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return pgd_fail(why, PGD_EIO, "worker_token_file: cannot read %s: %s", path,
                        strerror(errno));
    if (!S_ISREG(st.st_mode))
        return pgd_fail(why, PGD_EINVAL,
                        "worker_token_file: expected a regular file, got something else, at %s",
                        path);
    mode_t forbidden = is_credential(path) ? 037 : 077;
    if ((st.st_mode & forbidden) != 0)
        return pgd_fail(why, PGD_EINVAL,
                        "worker_token_file: expected mode 0600, got %04o, at %s; run chmod 600 on "
                        "it, and make a new token if others have read it",
                        (unsigned)(st.st_mode & 07777), path);
    return PGD_OK;
}

static pgd_err read_key(attach_key *out, int fd, const char *path, pgd_why *why)
{
    uint8_t text[ATTACH_MAX_KEY_BYTES + 3]; /* "\r\n" at the end, and one too many */
    size_t n = 0;
    ssize_t got;
    while (n < sizeof text && (got = read(fd, text + n, sizeof text - n)) != 0) {
        if (got < 0 && errno != EINTR)
            return pgd_fail(why, PGD_EIO, "worker_token_file: cannot read %s: %s", path,
                            strerror(errno));
        n += got > 0 ? (size_t)got : 0;
    }
    if (n > 0 && text[n - 1] == '\n')
        n--;
    if (n > 0 && text[n - 1] == '\r')
        n--;
    out->n_bytes = 0;
    if (n < ATTACH_MIN_KEY_BYTES || n > ATTACH_MAX_KEY_BYTES) {
        pgd_fail(why, PGD_EINVAL,
                 "worker_token_file: expected %d to %d bytes, got %s%zu, at %s; `openssl rand -hex "
                 "32` makes a token",
                 ATTACH_MIN_KEY_BYTES, ATTACH_MAX_KEY_BYTES,
                 n > ATTACH_MAX_KEY_BYTES ? "at least " : "", n, path);
        explicit_bzero(text, sizeof text);
        return PGD_EINVAL;
    }
    memcpy(out->data, text, n);
    out->n_bytes = n;
    explicit_bzero(text, sizeof text);
    return PGD_OK;
}

pgd_err attach_read_key(attach_key *out, const char *path, pgd_why *why)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return pgd_fail(why, errno == ENOENT ? PGD_ENOENT : PGD_EIO,
                        "worker_token_file: cannot open %s: %s", path, strerror(errno));
    pgd_err err = check_file(fd, path, why);
    if (err == PGD_OK)
        err = read_key(out, fd, path, why);
    close(fd);
    return err;
}

/* --- addresses -------------------------------------------------------------------------------- */

static pgd_err check_ipc(const char *path, pgd_why *why)
{
    size_t cap = sizeof(((struct sockaddr_un *)NULL)->sun_path);
    if (path[0] != '/' || path[1] == 0)
        return pgd_fail(why, PGD_EINVAL, "expected ipc:// and an absolute path, got ipc://%s",
                        path);
    if (strlen(path) >= cap)
        return pgd_fail(why, PGD_EINVAL,
                        "expected a socket path of at most %zu bytes, got %zu, at %s", cap - 1,
                        strlen(path), path);
    return PGD_OK;
}

static bool is_loopback(const char *host)
{
    struct in_addr v4;
    struct in6_addr v6;
    if (inet_pton(AF_INET, host, &v4) == 1)
        return ntohl(v4.s_addr) >> 24 == 127;
    if (inet_pton(AF_INET6, host, &v6) == 1)
        return IN6_IS_ADDR_LOOPBACK(&v6);
    return strcmp(host, "localhost") == 0;
}

/* HOST:PORT or [IPV6]:PORT; false when it is neither. */
static bool split_address(char host[256], const char *address)
{
    char *end;
    const char *colon = strrchr(address, ':');
    size_t n = colon != NULL ? (size_t)(colon - address) : 0;
    bool is_bracketed = n >= 2 && address[0] == '[' && address[n - 1] == ']';
    unsigned long port =
        colon != NULL && colon[1] >= '0' && colon[1] <= '9' ? strtoul(colon + 1, &end, 10) : 0;
    if (n == 0 || n >= 256 || port < 1 || port > 65535 || *end != 0 ||
        (!is_bracketed && memchr(address, ':', n) != NULL))
        return false;
    snprintf(host, 256, "%.*s", (int)(is_bracketed ? n - 2 : n), address + is_bracketed);
    return true;
}

static pgd_err check_tcp(const char *url, const char *address, bool has_key, pgd_why *why)
{
    char host[256];
    if (!split_address(host, address))
        return pgd_fail(why, PGD_EINVAL, "expected tcp://HOST:PORT or tcp://[IPV6]:PORT, got %s",
                        url);
    if (!has_key && !is_loopback(host))
        return pgd_fail(why, PGD_EINVAL,
                        "expected a worker_token_file for an address beyond loopback, got none, at "
                        "%s: whoever reaches it could pose as engine or worker",
                        url);
    return PGD_OK;
}

const char *attach_ipc_path(const char *url)
{
    return strncmp(url, "ipc://", 6) == 0 ? url + 6 : NULL;
}

pgd_err attach_check_ipc_place(const char *path, pgd_why *why)
{
    struct stat st;
    if (lstat(path, &st) == 0 && !S_ISSOCK(st.st_mode))
        return pgd_fail(why, PGD_EINVAL,
                        "cannot listen: expected a socket or nothing, got %s, at %s",
                        S_ISDIR(st.st_mode) ? "a directory" : "another kind of file", path);
    return PGD_OK;
}

bool attach_is_local(const char *url)
{
    char host[256];
    return attach_ipc_path(url) != NULL ||
           (strncmp(url, "tcp://", 6) == 0 && split_address(host, url + 6) && is_loopback(host));
}

pgd_err attach_check_url(const char *url, bool has_key, pgd_why *why)
{
    if (strchr(url, ',') != NULL)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "expected one URL, got several (%s): more than one worker (tensor or data "
                        "parallel) is not built into this version",
                        url);
    if (attach_ipc_path(url) != NULL)
        return check_ipc(attach_ipc_path(url), why);
    if (strncmp(url, "tcp://", 6) == 0)
        return check_tcp(url, url + 6, has_key, why);
    if (strncmp(url, "tls+tcp://", 10) == 0)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "tls+tcp is not built into this version, got %s; use tcp:// with "
                        "worker_token_file in a network of your own, or through a tunnel",
                        url);
    return pgd_fail(why, PGD_EINVAL, "expected ipc:///PATH or tcp://HOST:PORT, got %s", url);
}
