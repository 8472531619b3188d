"""The one member of a ``.pt2`` archive that is read: its program's JSON.

Weights, sample inputs and whatever else lies in the archive are never opened: torch stores some
of them as pickles. Nothing is extracted; names are compared and never used as paths.
"""

from __future__ import annotations

import io
import re
import stat
import zipfile
import zlib

from ...core.errors import InvalidInput
from ...core.units import format_bytes

PROGRAM = re.compile(r"[^/\\]+/models/[^/\\]+\.json")
"""Where ``torch.export.save`` puts a program, below the archive's own name."""

MAX_MEMBERS = 100_000
MAX_PROGRAM_BYTES = 64 * 2**20
MAX_RATIO = 200
"""JSON of exported programs is some 30 times smaller compressed; bombs reach a thousand."""

_HEADER = b"PK\x01\x02"
"""Opens every member's line of the central directory."""


def program_json(archive: bytes) -> bytes:
    """The JSON of the only program in an archive.

    Raises:
        InvalidInput: It is no such archive, or its program is too large or compressed too far.
    """
    if archive.count(_HEADER) > MAX_MEMBERS:
        raise InvalidInput(f"the archive has more than {MAX_MEMBERS} members")
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            _check_members(opened.infolist())
            return _read(opened, _program(opened))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(
            f"the body is not an archive of torch.export.save that can be read ({error}); send "
            "the .pt2 file as it was written"
        ) from None


def _check_members(members: list[zipfile.ZipInfo]) -> None:
    """Refuse what nothing honest writes, though no member but the program is ever opened."""
    seen: set[str] = set()
    end = 0
    for entry in sorted(members, key=lambda entry: entry.header_offset):
        shown = repr(entry.orig_filename[:80])
        if not is_plain_name(entry.orig_filename):
            raise InvalidInput(f"the archive's member {shown} has a name that leads out of it")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise InvalidInput(f"the archive's member {shown} is a link")
        if entry.filename in seen:
            raise InvalidInput(f"the archive has two members {shown}")
        if entry.header_offset < end:
            raise InvalidInput(f"the archive's member {shown} overlaps the one before it")
        seen.add(entry.filename)
        end = entry.header_offset + entry.compress_size


def is_plain_name(name: str) -> bool:
    """Whether a member's name stays below the folder it would be unpacked to, anywhere."""
    parts = name.rstrip("/").split("/")
    return (
        name.isprintable()
        and not any(part in ("", ".", "..") for part in parts)
        and not any(character in name for character in "\\:")
    )


def _program(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    found = [entry for entry in archive.infolist() if PROGRAM.fullmatch(entry.filename)]
    if len(found) != 1:
        raise InvalidInput(
            f"the archive holds {len(found)} programs (members models/<name>.json), not one; "
            "write it with torch.export.save of torch 2.9 or newer"
        )
    (entry,) = found
    packed = max(entry.compress_size, 1)
    if entry.flag_bits & 1:
        raise InvalidInput("the archive's program is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidInput("the archive's program is neither stored nor deflated")
    if entry.file_size > MAX_PROGRAM_BYTES or entry.file_size > MAX_RATIO * packed:
        raise InvalidInput(
            f"the archive's program is {format_bytes(entry.file_size)}, from "
            f"{format_bytes(packed)}; at most {format_bytes(MAX_PROGRAM_BYTES)} and "
            f"{MAX_RATIO} times what is sent are accepted"
        )
    return entry


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The member, whatever its header says no longer than allowed."""
    with archive.open(entry) as member:
        text = member.read(MAX_PROGRAM_BYTES + 1)
    if len(text) > MAX_PROGRAM_BYTES:
        raise InvalidInput(f"the archive's program is over {format_bytes(MAX_PROGRAM_BYTES)}")
    return text
