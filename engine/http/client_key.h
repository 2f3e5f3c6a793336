/* The API key that a client of ours sends.
 *
 * Thread:  any
 */
#ifndef ENGINE_HTTP_CLIENT_KEY_H
#define ENGINE_HTTP_CLIENT_KEY_H

#include "common/err.h"

#define CLIENT_KEY_HEADER_BYTES 600

/* Writes "Authorization: Bearer KEY\r\n" with the first key of a file as the server's
 * --api-key-file reads it: blank lines and lines that begin with # are skipped. path "": no header,
 * out is "". Errors: PGD_EINVAL and those of file_read; the why never holds the key */
PGD_MUST_USE pgd_err client_key_header(char out[CLIENT_KEY_HEADER_BYTES], const char *path,
                                       pgd_why *why);

#endif
