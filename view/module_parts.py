"""Layers that run one after another as a tree of modules, to be opened level by level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from ..core.graph.module_tree import first_to_last

MAX_PARTS = 14
"""Of one box; more are put together into boxes of neighbours."""

MAX_DEPTH = 32
"""Of modules within modules; what is below stands as single layers."""

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """A box: one layer, a module, equal neighbours as one, or neighbours put together.

    Attributes:
        name: The whole name; of equal neighbours the first and the last, ``h.0..11``.
        first: Index of its first layer.
        count: Its layers, which run one right after another.
        parts: What it opens into, at least two and at most `MAX_PARTS`; none for a layer.
        repeats: Equal neighbours that stand here as one.
        is_module: Whether it opens into what one module is made of.
    """

    name: str
    first: int
    count: int
    parts: tuple[Part, ...] = ()
    repeats: int = 1
    is_module: bool = False


class ModuleParts:
    """The boxes of a model; a module that runs in two pieces has a box for each.

    Args:
        names: Of the layers, as dotted paths of modules.
        classes: Cost class of each layer, empty where not known; none if empty.
    """

    def __init__(self, names: Sequence[str], classes: Sequence[str] = ()) -> None:
        self._paths: list[Path] = [tuple(name.split(".")) for name in names]
        self._classes = list(classes) or [""] * len(names)

    def between(self, first: int, last: int, depth: int = 0) -> tuple[Part, ...]:
        """The boxes of layers ``first`` to ``last - 1``, named alike up to ``depth`` parts."""
        parts = [self._part(*run, depth) for run in self._runs(first, last, depth)]
        return grouped(list(self._stacked(parts, depth)))

    def _runs(self, first: int, last: int, depth: int) -> Iterator[tuple[int, int]]:
        """Stretches of the same module; a layer that is no part of one stands alone."""
        deep = depth >= MAX_DEPTH

        def module(index: int) -> str | int:
            path = self._paths[index]
            return index if deep or len(path) <= depth else path[depth]

        for _, run in groupby(range(first, last), module):
            layers = list(run)
            yield layers[0], layers[-1] + 1

    def _part(self, first: int, last: int, depth: int) -> Part:
        if last - first == 1:
            return Part(".".join(self._paths[first]), first, 1)
        shared = _shared(self._paths[first:last])
        parts = self.between(first, last, max(depth + 1, min(len(shared), MAX_DEPTH)))
        if len(parts) == 1:  # all that is in it is equal
            return parts[0]
        return Part(".".join(shared), first, last - first, parts, is_module=True)

    def _stacked(self, parts: Sequence[Part], depth: int) -> Iterator[Part]:
        """Equal neighbours as one."""
        for _, same in groupby(parts, lambda part: self._content(part, depth)):
            run = list(same)
            if len(run) == 1:
                yield run[0]
                continue
            count = sum(part.count for part in run)
            name = first_to_last(run[0].name, run[-1].name)
            yield Part(name, run[0].first, count, grouped(run), len(run))

    def _content(self, part: Part, depth: int) -> tuple[object, ...]:
        """Names and cost classes of all layers in it; where one is not known, only itself."""
        layers = slice(part.first, part.first + part.count)
        classes = self._classes[layers]
        if not all(classes):
            return (part.first,)
        return (*classes, *(path[depth + 1 :] for path in self._paths[layers]))


def grouped(parts: Sequence[Part]) -> tuple[Part, ...]:
    """At most `MAX_PARTS`: more are put together, neighbours first."""
    if len(parts) <= MAX_PARTS:
        return tuple(parts)
    size = -(-len(parts) // MAX_PARTS)
    groups = [parts[start : start + size] for start in range(0, len(parts), size)]
    return tuple(
        group[0]
        if len(group) == 1
        else Part(
            f"{group[0].name} … {group[-1].name}",
            group[0].first,
            sum(part.count for part in group),
            grouped(group),
        )
        for group in groups
    )


def _shared(paths: Sequence[Path]) -> Path:
    """What all paths begin with."""
    least, most = min(paths), max(paths)
    length = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(least, most, strict=False))
    )
    return least[:length]


def opened(parts: Sequence[Part], most: int) -> set[Part]:
    """Modules to be opened at first: from the outside in, as long as ``most`` boxes are enough."""
    found: set[Part] = set()
    count, level = len(parts), list(parts)
    while level:
        below: list[Part] = []
        for part in level:
            if part.is_module and count - 1 + len(part.parts) <= most:
                found.add(part)
                count += len(part.parts) - 1
                below += part.parts
        level = below
    return found
