"""Tables inside documents: what a benchmark writes stands between two marks."""

from __future__ import annotations

from pathlib import Path

from stagewright.core.errors import InvalidInput

END = "<!-- end -->"


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
