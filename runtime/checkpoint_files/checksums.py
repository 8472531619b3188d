"""Checksums of a step's files, so that a damaged one is refused before anything is read from it.

They lie beside the files as ``b2sum`` writes them: ``b2sum --check B2SUMS`` says the same. They
tell damage, not malice: who changes a file can change its sum.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...core.errors import InvalidInput

SUMS = "B2SUMS"

Sums = Mapping[str, str]
"""By name of the file, in hexadecimal."""

LINE = re.compile(r"([0-9a-f]{128})  (.+)")
WRITER = re.compile(r"__(\d+)_\d+\.distcp")


def sum_of(file: Path) -> str:
    """BLAKE2b of what a file holds (RFC 7693), 64 bytes."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def sums_of_writer(folder: Path, rank: int, num_ranks: int) -> dict[str, str]:
    """Of the files that this rank has written, of which its machine still has copies in memory.

    What no rank put its number on is the first one's.
    """
    return {
        path.name: sum_of(path)
        for path in folder.iterdir()
        if _writer(path.name) % num_ranks == rank
    }


def as_text(sums: Sums) -> str:
    """What the file of sums holds."""
    return "".join(f"{found}  {name}\n" for name, found in sorted(sums.items()))


def text_size_bytes(names: Iterable[str]) -> int:
    """Of the file of the sums of these files."""
    return len(as_text(dict.fromkeys(names, "0" * 128)).encode())


def summed(folder: Path) -> list[str]:
    """The files of a step that have checksums; none in one saved without."""
    return sorted(_read(folder))


def check_sums(folder: Path, names: Iterable[str]) -> None:
    """See that files hold what was written into them; each is read once.

    Args:
        folder: Of a step.
        names: Of the files; a step saved without sums is passed over.

    Raises:
        InvalidInput: One does not, or the sums themselves are damaged.
    """
    sums = _read(folder)
    for name in names:
        if sums and _found(folder, name) != sums.get(name, ""):
            raise InvalidInput(
                f"{folder} is damaged: {name} holds something else than was written into it; load "
                "another step"
            )


def _read(folder: Path) -> Sums:
    file = folder / SUMS
    if not file.exists():
        return {}
    text = file.read_bytes().decode("utf-8", "replace")
    matches = [LINE.fullmatch(line) for line in text.splitlines()]
    found = {match[2]: match[1] for match in matches if match}
    if as_text(found) != text or any(Path(name).name != name for name in found):
        raise InvalidInput(f"{file} is damaged; load another step")
    return found


def _found(folder: Path, name: str) -> str | None:
    try:
        return sum_of(folder / name)
    except OSError:
        return None


def _writer(name: str) -> int:
    match = WRITER.fullmatch(name)
    return int(match[1]) if match else 0
