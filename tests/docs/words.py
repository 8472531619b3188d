"""Count the words that people wrote in docs: prose, without code, comments and what is generated.

usage: python -m tests.docs.words
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
LEFT_OUT = (
    re.compile(r"<!-- written by .*?<!-- end -->", re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^ *(?:> )?```.*?^ *(?:> )?```$", re.DOTALL | re.MULTILINE),
    # scripts/write_settings.py writes this table
    re.compile(r"^\| setting \| default \| meaning \|\n(?:\|.*\n)*", re.MULTILINE),
)


def count_words(text: str) -> int:
    """Count the words of one document that were written by hand."""
    for pattern in LEFT_OUT:
        text = pattern.sub("", text)
    return len(text.split())


def count_by_hand() -> dict[str, int]:
    """Count the words of every page; evidence is a section of its own, written by scripts."""
    pages = (page for page in DOCS.rglob("*.md") if page.parent.name not in ("evidence", "build"))
    return {
        str(page.relative_to(DOCS)): count_words(page.read_text(encoding="utf-8"))
        for page in sorted(pages)
    }


if __name__ == "__main__":
    found = count_by_hand()
    for name, words in found.items():
        print(f"{words:6,} {name}")
    print(f"{sum(found.values()):6,} in all")
