"""Markdown tables, and their place in a document: between two marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from stagewright.core.errors import InvalidInput

END = "<!-- end -->"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Return a table whose first columns are aligned to the left, and the others to the right."""
    marks = ["---"] * left + ["--:"] * (len(head) - left)
    lines = [
        "|" + "".join(f" {cell} |" if cell != "" else " |" for cell in cells)
        for cells in (head, *rows)
    ]
    return "\n".join([lines[0], f"|{'|'.join(marks)}|", *lines[1:]])


def escaped(text: str) -> str:
    """Return a text that neither ends a cell nor opens a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def write_between_marks(path: Path, script: str, text: str) -> None:
    """Replace what a script of this folder wrote into a document.

    Raises:
        InvalidInput: The document cannot be read, or lacks the marks.
    """
    mark = f"<!-- written by benchmarks/{script} -->"
    try:
        before, begin, rest = path.read_text(encoding="utf-8").partition(mark)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InvalidInput(f"{path} lacks the lines {mark} and {END} around its tables")
    path.write_text(f"{before}{mark}\n\n{text}\n\n{END}{after}", encoding="utf-8")
