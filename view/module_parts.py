"""Tree of modules over consecutive layers, opened level by level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from ..core.graph.module_tree import first_to_last

MAX_PARTS = 14
"""Parts of one box; more are grouped with their neighbours."""

MAX_DEPTH = 32
"""Deepest nesting of modules; layers below it are shown one by one."""

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ModulePart:
    """Node of the tree: a layer, a module, equal neighbours as one, or a group of neighbours.

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
    parts: tuple[ModulePart, ...] = ()
    repeats: int = 1
    is_module: bool = False


class ModuleParts:
    """Builder of the tree of a model from its layers' dotted paths and, where known, cost classes.

    A module that runs in two separate pieces has two nodes.
    """

    def __init__(self, names: Sequence[str], classes: Sequence[str] = ()) -> None:
        self._paths: list[Path] = [tuple(name.split(".")) for name in names]
        self._classes = list(classes) or [""] * len(names)

    def between(self, first: int, last: int, depth: int = 0) -> tuple[ModulePart, ...]:
        """Group layers ``first`` to ``last - 1``, sharing ``depth`` name parts, by module."""
        parts = [self._part(*run, depth) for run in self._runs(first, last, depth)]
        return group_parts(list(self._stacked(parts, depth)))

    def _runs(self, first: int, last: int, depth: int) -> Iterator[tuple[int, int]]:
        """Yield runs of layers in one module; a layer outside any module is a run of one."""
        deep = depth >= MAX_DEPTH

        def module(index: int) -> str | int:
            path = self._paths[index]
            return index if deep or len(path) <= depth else path[depth]

        for _, run in groupby(range(first, last), module):
            layers = list(run)
            yield layers[0], layers[-1] + 1

    def _part(self, first: int, last: int, depth: int) -> ModulePart:
        if last - first == 1:
            return ModulePart(".".join(self._paths[first]), first, 1)
        shared = _shared(self._paths[first:last])
        # Skip levels that all names share, so that a chain of single children is one box.
        parts = self.between(first, last, max(depth + 1, min(len(shared), MAX_DEPTH)))
        if len(parts) == 1:  # all that is in it is equal
            return parts[0]
        return ModulePart(".".join(shared), first, last - first, parts, is_module=True)

    def _stacked(self, parts: Sequence[ModulePart], depth: int) -> Iterator[ModulePart]:
        for _, same in groupby(parts, lambda part: self._content(part, depth)):
            run = list(same)
            if len(run) == 1:
                yield run[0]
                continue
            count = sum(part.count for part in run)
            name = first_to_last(run[0].name, run[-1].name)
            yield ModulePart(name, run[0].first, count, group_parts(run), len(run))

    def _content(self, part: ModulePart, depth: int) -> tuple[object, ...]:
        """Return what makes two parts equal: names and cost classes of their layers.

        A part with an unknown cost class equals only itself.
        """
        layers = slice(part.first, part.first + part.count)
        classes = self._classes[layers]
        # Without a cost class two layers of one name may cost differently: never merge them.
        if not all(classes):
            return (part.first,)
        return (*classes, *(path[depth + 1 :] for path in self._paths[layers]))


def group_parts(parts: Sequence[ModulePart]) -> tuple[ModulePart, ...]:
    """Group neighbours until at most `MAX_PARTS` are left."""
    if len(parts) <= MAX_PARTS:
        return tuple(parts)
    size = -(-len(parts) // MAX_PARTS)
    groups = [parts[start : start + size] for start in range(0, len(parts), size)]
    return tuple(
        group[0]
        if len(group) == 1
        else ModulePart(
            f"{group[0].name} … {group[-1].name}",
            group[0].first,
            sum(part.count for part in group),
            group_parts(group),
        )
        for group in groups
    )


def _shared(paths: Sequence[Path]) -> Path:
    # A prefix of the smallest and the largest path in sorted order is a prefix of all between.
    least, most = min(paths), max(paths)
    length = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(least, most, strict=False))
    )
    return least[:length]


def choose_open_parts(parts: Sequence[ModulePart], most: int) -> set[ModulePart]:
    """Choose the modules opened at first, outermost first, while at most ``most`` boxes show."""
    # Breadth first: opening a module replaces one box by its parts, and no deeper module may
    # take the room of a shallower one.
    found: set[ModulePart] = set()
    count, level = len(parts), list(parts)
    while level:
        below: list[ModulePart] = []
        for part in level:
            if part.is_module and count - 1 + len(part.parts) <= most:
                found.add(part)
                count += len(part.parts) - 1
                below += part.parts
        level = below
    return found
