"""The JSON program inside a ``.pt2`` archive, the only member that is read.

Weights, sample inputs and all other members are never opened, because torch stores some of them
as pickles. Nothing is extracted to disk; member names are compared but never used as paths.
"""

from __future__ import annotations

import io
import re
import stat
import zipfile
import zlib

from ...core.errors import InvalidInput
from ...core.units import format_bytes

PROGRAM_MEMBER = re.compile(r"[^/\\]+/models/[^/\\]+\.json")
"""Path under which ``torch.export.save`` stores a program, below the archive's own name."""

MAX_MEMBERS = 100_000
MAX_PROGRAM_BYTES = 64 * 2**20
MAX_COMPRESSION_RATIO = 200
"""Exported programs compress about 30 times; zip bombs reach a factor of a thousand."""

_CENTRAL_DIRECTORY_HEADER = b"PK\x01\x02"


def read_program_json(archive: bytes) -> bytes:
    """Return the JSON of the single program in an archive.

    Raises:
        InvalidInput: This is no such archive, or its program is too large or compressed too far.
    """
    # Counted on the raw bytes: zipfile would first build an object for every member.
    if archive.count(_CENTRAL_DIRECTORY_HEADER) > MAX_MEMBERS:
        raise InvalidInput(f"the archive has more than {MAX_MEMBERS} members")
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            _check_members(opened.infolist())
            return _read_member(opened, _find_program(opened))
    except InvalidInput:  # a ValueError too
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(
            f"the body is not an archive written by torch.export.save ({error}); send the .pt2 "
            "file unchanged"
        ) from None


def _check_members(members: list[zipfile.ZipInfo]) -> None:
    """Reject archives that no honest writer produces, although only the program is opened."""
    seen: set[str] = set()
    end = 0
    # In order of offset, so that comparing neighbours finds every overlap (as in "42.zip" bombs).
    for entry in sorted(members, key=lambda entry: entry.header_offset):
        shown = repr(entry.orig_filename[:80])
        if not is_plain_name(entry.orig_filename):
            raise InvalidInput(f"the archive's member {shown} has a name that leads out of it")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise InvalidInput(f"the archive's member {shown} is a link")
        if entry.filename in seen:
            raise InvalidInput(f"the archive has two members {shown}")
        if entry.header_offset < end:
            raise InvalidInput(f"the archive's member {shown} overlaps the previous one")
        seen.add(entry.filename)
        end = entry.header_offset + entry.compress_size


def is_plain_name(name: str) -> bool:
    """Return True if a member would be unpacked inside the target folder on every system."""
    parts = name.rstrip("/").split("/")
    return (
        name.isprintable()
        and not any(part in ("", ".", "..") for part in parts)
        and not any(character in name for character in "\\:")
    )


def _find_program(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    found = [entry for entry in archive.infolist() if PROGRAM_MEMBER.fullmatch(entry.filename)]
    if not found and (other := _describe_other([entry.filename for entry in archive.infolist()])):
        raise InvalidInput(f"this is {other}")
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
    if entry.file_size > MAX_PROGRAM_BYTES or entry.file_size > MAX_COMPRESSION_RATIO * packed:
        raise InvalidInput(
            f"the archive's program is {format_bytes(entry.file_size)}, unpacked from "
            f"{format_bytes(packed)}; the limits are {format_bytes(MAX_PROGRAM_BYTES)} and "
            f"{MAX_COMPRESSION_RATIO} times the compressed size"
        )
    return entry


def _describe_other(names: list[str]) -> str:
    """Describe an archive that another function of torch wrote, with the way out; "" if none."""
    export = "torch.export.save(torch.export.export(module, inputs), 'model.pt2')"
    inner = {name.partition("/")[2] for name in names}
    if any(name.startswith("code/") for name in inner):  # beside them data.pkl, as of torch.save
        return (
            "a TorchScript file (torch.jit.save), whose program is code; export the module that "
            f"was scripted or traced instead: {export}"
        )
    if "data.pkl" in inner:
        return (
            f"a file of torch.save, which has weights and no program; export the module: {export}"
        )
    return ""


def _read_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with archive.open(entry) as member:
        # The size in the header is the sender's claim, so the limit is enforced here again.
        text = member.read(MAX_PROGRAM_BYTES + 1)
    if len(text) > MAX_PROGRAM_BYTES:
        raise InvalidInput(f"the archive's program is over {format_bytes(MAX_PROGRAM_BYTES)}")
    return text
