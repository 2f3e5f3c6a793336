"""Writes tests/golden/english.txt: the books of Ruth and Jonah in the King James Version (public domain).

The text comes from the Debian packages bible-kjv and bible-kjv-text.
"""

import re
import subprocess

from goldenio import GOLDEN, save


def book(name, title, chapters):
    out = [title.upper()]
    for chapter, verses in enumerate(chapters, 1):
        run = subprocess.run(
            ["bible", "-f", f"{name}{chapter}:1-{chapter}:{verses}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        text = []
        for line in run.stdout.splitlines():
            if m := re.match(rf"{name}{chapter}:\d+ (.*)", line):
                text.append(m[1].strip())
        assert len(text) == verses, (name, chapter, len(text))
        # Paragraphs of five verses read more like prose than one verse a line.
        paragraphs = [" ".join(text[i : i + 5]) for i in range(0, verses, 5)]
        out.append(f"CHAPTER {chapter}\n\n" + "\n\n".join(paragraphs))
    return "\n\n".join(out) + "\n"


def main():
    text = book("Ruth", "The Book of Ruth", [22, 23, 18, 22]) + "\n" + book("Jonah", "The Book of Jonah", [17, 10, 10, 11])
    save(GOLDEN / "english.txt", text.encode("ascii"))


main()
