"""Files where JSON belongs: ``.pt2`` archives, pickles and bombs, of which nothing is opened."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from .attack import ARCHIVE, JSON, Attack, Reply, Target, posting

PATHS = ("/v1/plans", "/v1/graphs", "/v1/profiles")
KINDS = (ARCHIVE, "application/zip", "application/x-www-form-urlencoded", JSON)
CAPTURE = "stagewright capture model.pt2 -o graph.json"


class Touches:
    """Unpickled, it leaves a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.system, (f"touch {self.path}",)


def poison(markers: Path, name: str) -> bytes:
    return pickle.dumps(Touches(str(markers / name.replace("/", "_"))))


def packed(contents: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return file.getvalue()


def attacks() -> Iterator[Attack]:
    for path in PATHS:
        yield Attack(
            "pickle",
            f"as the body of {path}",
            lambda target, path=path: target.ask("POST", path, poison(target.markers, "body")),  # type: ignore[misc]
        )

    def send_poisoned(target: Target, kind: str) -> Reply:
        member = poison(target.markers, "member")
        return target.ask("POST", "/v1/graphs", packed({"archive/data.pkl": member}), kind=kind)

    for kind in KINDS:
        yield Attack(
            "pickle",
            f"in an archive, as {kind}",
            lambda target, kind=kind: send_poisoned(target, kind),  # type: ignore[misc]
            words=CAPTURE,
        )
    inner = packed({"archive/models/model.json": b" " * 2**24})
    for _ in range(5):
        inner = packed({"archive/models/model.json": inner})
    blanks = packed({"archive/models/model.json": b" " * 2**26})
    for path in PATHS:
        for name, body in {"64 MiB of blanks in 64 KiB": blanks, "six deep": inner}.items():
            yield Attack("bomb", f"{name}, to {path}", posting(path, body, ARCHIVE), words=CAPTURE)
    yield Attack("bomb", "a deflated body", posting("/v1/graphs", zlib.compress(b" " * 2**24)))
    for name, body in {
        "empty": b"",
        "cut off": blanks[: len(blanks) // 2],
        "no archive": os.urandom(1000),
        "a tar": b"ustar".rjust(262, b"\0"),
        "ELF": b"\x7fELF" + bytes(100),
    }.items():
        yield Attack("archive", name, posting("/v1/graphs", body, ARCHIVE), words=CAPTURE)
