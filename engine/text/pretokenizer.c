/* Pre-tokenizers as scanners over code points.
 *
 * Every function below is one alternative of an expression and returns the end of its match, or
 * start if it does not match; pretokenizer_next tries them in the expression's order. Nothing
 * backtracks beyond one character and nothing recurses, so an unbroken run of a megabyte costs one
 * pass. A run of spaces is looked at a constant number of times: `\s+(?!\S)` leaves one space for
 * the next piece.
 *
 * Rejected: a regular-expression library. A backtracking one needs a stack or a limit proportional
 * to the run, and its idea of \s, \p{L} and case folding follows its own Unicode version.
 */
#include "engine/text/pretokenizer.h"

#include <string.h>

#include "engine/text/unicode_class.h"

#define LONG_S 0x17F /* folds to s: (?i:'s) takes it too */

typedef struct scan {
    const char *text;
    size_t n_bytes;
} scan;

/* The character at pos, or -2 at the end; *end is where the next begins. */
static int32_t char_at(const scan *s, size_t pos, size_t *end)
{
    if (pos >= s->n_bytes) {
        *end = pos;
        return -2;
    }
    size_t n_used;
    int32_t cp = unicode_decode(s->text + pos, s->n_bytes - pos, &n_used);
    *end = pos + n_used;
    return cp;
}

/* End of the longest run of characters of class from pos on. */
static size_t run_of(const scan *s, size_t pos, unsigned class)
{
    while (pos < s->n_bytes) {
        size_t end;
        if (!(unicode_class(char_at(s, pos, &end)) & class))
            break;
        pos = end;
    }
    return pos;
}

/* [^\s\p{L}\p{N}]+ */
static size_t run_of_other(const scan *s, size_t pos)
{
    while (pos < s->n_bytes) {
        size_t end;
        unsigned class = unicode_class(char_at(s, pos, &end));
        if (class & (UNICODE_SPACE | UNICODE_LETTER | UNICODE_NUMBER))
            break;
        pos = end;
    }
    return pos;
}

static int32_t fold(int32_t cp, bool any_case)
{
    if (any_case && cp >= 'A' && cp <= 'Z')
        return cp - 'A' + 'a';
    return any_case && cp == LONG_S ? 's' : cp;
}

/* 's|'t|'re|'ve|'m|'ll|'d */
static size_t match_contraction(const scan *s, size_t start, bool any_case)
{
    if (s->text[start] != '\'')
        return start;
    size_t one;
    size_t two;
    int32_t a = fold(char_at(s, start + 1, &one), any_case);
    switch (a) {
    case 's':
    case 't':
    case 'm':
    case 'd':
        return one;
    case 'r':
    case 'v':
        return fold(char_at(s, one, &two), any_case) == 'e' ? two : start;
    case 'l':
        return fold(char_at(s, one, &two), any_case) == 'l' ? two : start;
    default:
        return start;
    }
}

/* \s+(?!\S)|\s+ : a run before a non-space leaves its last space, unless it is the only one. */
static size_t match_spaces(const scan *s, size_t start)
{
    size_t last = start;
    size_t pos = start;
    while (pos < s->n_bytes) {
        size_t end;
        if (!(unicode_class(char_at(s, pos, &end)) & UNICODE_SPACE))
            return last > start ? last : pos;
        last = pos;
        pos = end;
    }
    return pos;
}

static size_t next_gpt2(const scan *s, size_t start)
{
    size_t end = match_contraction(s, start, false);
    if (end > start)
        return end;
    size_t body = start + (s->text[start] == ' ' ? 1 : 0);
    end = run_of(s, body, UNICODE_LETTER);
    if (end == body)
        end = run_of(s, body, UNICODE_NUMBER);
    if (end == body)
        end = run_of_other(s, body);
    return end > body ? end : match_spaces(s, start);
}

/* \s*[\r\n]+ : through the last line break of the run of spaces. */
static size_t match_line_breaks(const scan *s, size_t start)
{
    size_t best = start;
    size_t pos = start;
    while (pos < s->n_bytes) {
        size_t end;
        int32_t cp = char_at(s, pos, &end);
        if (!(unicode_class(cp) & UNICODE_SPACE))
            break;
        if (cp == '\r' || cp == '\n')
            best = end;
        pos = end;
    }
    return best;
}

/* \p{N}{1,max}, behind a first digit that ends at end. */
static size_t match_digits(const scan *s, size_t end, int32_t max_digits)
{
    for (int32_t i = 1; i < max_digits; i++) {
        size_t next;
        if (!(unicode_class(char_at(s, end, &next)) & UNICODE_NUMBER))
            break;
        end = next;
    }
    return end;
}

/*  ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ with one more character in the second brackets,
 * or '\n' for none. */
static size_t match_rest(const scan *s, size_t start, char also)
{
    size_t body = start + (s->text[start] == ' ' ? 1 : 0);
    size_t end = run_of_other(s, body);
    if (end > body) {
        while (end < s->n_bytes &&
               (s->text[end] == '\r' || s->text[end] == '\n' || s->text[end] == also))
            end++;
        return end;
    }
    end = match_line_breaks(s, start);
    return end > start ? end : match_spaces(s, start);
}

static size_t next_tiktoken(const scan *s, size_t start, int32_t max_digits)
{
    size_t end = match_contraction(s, start, true);
    if (end > start)
        return end;
    /* [^\r\n\p{L}\p{N}]?\p{L}+ */
    size_t first;
    int32_t cp = char_at(s, start, &first);
    unsigned class = unicode_class(cp);
    if (class & UNICODE_LETTER)
        return run_of(s, first, UNICODE_LETTER);
    if (class & UNICODE_NUMBER)
        return match_digits(s, first, max_digits);
    if (cp != '\r' && cp != '\n') {
        end = run_of(s, first, UNICODE_LETTER);
        if (end > first)
            return end;
    }
    return match_rest(s, start, '\n');
}

