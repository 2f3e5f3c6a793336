#!/usr/bin/env python3
"""Writes engine/text/unicode_class_data.c: the character classes of the pre-tokenizers' expressions.

The classes are asked from the regular-expression engines that Hugging Face tokenizers runs (package `tokenizers`), so that
they are of the Unicode version those engines know, whatever version the system's utf8proc has.

usage: make_unicode_classes.py > engine/text/unicode_class_data.c
"""
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

LETTER, NUMBER, SPACE, WORD, CAPITAL, SMALL = 1, 2, 4, 8, 16, 32
ALL = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def members(expression):
    split = pre_tokenizers.Split(Regex(expression), "removed", invert=True)
    return {c for piece, _ in split.pre_tokenize_str("".join(ALL)) for c in piece}


def word_members():
    """An added token with single_word is taken only if no \\w stands before it."""
    tok = Tokenizer(models.BPE(vocab={"<unk>": 0}, merges=[], unk_token="<unk>"))
    tok.add_tokens([AddedToken("Q", single_word=True, normalized=False)])
    found = set()
    others = [c for c in ALL if c != "Q"]
    for i in range(0, len(others), 128):
        part = others[i:i + 128]
        enc = tok.encode("".join(c + "Q " for c in part))
        taken = {start // 3 for tid, (start, _) in zip(enc.ids, enc.offsets) if tid == 1}
        found |= {c for j, c in enumerate(part) if j not in taken}
    return found | {"Q"}


def main():
    classes = {c: 0 for c in ALL}
    for bit, chars in ((LETTER, members(r"\p{L}+")), (NUMBER, members(r"\p{N}+")), (SPACE, members(r"\s+")),
                       (WORD, word_members()), (CAPITAL, members(r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+")),
                       (SMALL, members(r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"))):
        for c in chars:
            classes[c] |= bit
    ranges = []
    for c in ALL:
        cp, k = ord(c), classes[c]
        if not k:
            continue
        if ranges and ranges[-1][1] == cp - 1 and ranges[-1][2] == k:
            ranges[-1][1] = cp
        else:
            ranges.append([cp, cp, k])
    print("/* Character classes by range of code points: made by scripts/golden/make_unicode_classes.py, not by hand.\n"
          " *\n"
          " * Facts of the Unicode Character Database as the expression engines of Hugging Face tokenizers know them;\n"
          " * class is a sum of UNICODE_LETTER 1, UNICODE_NUMBER 2, UNICODE_SPACE 4, UNICODE_WORD 8, UNICODE_CAPITAL 16,\n"
          " * UNICODE_SMALL 32. Ranges ascend.\n"
          " */\n"
          '#include "engine/text/unicode_class.h"\n\n'
          "/* clang-format off */\n"
          "const unicode_range unicode_ranges[] = {")
    for i in range(0, len(ranges), 5):
        print("    " + " ".join("{0x%X, 0x%X, %d}," % tuple(r) for r in ranges[i:i + 5]))
    print("};\n/* clang-format on */\n\nconst int32_t unicode_n_ranges = (int32_t)PGD_ARRAY_LEN(unicode_ranges);")


main()
