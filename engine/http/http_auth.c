/* Guarded unless listed: a new route is closed until somebody opens it here. Open are what a load
 * balancer and a client's start-up ask (health, the list of models) and OPTIONS, since a browser's
 * preflight cannot carry a key.
 *
 * Digests rather than keys: they are all of one length, so that comparing needs no branch, and a
 * core dump holds no key that works. */
#include "engine/http/http_auth.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file.h"
#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"

#define MAX_FILE_BYTES  ((size_t)1 << 20)
#define CREDENTIAL_NAME "api-keys"

typedef struct digest {
    uint8_t bytes[HASH_SHA256_BYTES];
} digest;

struct http_auth {
    hash_sha256_ctx *sha;
    digest *keys; /* [n_keys] */
    int32_t n_keys;
};

pgd_err http_auth_create(http_auth **out)
{
    http_auth *a = mem_calloc(1, sizeof(*a));
    if (a == NULL)
        return PGD_ENOMEM;
    if (hash_sha256_create(&a->sha) != PGD_OK) {
        mem_free(a);
        return PGD_ENOMEM;
    }
    *out = a;
    return PGD_OK;
}

void http_auth_destroy(http_auth *a)
{
    if (a == NULL)
        return;
    hash_sha256_destroy(a->sha);
    mem_free(a->keys);
    mem_free(a);
}

int32_t http_auth_n_keys(const http_auth *a)
{
    return a->n_keys;
}

static void digest_key(digest *out, hash_sha256_ctx *sha, const char *key, size_t n_bytes)
{
    hash_sha256_begin(sha);
    hash_sha256_update(sha, key, n_bytes);
    hash_sha256_end(sha, out->bytes);
}

/* --- the file --------------------------------------------------------------------------------- */

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* One line, its end cut off. A key that a header cannot carry would never match: told now. */
static pgd_err read_line(digest *keys, int32_t *n_keys, hash_sha256_ctx *sha, const char *line,
                         size_t n_bytes, int line_number, pgd_why *why)
{
    while (n_bytes > 0 && is_blank(line[n_bytes - 1]))
        n_bytes--;
    while (n_bytes > 0 && is_blank(*line)) {
        line++;
        n_bytes--;
    }
    if (n_bytes == 0 || line[0] == '#')
        return PGD_OK;
    if (n_bytes > HTTP_AUTH_MAX_KEY_BYTES)
        return pgd_fail(why, PGD_EINVAL, "line %d: expected a key of at most %d bytes, got %zu",
                        line_number, HTTP_AUTH_MAX_KEY_BYTES, n_bytes);
    for (size_t i = 0; i < n_bytes; i++) {
        if ((unsigned char)line[i] <= 0x20 || (unsigned char)line[i] >= 0x7F)
            return pgd_fail(why, PGD_EINVAL,
                            "line %d: expected visible ASCII, got another byte at column %zu",
                            line_number, i + 1);
    }
    if (*n_keys == HTTP_AUTH_MAX_KEYS)
        return pgd_fail(why, PGD_EINVAL, "line %d: expected at most %d keys", line_number,
                        HTTP_AUTH_MAX_KEYS);
    digest_key(&keys[(*n_keys)++], sha, line, n_bytes);
    return PGD_OK;
}

static pgd_err read_keys(digest *keys, int32_t *n_keys, hash_sha256_ctx *sha, const char *text,
                         size_t n_bytes, pgd_why *why)
{
    const char *end = text + n_bytes;
    int line_number = 1;
    for (const char *line = text; line < end; line_number++) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        const char *stop = newline != NULL ? newline : end;
        PGD_TRY(read_line(keys, n_keys, sha, line, (size_t)(stop - line), line_number, why));
        line = stop + 1;
    }
    if (*n_keys == 0)
        return pgd_fail(why, PGD_EINVAL, "expected one key per line, got no key");
    return PGD_OK;
}

static pgd_err load_file(http_auth *a, const char *path, pgd_why *why)
{
    char *text = NULL;
    size_t n_bytes = 0;
    struct stat st;
    int32_t n_keys = 0;
    digest *keys = mem_calloc(HTTP_AUTH_MAX_KEYS, sizeof(*keys));
    if (keys == NULL)
        return pgd_fail(why, PGD_ENOMEM, "out of memory");
    pgd_err err = file_read(&text, &n_bytes, path, MAX_FILE_BYTES, why);
    if (err == PGD_OK) {
        err = read_keys(keys, &n_keys, a->sha, text, n_bytes, why);
        if (err != PGD_OK)
            (void)pgd_fail_prefix(why, err, "%s", path);
        explicit_bzero(text, n_bytes);
        mem_free(text);
    }
    if (err != PGD_OK) {
        mem_free(keys);
        return pgd_fail_prefix(why, err == PGD_ENOMEM ? err : PGD_EINVAL, "api_key_file");
    }
    if (stat(path, &st) == 0 && (st.st_mode & S_IROTH) != 0)
        log_warn("http", "everybody on this machine may read the keys of %s; run chmod o-r on it",
                 path);
    mem_free(a->keys);
    a->keys = keys;
    a->n_keys = n_keys;
    return PGD_OK;
}

pgd_err http_auth_load(http_auth *a, const char *path, pgd_why *why)
{
    char credential[PATH_MAX];
    const char *dir = getenv("CREDENTIALS_DIRECTORY");
    if (path[0] != '\0')
        return load_file(a, path, why);
    if (dir == NULL)
        return PGD_OK;
    if (!file_join(credential, sizeof(credential), dir, CREDENTIAL_NAME))
        return pgd_fail(why, PGD_EINVAL, "CREDENTIALS_DIRECTORY is too long");
    /* One that is there but cannot be reached must not look like none: that would open the server. */
    if (access(credential, F_OK) != 0 && errno == ENOENT)
        return PGD_OK;
    return load_file(a, credential, why);
}

/* --- requests --------------------------------------------------------------------------------- */

static bool is_open(const char *method, const char *path)
{
    static const char models[] = "/v1/models";
    if (strcmp(method, "OPTIONS") == 0)
        return true;
    if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0)
        return false;
    if (strcmp(path, "/health") == 0)
        return true;
    size_t n = sizeof(models) - 1;
    return strncmp(path, models, n) == 0 && (path[n] == '\0' || path[n] == '/');
}

/* Looks at every byte of every key, whatever it finds. */
static bool is_known(const http_auth *a, const char *key)
{
    digest presented;
    int32_t n_equal = 0;
    digest_key(&presented, a->sha, key, strlen(key));
    for (int32_t k = 0; k < a->n_keys; k++)
        n_equal += hash_is_equal(presented.bytes, a->keys[k].bytes, sizeof(presented.bytes));
    return n_equal > 0;
}

/* The KEY of "Bearer KEY", NULL when the header says something else. */
static const char *bearer_key(const char *authorization)
{
    if (authorization == NULL || strncasecmp(authorization, "Bearer", 6) != 0)
        return NULL;
    const char *key = authorization + 6;
    if (*key != ' ')
        return NULL;
    return key + strspn(key, " ");
}

bool http_auth_allows(const http_auth *a, const char *method, const char *path,
                      const char *authorization, const char *x_api_key)
{
    if (a->n_keys == 0 || is_open(method, path))
        return true;
    const char *bearer = bearer_key(authorization);
    bool is_allowed = bearer != NULL && is_known(a, bearer);
    return is_allowed || (x_api_key != NULL && is_known(a, x_api_key));
}