/* C*S+ : where no S follows the run of C, the run gives back what stands behind its last character
 * that is both, and S+ is that character. */
static size_t match_small(const scan *s, size_t start)
{
    size_t pos = start;
    size_t last_both = start; /* its end */
    while (pos < s->n_bytes) {
        size_t end;
        unsigned class = unicode_class(char_at(s, pos, &end));
        if (!(class & UNICODE_CAPITAL))
            break;
        pos = end;
        if (class & UNICODE_SMALL)
            last_both = end;
    }
    size_t end = run_of(s, pos, UNICODE_SMALL);
    return end > pos ? end : last_both;
}

/* A word: one character in front that may be missing, then C*S+, else C+S*, which is a run of C alone
 * since an S behind it would have made the first match. Without the character in front C+S* never
 * begins: only a mark stands in front as well as in C, and C*S+ takes that. */
static size_t match_word(const scan *s, size_t start, size_t body)
{
    size_t end = match_small(s, body);
    if (end > body)
        return end;
    if (body > start) {
        end = match_small(s, start);
        if (end > start)
            return end;
    }
    end = run_of(s, body, UNICODE_CAPITAL);
    return end > body ? end : start;
}

static size_t next_o200k(const scan *s, size_t start)
{
    size_t first;
    int32_t cp = char_at(s, start, &first);
    unsigned class = unicode_class(cp);
    if (class & UNICODE_NUMBER)
        return match_digits(s, first, 3);
    bool may_lead = !(class & UNICODE_LETTER) && cp != '\r' && cp != '\n';
    size_t end = match_word(s, start, may_lead ? first : start);
    if (end > start)
        return end < s->n_bytes ? match_contraction(s, end, true) : end;
    return match_rest(s, start, '/');
}

static size_t next_smollm(const scan *s, size_t start)
{
    size_t first;
    if (unicode_class(char_at(s, start, &first)) & UNICODE_NUMBER)
        return first;
    /* GPT2 sees a text that ends before the next number. That end can only matter to a space that
     * the number follows (" 1" is cut, and "  1" gives both spaces), so look there instead of
     * cutting beforehand. */
    if (unicode_class(char_at(s, start, &first)) & UNICODE_SPACE) {
        size_t end = run_of(s, start, UNICODE_SPACE);
        size_t after;
        if (unicode_class(char_at(s, end, &after)) & UNICODE_NUMBER)
            return end;
    }
    return next_gpt2(s, start);
}

size_t pretokenizer_next(pretokenizer_rule rule, const char *text, size_t n_bytes, size_t start)
{
    PGD_ASSERT(start < n_bytes);
    scan s = {text, n_bytes};
    switch (rule) {
    case PRETOKENIZER_GPT2:
        return next_gpt2(&s, start);
    case PRETOKENIZER_LLAMA3:
        return next_tiktoken(&s, start, 3);
    case PRETOKENIZER_QWEN2:
        return next_tiktoken(&s, start, 1);
    case PRETOKENIZER_SMOLLM:
        return next_smollm(&s, start);
    case PRETOKENIZER_O200K:
        return next_o200k(&s, start);
    case PRETOKENIZER_NONE:
        break;
    }
    return n_bytes;
}

typedef struct named_rule {
    const char *name;
    pretokenizer_rule rule;
} named_rule;

static bool find_rule(pretokenizer_rule *out, const named_rule *rules, size_t n_rules,
                      const char *name, size_t n_bytes)
{
    for (size_t i = 0; i < n_rules; i++) {
        if (strlen(rules[i].name) == n_bytes && memcmp(rules[i].name, name, n_bytes) == 0) {
            *out = rules[i].rule;
            return true;
        }
    }
    return false;
}

bool pretokenizer_from_name(pretokenizer_rule *out, const char *name, size_t n_bytes)
{
    static const named_rule rules[] = {
        {"gpt-2", PRETOKENIZER_GPT2},       {"gpt2", PRETOKENIZER_GPT2},
        {"llama-bpe", PRETOKENIZER_LLAMA3}, {"llama3", PRETOKENIZER_LLAMA3},
        {"llama-v3", PRETOKENIZER_LLAMA3},  {"qwen2", PRETOKENIZER_QWEN2},
        {"smollm", PRETOKENIZER_SMOLLM},    {"gpt-4o", PRETOKENIZER_O200K},
        {"llama4", PRETOKENIZER_O200K},
    };
    return find_rule(out, rules, PGD_ARRAY_LEN(rules), name, n_bytes);
}

bool pretokenizer_from_regex(pretokenizer_rule *out, const char *regex, size_t n_bytes)
{
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define CAPITAL      "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define SMALL        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define TAIL         "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
    static const named_rule rules[] = {
        {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
         PRETOKENIZER_GPT2},
        {"'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
         PRETOKENIZER_GPT2},
        {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}" TAIL, PRETOKENIZER_LLAMA3},
        {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" TAIL, PRETOKENIZER_QWEN2},
        {"[^\\r\\n\\p{L}\\p{N}]?" CAPITAL "*" SMALL "+" CONTRACTIONS
         "?|[^\\r\\n\\p{L}\\p{N}]?" CAPITAL "+" SMALL "*" CONTRACTIONS
         "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
         PRETOKENIZER_O200K},
    };
#undef TAIL
#undef SMALL
#undef CAPITAL
#undef CONTRACTIONS
    return find_rule(out, rules, PGD_ARRAY_LEN(rules), regex, n_bytes);
}
