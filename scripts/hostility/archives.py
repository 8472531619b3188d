"""``.pt2`` files: pickles where torch has data, bombs, and names that lead elsewhere."""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .attack import ARCHIVE, REFUSED, Attack, Reply, Target, posting

PT2 = "/v1/graphs"
PROGRAM = "archive/models/model.json"


class Touches:
    """Unpickled, it leaves a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.system, (f"touch {self.path}",)


def poison(markers: Path, name: str) -> bytes:
    return pickle.dumps(Touches(str(markers / name.replace("/", "_"))))


@cache
def honest() -> bytes:
    """Return what torch.export.save writes of a small model."""
    import torch

    program = torch.export.export(torch.nn.Linear(4, 2), (torch.ones(2, 4),))
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def members() -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(honest())) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


def packed(contents: dict[str, bytes], *more: tuple[zipfile.ZipInfo | str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in [*contents.items(), *more]:
            archive.writestr(name, content)
    return file.getvalue()


def attacks() -> Iterator[Attack]:
    yield from _pickles()
    yield from _bombs()
    yield from _names()
    yield from _other_files()
    yield from _programs()


def _pickles() -> Iterator[Attack]:
    """Of members that are never opened, the graph is kept, and it is the honest file's."""

    def send(target: Target, name: str) -> Reply:
        contents = {**members(), name: poison(target.markers, name)}
        reply = target.ask("POST", PT2, packed(contents), kind=ARCHIVE)
        if reply.status == 201:
            clean = target.ask("POST", PT2, honest(), kind=ARCHIVE)
            if clean.json()["id"] != reply.json()["id"]:
                return Reply(599, body=b"its graph is not the honest file's")
        return reply

    for name in members():
        is_read = name.endswith("models/model.json")
        yield Attack(
            "pickle",
            f"in {name}",
            lambda target, name=name: send(target, name),  # type: ignore[misc]
            REFUSED if is_read else frozenset({201}),
            "not as torch.export writes it" if is_read else "graph_",
        )
    for name in ("archive/data/weights/evil.pt", "archive/code/__torch__.py", "archive/data.pkl"):
        yield Attack(
            "pickle",
            f"added as {name}",
            lambda target, name=name: send(target, name),  # type: ignore[misc]
            frozenset({201}),
            "graph_",
        )
    for path in ("/v1/plans", "/v1/graphs", "/v1/profiles"):
        yield Attack(
            "pickle",
            f"as the body of {path}",
            lambda target, path=path: target.ask("POST", path, poison(target.markers, "body")),  # type: ignore[misc]
        )
    yield Attack(
        "pickle",
        "as an archive for /v1/graphs",
        lambda target: target.ask("POST", PT2, poison(target.markers, "pt2"), kind=ARCHIVE),
        words="not an archive",
    )


def _bombs() -> Iterator[Attack]:
    def bomb(name: str, body: bytes, words: str) -> Attack:
        return Attack("bomb", name, posting(PT2, body, ARCHIVE), words=words)

    yield bomb("64 MiB of blanks in 64 KiB", packed({PROGRAM: b" " * 2**26}), "200 times")
    inner = packed({PROGRAM: b" " * 2**24})
    for _ in range(5):
        inner = packed({PROGRAM: inner})
    yield bomb("an archive in an archive, six deep", inner, "not as torch.export writes it")
    yield bomb("two members over the same bytes", _overlapping(), "overlaps")
    yield bomb("100,001 members", _many_members(100_001), "more than 100000 members")
    yield bomb("a size that is not true", _understated(), "")
    lists = b"[" + b"{}," * (5 * 2**20) + b"{}]"
    yield bomb("five million objects in 15 KiB", packed({PROGRAM: lists}), "")
    mixed = b"".join(b'{"%d":[]},' % number for number in range(2**20))
    yield bomb("a million objects in 3 MiB", packed({PROGRAM: b"[" + mixed + b"{}]"}), "")
    yield bomb("a deflated body", zlib.compress(b" " * 2**24), "not an archive")


def _overlapping() -> bytes:
    body = packed({PROGRAM: b"{}", "archive/models/other": b"{}"})
    first = body.index(b"PK\x01\x02")
    second = body.index(b"PK\x01\x02", first + 1)
    return body[: second + 42] + body[first + 42 : first + 46] + body[second + 46 :]


def _many_members(count: int) -> bytes:
    name = b"x"
    entry = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *[0] * 9, len(name), *[0] * 6) + name
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, len(entry) * count, 0, 0)
    return entry * count + end


def _understated() -> bytes:
    blanks = b" " * 1_000_001
    body = packed({PROGRAM: os.urandom(9000) + blanks})
    size = (9000 + len(blanks)).to_bytes(4, "little")
    return body.replace(size, (9100).to_bytes(4, "little"))


