"""Exported programs with something wrong in the archive, JSON, names, shapes or symbols."""

from __future__ import annotations

import copy
import io
import json
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

from scripts.fuzzing.mutate import changed

MARK = "SENDERS-TEXT"
"""Is in what a mutant names; the server's log must never have it."""

PROGRAM = "net/models/model.json"
SIZES = (
    0,
    1,
    2,
    3,
    7,
    -1,
    2**31,
    2**40,
    2**41,
    2**62,
    2**63,
    10**30,
    10**400,
    1.5,
    True,
    "4",
    None,
)
NAMES = (
    "", "x", "a." * 20_000 + MARK, "b" * 501, ".".join("c" * 65), f"{MARK}.weight", f"{MARK}-1",
    "0", "..", "\u202e", "class", "__class__", "a;import os", "a\nb", "\U0001f600",
)  # fmt: skip

METHODS = (0, 8, 8, 12, 14)
"""Of compression: stored, deflated, and two that torch does not use."""


@cache
def programs() -> tuple[str, ...]:
    """Return the JSON of honest programs, with nested graphs, updated buffers, a dictionary."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Any, y: Any) -> Any:
            for block in self.blocks:
                x = self.norm(block(x)).relu() * self.scale + y
            with torch.no_grad():
                factor = x.mean(-1, keepdim=True).cos()
            left, right = torch.split(x * factor, 4, dim=-1)
            return {"sum": left + right, "left": left}

    image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    made = []
    for model, sample in (
        (Net(), (torch.ones(4, 8), torch.ones(4, 8))),
        (image, (torch.ones(2, 3, 8, 8),)),
        (nn.Linear(4, 2), (torch.ones(2, 4),)),
    ):
        file = io.BytesIO()
        torch.export.save(torch.export.export(model, sample), file)
        with zipfile.ZipFile(file) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("models/model.json"))
            made.append(archive.read(name).decode())
    return tuple(made)


def mutants(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield archives with the kind of what is wrong with each, equal ones for equal seeds."""
    for number in range(count):
        random = Random(f"{seed} {number}")
        kind = random.choice(list(KINDS))
        yield kind, KINDS[kind](json.loads(random.choice(programs())), random)


def _structure(program: Any, random: Random) -> bytes:
    """Change up to three values anywhere, by those of another type, more often than not."""
    return _pack(changed(program, random, {}))


def _swapped(program: Any, random: Random) -> bytes:
    """Put a part of the program where another part of it was."""
    places = [(parent, key) for parent, key in _places(program)]
    (parent, key), (other, name) = random.choice(places), random.choice(places)
    parent[key] = copy.deepcopy(other[name])
    return _pack(program)


def _repeated(program: Any, random: Random) -> bytes:
    """Repeat a list's items many times, within what an upload may have."""
    lists = [parent[key] for parent, key in _places(program) if isinstance(parent[key], list)]
    chosen = random.choice([found for found in lists if found])
    chosen *= random.choice((2, 3, 50, 1000))
    return _pack(program)


def _names(program: Any, random: Random) -> bytes:
    """Give a tensor, a module, an operator or an argument another name, everywhere or in places."""
    texts = sorted({value for value in _values(program) if isinstance(value, str) and value})
    old, new = random.choice(texts), random.choice((*NAMES, random.choice(texts)))
    share = random.choice((1.0, 1.0, 0.5, 0.1))
    return _pack(_replaced(program, old, new, random, share))


def _shapes(program: Any, random: Random) -> bytes:
    """Give dimensions, strides and integer arguments other values."""
    found = [(p, k) for p, k in _places(program) if k == "as_int"]
    for parent, key in random.sample(found, min(len(found), random.choice((1, 2, 20)))):
        parent[key] = random.choice(SIZES)
    return _pack(program)


def _symbols(program: Any, random: Random) -> bytes:
    """Put expressions, other argument kinds and data types in place of what is there."""
    found = [(p, k) for p, k in _places(program) if str(k).startswith("as_") or k == "dtype"]
    parent, key = random.choice(found)
    if key == "dtype":
        parent[key] = random.choice((0, 1, 6, 7, 11, 99, -1, MARK, None))
        return _pack(program)
    value = parent.pop(key)
    kinds = [str(k) for _, k in found if k != "dtype"]
    expression = {"expr_str": f"s0*{MARK}", "hint": {"as_int": 4}}
    parent[random.choice((*kinds, "as_expr", "as_graph", "as_custom_obj", "as_sym_float"))] = (
        random.choice((value, expression, {"name": MARK}, 1, [], {}))
    )
    return _pack(program)


def _bytes(program: Any, random: Random) -> bytes:
    """Flip, cut out, repeat or insert bytes of the archive."""
    body = bytearray(_pack(program))
    for _ in range(random.choice((1, 1, 4, 40))):
        at = random.randrange(len(body))
        match random.randrange(4):
            case 0:
                body[at] ^= 1 << random.randrange(8)
            case 1:
                del body[at : at + random.choice((1, 4, 100))]
            case 2:
                body[at:at] = body[at : at + random.choice((1, 46, 1000))]
            case _:
                body[at:at] = random.randbytes(random.choice((1, 8)))
        body = body or bytearray(b"PK")
    return bytes(body)


def _members(program: Any, random: Random) -> bytes:
    """Add members, of any name and sort, or leave the program out, cut off or packed twice."""
    text = json.dumps(program).encode()
    other = random.choice(
        ("net/models/model.json", "net/models/second.json", "models/model.json", f"../{MARK}",
         f"net/data/{MARK}", "net\\models\\m.json", "/net/models/model.json", f"net/{MARK}\n")
    )  # fmt: skip
    content = random.choice((text, text[: len(text) // 2], b"", b" " * 2**14, _pack(program)))
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", random.choice(METHODS)) as archive:
        warnings.simplefilter("ignore")  # of names that are there twice
        names = [PROGRAM, *[other] * random.choice((0, 1, 1, 200))]
        random.shuffle(names)
        for name in names[random.randrange(2) :]:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = random.choice((0, 0o100644 << 16, 0o120777 << 16))
            entry.compress_type = archive.compression
            archive.writestr(entry, text if name == PROGRAM else content)
    return file.getvalue()


KINDS: dict[str, Callable[[Any, Random], bytes]] = {
    "structure": _structure, "swapped": _swapped, "repeated": _repeated, "names": _names,
    "shapes": _shapes, "symbols": _symbols, "bytes": _bytes, "members": _members,
}  # fmt: skip


def _pack(program: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(PROGRAM, json.dumps(program))
    return file.getvalue()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a document with each of its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _values(program: Any) -> Iterator[Any]:
    for parent, key in _places(program):
        yield parent[key]
        if isinstance(parent, dict):
            yield key


def _replaced(value: Any, old: str, new: str, random: Random, share: float) -> Any:
    if isinstance(value, dict):
        return {
            _replaced(key, old, new, random, share): _replaced(item, old, new, random, share)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_replaced(item, old, new, random, share) for item in value]
    return new if value == old and random.random() < share else value
