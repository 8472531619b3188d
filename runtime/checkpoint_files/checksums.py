"""Checksums of a checkpoint's files, verified before anything is read.

They are stored in the format of ``b2sum``: ``b2sum --check B2SUMS`` verifies them, too. They detect
damage but not tampering, since whoever changes a file can change its checksum.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...core.errors import InvalidInput

SUMS = "B2SUMS"

Sums = Mapping[str, str]
"""Checksums in hexadecimal, by file name."""

LINE = re.compile(r"([0-9a-f]{128})  (.+)")
WRITER = re.compile(r"__(\d+)_\d+\.distcp")


def compute_sum(file: Path) -> str:
    """Return the 64-byte BLAKE2b checksum (RFC 7693) of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def compute_own_sums(folder: Path, rank: int, num_ranks: int) -> dict[str, str]:
    """Compute the checksums of the files this rank has written.

    They are still in its machine's page cache. Files without a rank number count as rank 0's.
    """
    return {
        path.name: compute_sum(path)
        for path in folder.iterdir()
        if _rank_of(path.name) % num_ranks == rank
    }


def format_sums(sums: Sums) -> str:
    """Format checksums as the contents of the checksum file."""
    return "".join(f"{found}  {name}\n" for name, found in sorted(sums.items()))


def text_size_bytes(names: Iterable[str]) -> int:
    """Return the size of a checksum file for files with these names."""
    return len(format_sums(dict.fromkeys(names, "0" * 128)).encode())


def list_summed_files(folder: Path) -> list[str]:
    """List the files of a step that have checksums; empty for steps saved without."""
    return sorted(_read(folder))


def check_sums(folder: Path, names: Iterable[str]) -> None:
    """Verify the checksums of some files of a step, unless it was saved without any."""
    sums = _read(folder)
    for name in names:
        if sums and _try_sum(folder, name) != sums.get(name, ""):
            raise InvalidInput(
                f"{folder} is damaged: the checksum of {name} does not match; load another step"
            )


def _read(folder: Path) -> Sums:
    file = folder / SUMS
    if not file.exists():
        return {}
    text = file.read_bytes().decode("utf-8", "replace")
    matches = [LINE.fullmatch(line) for line in text.splitlines()]
    found = {match[2]: match[1] for match in matches if match}
    # Formatted again, the text differs after any foreign line, duplicate or change of order. A name
    # with a folder in it could lead out of the step.
    if format_sums(found) != text or any(Path(name).name != name for name in found):
        raise InvalidInput(f"{file} is damaged; load another step")
    return found


def _try_sum(folder: Path, name: str) -> str | None:
    try:
        return compute_sum(folder / name)
    except OSError:
        return None


def _rank_of(name: str) -> int:
    match = WRITER.fullmatch(name)
    return int(match[1]) if match else 0