def _names() -> Iterator[Attack]:
    contents = {name: text for name, text in members().items() if name.endswith("model.json")}
    for name in (
        "../../outside", "archive/../../outside", "/tmp/stagewright-outside", "..\\outside",
        "C:\\outside", "archive//outside", "archive/./outside", "archive/\u202eedistuo",
        "archive/new\nline", "archive/nul\0l",
    ):  # fmt: skip
        entry = zipfile.ZipInfo("Q" * len(name.encode()))
        body = packed(contents, (entry, b"x")).replace(entry.filename.encode(), name.encode())
        if not name.isascii():
            body = packed(contents, (name, b"x"))
        yield Attack(
            "name", repr(name), posting(PT2, body, ARCHIVE), words="a name that leads out of it"
        )
    link = zipfile.ZipInfo("archive/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    body = packed(contents, (link, b"/etc/passwd"))
    yield Attack("name", "a symbolic link", posting(PT2, body, ARCHIVE), words="is a link")
    entry = zipfile.ZipInfo("x" * len(PROGRAM))
    body = packed({PROGRAM: contents[next(iter(contents))]}, (entry, b"{}"))
    body = body.replace(entry.filename.encode(), PROGRAM.encode())
    yield Attack("name", "two of one name", posting(PT2, body, ARCHIVE), words="has two members")
    traversing = {"../models/model.json": next(iter(contents.values()))}
    yield Attack(
        "name", "the program's", posting(PT2, packed(traversing), ARCHIVE), words="leads out"
    )


def _other_files() -> Iterator[Attack]:
    for name, body in {
        "empty": b"",
        "cut off": honest()[: len(honest()) // 2],
        "no archive": os.urandom(1000),
        "a tar": b"ustar".rjust(262, b"\0"),
        "ELF": b"\x7fELF" + bytes(100),
        "a program that is no JSON": packed({PROGRAM: b"{"}),
        "a program nested 900 deep": packed({PROGRAM: b"[" * 900 + b"]" * 900}),
        "a program with NaN": packed({PROGRAM: b'{"schema_version": {"major": NaN}}'}),
    }.items():
        yield Attack("archive", name, posting(PT2, body, ARCHIVE))
    program = next(text for name, text in members().items() if name.endswith("model.json"))
    for name, old, new in (
        ("an operator outside the list", b"torch.ops.aten.linear.default", b"os.system"),
        ("another operator", b"aten.linear.default", b"aten.set_.source_Tensor"),
        ("an expression as a size", b'{"as_int": 4}', _expression()),
    ):
        changed = program.replace(old, new)
        assert changed != program, name
        yield Attack("operator", name, posting(PT2, packed({PROGRAM: changed}), ARCHIVE))


def _programs() -> Iterator[Attack]:
    """Yield programs that contradict themselves, or whose names cost more than their length."""

    def attack(name: str, change: Callable[[dict[str, Any]], Any], words: str) -> Attack:
        text = next(text for member, text in members().items() if member.endswith("model.json"))
        program = json.loads(text)
        change(program["graph_module"])
        body = packed({PROGRAM: json.dumps(program).encode()})
        return Attack("program", name, posting(PT2, body, ARCHIVE), words=words)

    def stack(module: dict[str, Any], modules: str) -> None:
        module["graph"]["nodes"][0]["metadata"]["nn_module_stack"] = modules

    def read(module: dict[str, Any], argument: dict[str, Any]) -> None:
        module["graph"]["nodes"][0]["inputs"][0]["arg"] = argument

    deep = "a." * 20_000 + "a"
    calls, graph = "module_call_graph", "graph"
    yield attack("a module 20,000 deep", lambda m: m[calls].append({"fqn": deep}), "at most 500")
    yield attack(
        "a module 65 deep", lambda m: m[calls].append({"fqn": "a." * 64 + "a"}), "65 parts"
    )
    yield attack("a call 20,000 deep", lambda m: stack(m, f"k,{deep},L"), "at most 500")
    yield attack("a call in 1,000 modules", lambda m: stack(m, "k,a,L;" * 999 + "k,a,L"), "1000")
    yield attack(
        "a parameter 20,000 deep",
        lambda m: m["signature"]["input_specs"][0]["parameter"].update(parameter_name=deep),
        "at most 500",
    )
    yield attack(
        "a tensor not described", lambda m: m[graph]["tensor_values"].popitem(), "KeyError"
    )
    yield attack(
        "a result of nothing",
        lambda m: m["signature"]["output_specs"][0]["user_output"].update(
            arg={"as_tensor": {"name": "ghost"}}
        ),
        "ghost",
    )
    yield attack("a use of nothing", lambda m: read(m, {"as_tensor": {"name": "ghost"}}), "ghost")
    yield attack("a number of 400 digits", lambda m: read(m, {"as_float": 10**400}), "as torch")
    yield attack(
        "every operation twice", lambda m: m[graph].update(nodes=m[graph]["nodes"] * 2), ""
    )
    yield attack(
        "a normalization of nothing",
        lambda m: m[graph]["nodes"][0].update(
            target="torch.ops.aten.batch_norm.default",
            inputs=[{"name": "input", "arg": {"as_tensor": {"name": "ghost"}}, "kind": 1}] * 5,
        ),
        "",
    )


def _expression() -> bytes:
    return b'{"as_expr": {"expr_str": "__import__(\'os\').system(\'touch ran\')"}}'
