"""Which layer each operation of an exported program belongs to; as `capture.layers` does it.

There is no model here, only the paths of its modules: what `nn.Sequential` and `nn.ModuleList`
call ``0``, ``1``, ... are taken for the elements of a container.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .pt2_program import Call

LARGEST_SHARE = 0.25
"""A module outside any container that holds more of the operations than this is opened up."""


@dataclass(frozen=True)
class Blocks:
    """Layers in execution order.

    Attributes:
        names: Unique; the second run of a module carries ``@1``.
        kinds: Class name of each one's module.
        layer_of: Layer of each operation, by position.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    layer_of: tuple[int, ...]


def blocks_of(
    calls: Sequence[Call],
    sources: Sequence[Sequence[int]],
    pinned: Sequence[bool],
    constant: Sequence[bool],
    modules: Iterable[str],
    model: str,
) -> Blocks:
    """Cut a program into runs of its model's blocks; glue between them joins what feeds it.

    Args:
        calls: The operations.
        sources: For each, the operations it reads.
        pinned: For each, whether it stays where it happens: it writes in place or is random.
        constant: For each, whether it depends on no input and no state; it is put in the first
            layer that reads it.
        modules: Paths of the model's modules.
        model: Its class name, the only layer's where there are no modules.
    """
    counted = [index for index, plain in enumerate(constant) if not plain]
    paths = _Modules({*modules, *(path for call in calls for _, path in call.stack)}).blocks(
        [calls[index] for index in counted]
    )
    names: list[str] = []
    kinds: list[str] = []
    seen: Counter[str] = Counter()
    layer_of: dict[int, int] = {}
    previous: tuple[str, str] | None = None
    for index in counted:
        found = _block(calls[index], paths)
        if found is None:
            feeding = [layer_of[source] for source in sources[index] if source in layer_of]
            if feeding and pinned[index]:
                feeding.append(len(names) - 1)
            if feeding:
                layer_of[index] = max(feeding)
            continue
        key, path, kind = found
        if (key, path) != previous:
            names.append(path + (f"@{seen[path]}" if seen[path] else ""))
            kinds.append(kind)
            seen[path] += 1
            previous = key, path
        layer_of[index] = len(names) - 1
    if not names:
        names.append(model)
        kinds.append(model)
    return Blocks(tuple(names), tuple(kinds), _settled(layer_of, sources, constant))


def _settled(
    layer_of: dict[int, int], sources: Sequence[Sequence[int]], constant: Sequence[bool]
) -> tuple[int, ...]:
    """Every operation in a layer, none in front of what it reads."""
    users: dict[int, list[int]] = defaultdict(list)
    for index, read in enumerate(sources):
        for source in read:
            users[source].append(index)
    for index in reversed(range(len(sources))):  # those that wait for a reader
        if index not in layer_of and not constant[index]:
            layer_of[index] = min((layer_of[u] for u in users[index] if u in layer_of), default=0)
    for index in range(len(sources)):
        if not constant[index]:
            behind = [layer_of[source] for source in sources[index] if not constant[source]]
            layer_of[index] = max(layer_of[index], *behind, 0)
    for index in reversed(range(len(sources))):
        if constant[index]:
            layer_of[index] = min((layer_of[user] for user in users[index]), default=0)
    return tuple(layer_of[index] for index in range(len(sources)))


def _block(call: Call, paths: set[str]) -> tuple[str, str, str] | None:
    """Key, path and class of the block an operation ran in."""
    for (key, path), kind in zip(call.stack, call.kinds, strict=True):
        if path in paths:
            return key, path, kind
    return None


class _Modules:
    """The tree of modules, by path."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._children: dict[str, dict[str, None]] = defaultdict(dict)
        for path in sorted(paths):
            parts = path.split(".") if path else []
            for length in range(1, len(parts) + 1):
                parent = ".".join(parts[: length - 1])
                self._children[parent][".".join(parts[:length])] = None
        self._composite = self._holding_composites()

    def blocks(self, calls: Sequence[Call]) -> set[str]:
        """Paths of the modules that become layers, see `capture.layers.block_paths`."""
        if self._is_container(""):
            return set(self._children[""])
        opened = {""}
        while True:
            found = set(self._visit(opened))
            counts = Counter(block[1] for call in calls if (block := _block(call, found)))
            large = {
                path
                for path in found - opened
                if counts[path] > LARGEST_SHARE * len(calls)
                and self._children.get(path)
                and not self._is_container(path.rpartition(".")[0])
            }
            if not large:
                return found
            opened |= large

    def _visit(self, opened: set[str]) -> Iterator[str]:
        waiting = [("", False)]
        while waiting:
            path, element = waiting.pop()
            children, container = self._children.get(path, {}), self._is_container(path)
            if not children or (element and not container):
                yield path
            elif container or path in opened or path in self._composite:
                waiting += [(child, container) for child in children]
            else:
                yield path

    def _is_container(self, path: str) -> bool:
        children = self._children.get(path, {})
        return bool(children) and all(child.rpartition(".")[2].isdecimal() for child in children)

    def _holding_composites(self) -> set[str]:
        """Modules below which a container holds modules that have children of their own."""
        found: set[str] = set()
        for path in list(self._children):
            if self._is_container(path) and any(
                self._children.get(child) for child in self._children[path]
            ):
                parts = path.split(".") if path else []
                found |= {".".join(parts[:length]) for length in range(len(parts) + 1)}
        return found
