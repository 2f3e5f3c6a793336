/* One file serves both sides: an operator's client reads the first of the keys that the server
 * accepts. */
#include "engine/http/client_key.h"

#include <stdio.h>
#include <string.h>

#include "common/file.h"
#include "common/mem.h"
#include "engine/http/http_auth.h"

#define MAX_FILE_BYTES ((size_t)1 << 20)

/* *n: 0 when there is none. */
static const char *find_key(const char *text, size_t *n)
{
    for (const char *line = text;; line++) {
        size_t n_line = strcspn(line, "\n");
        size_t n_blank = strspn(line, " \t\r");
        const char *key = line + PGD_MIN(n_blank, n_line);
        *n = strcspn(key, " \t\r\n");
        if (*n > 0 && key[0] != '#')
            return key;
        line += n_line;
        if (*line == '\0') {
            *n = 0;
            return line;
        }
    }
}

pgd_err client_key_header(char out[CLIENT_KEY_HEADER_BYTES], const char *path, pgd_why *why)
{
    char *text;
    size_t n_bytes;
    size_t n;
    out[0] = '\0';
    if (path[0] == '\0')
        return PGD_OK;
    PGD_TRY(file_read(&text, &n_bytes, path, MAX_FILE_BYTES, why));
    const char *key = find_key(text, &n);
    bool ok = n > 0 && n <= HTTP_AUTH_MAX_KEY_BYTES;
    for (size_t i = 0; i < n && ok; i++)
        ok = (unsigned char)key[i] > 0x20 && (unsigned char)key[i] < 0x7F;
    if (ok)
        snprintf(out, CLIENT_KEY_HEADER_BYTES, "Authorization: Bearer %.*s\r\n", (int)n, key);
    explicit_bzero(text, n_bytes);
    mem_free(text);
    return ok ? PGD_OK
              : pgd_fail(why, PGD_EINVAL, "%s: expected a key of 1 to %d visible ASCII bytes", path,
                         HTTP_AUTH_MAX_KEY_BYTES);
}
