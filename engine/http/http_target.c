/* Where a client connects to, from what users type. Only what an OpenAI base URL can look like is
 * understood; anything else is refused with an example instead of being guessed at. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/http/http_client.h"

static pgd_err set_path(http_target *out, const char *path, pgd_why *why)
{
    size_t n = strlen(path);
    while (n > 0 && path[n - 1] == '/')
        n--;
    if (n >= 3 && strncmp(path + n - 3, "/v1", 3) == 0)
        n -= 3;
    while (n > 0 && path[n - 1] == '/')
        n--;
    if (n >= sizeof(out->base_path))
        return pgd_fail(why, PGD_EINVAL, "url: expected a path of at most %zu bytes, got %zu",
                        sizeof(out->base_path) - 1, n);
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)path[i] <= ' ' || path[i] == '?' || path[i] == '#')
            return pgd_fail(why, PGD_EINVAL, "url: expected a path without query, got %s", path);
    }
    memcpy(out->base_path, path, n);
    out->base_path[n] = '\0';
    return PGD_OK;
}

/* host, host:port, [v6] or [v6]:port; text ends at n. */
static pgd_err set_authority(http_target *out, const char *text, size_t n, pgd_why *why)
{
    const char *host = text;
    size_t n_host = n;
    const char *port = NULL;
    if (n > 0 && text[0] == '[') {
        const char *close = memchr(text, ']', n);
        if (close == NULL)
            return pgd_fail(why, PGD_EINVAL, "url: expected ] behind an IPv6 address");
        host = text + 1;
        n_host = (size_t)(close - host);
        if (close + 1 < text + n)
            port = close + 1;
    } else if ((port = memchr(text, ':', n)) != NULL) {
        n_host = (size_t)(port - text);
    }
    if (n_host == 0 || n_host >= sizeof(out->host) || memchr(host, '@', n_host) != NULL)
        return pgd_fail(why, PGD_EINVAL, "url: expected a host of 1 to %zu bytes, got \"%.*s\"",
                        sizeof(out->host) - 1, (int)PGD_MIN(n_host, 80u), host);
    memcpy(out->host, host, n_host);
    out->host[n_host] = '\0';
    if (port == NULL)
        return PGD_OK;
    char digits[8] = "";
    size_t n_digits = (size_t)(text + n - port) - 1;
    if (*port == ':' && n_digits > 0 && n_digits < sizeof(digits))
        memcpy(digits, port + 1, n_digits);
    char *end;
    long v = strtol(digits, &end, 10);
    if (digits[0] < '0' || digits[0] > '9' || *end != '\0' || v < 1 || v > 65535)
        return pgd_fail(why, PGD_EINVAL, "url: expected a port from 1 to 65535, got \"%.*s\"",
                        (int)PGD_MIN(n_digits, 80u), port + 1);
    out->port = (int)v;
    return PGD_OK;
}

pgd_err http_target_parse(http_target *out, const char *url, pgd_why *why)
{
    *out = (http_target){.port = 80};
    if (strncmp(url, "unix:", 5) == 0) {
        const char *path = url + 5;
        if (strncmp(path, "//", 2) == 0)
            path += 2;
        if (path[0] == '\0' || strlen(path) >= sizeof(out->uds))
            return pgd_fail(why, PGD_EINVAL,
                            "url: expected unix: and a path of 1 to %zu bytes, got \"%s\"",
                            sizeof(out->uds) - 1, url);
        snprintf(out->uds, sizeof(out->uds), "%s", path);
        snprintf(out->host, sizeof(out->host), "localhost");
        return PGD_OK;
    }
    if (strncmp(url, "https://", 8) == 0)
        return pgd_fail(why, PGD_EUNSUPPORTED,
                        "url: https is not spoken here; expected http://host:port or unix:/path");
    const char *authority = url;
    if (strncmp(url, "http://", 7) == 0)
        authority += 7;
    else if (strstr(url, "://") != NULL || strchr(url, ':') == NULL)
        return pgd_fail(why, PGD_EINVAL,
                        "url: expected http://host:port or unix:/path, got \"%.100s\"", url);
    size_t n = strcspn(authority, "/?#");
    PGD_TRY(set_authority(out, authority, n, why));
    return set_path(out, authority + n, why);
}
