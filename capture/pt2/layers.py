"""Assignment of an exported program's operations to layers, following `capture.program.layers`.

There is no model here, only the paths of its modules: a module whose children are all numbered
(as in `nn.Sequential` and `nn.ModuleList`) is taken for a container.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .program import OperatorCall

MAX_SHARE = 0.25
"""A module outside any container that has more than this share of the operations is opened."""


@dataclass(frozen=True)
class ExportedLayers:
    """Layers in execution order.

    Attributes:
        names: Unique; the second run of a module carries ``@1``.
        kinds: Class name of each layer's module.
        layer_of: Layer of each operation, by position.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    layer_of: tuple[int, ...]


def assign_exported_layers(
    calls: Sequence[OperatorCall],
    sources: Sequence[Sequence[int]],
    pinned: Sequence[bool],
    constant: Sequence[bool],
    modules: Iterable[str],
    model: str,
) -> ExportedLayers:
    """Cut a program into runs of its model's blocks; operations in between join what feeds them.

    Args:
        calls: The operations in execution order.
        sources: For each operation, the operations it reads.
        pinned: For each, whether it must stay where it happens (in-place or random).
        constant: For each, whether it depends on no input and no state; such an operation goes
            into the first layer that reads it.
        modules: Paths of the model's modules.
        model: The model's class name, which names the only layer where there are no modules.
    """
    counted = [index for index, is_constant in enumerate(constant) if not is_constant]
    tree = _ModuleTree({*modules, *(path for call in calls for _, path in call.stack)})
    paths = tree.find_blocks([calls[index] for index in counted])
    names: list[str] = []
    kinds: list[str] = []
    seen: Counter[str] = Counter()
    layer_of: dict[int, int] = {}
    previous: tuple[str, str] | None = None
    for index in counted:
        block = _find_block(calls[index], paths)
        if block is None:
            feeding = [layer_of[source] for source in sources[index] if source in layer_of]
            if feeding and pinned[index]:
                feeding.append(len(names) - 1)
            if feeding:
                layer_of[index] = max(feeding)
            continue  # without a source in a layer, `_place_rest` looks at the readers
        key, path, kind = block
        # Keys differ between calls of one module: a second run in a row is a layer of its own.
        if (key, path) != previous:
            names.append(path + (f"@{seen[path]}" if seen[path] else ""))
            kinds.append(kind)
            seen[path] += 1
            previous = key, path
        layer_of[index] = len(names) - 1
    if not names:
        names, kinds = [model], [model]
    return ExportedLayers(tuple(names), tuple(kinds), _place_rest(layer_of, sources, constant))


def _place_rest(
    layer_of: dict[int, int], sources: Sequence[Sequence[int]], constant: Sequence[bool]
) -> tuple[int, ...]:
    """Give every operation a layer, none before the layer of what it reads."""
    positions = range(len(sources))
    users: dict[int, list[int]] = defaultdict(list)
    for index, read in enumerate(sources):
        for source in read:
            users[source].append(index)
    # Backwards, so that chains of operations without a layer inherit their last reader's.
    for index in reversed(positions):
        if index not in layer_of and not constant[index]:
            layer_of[index] = min((layer_of[u] for u in users[index] if u in layer_of), default=0)
    # Forwards, so that a layer pushed back pushes back everything that depends on it.
    for index in positions:
        if not constant[index]:
            read_from = [layer_of[source] for source in sources[index] if not constant[source]]
            layer_of[index] = max(layer_of[index], *read_from, 0)
    # Constants last: their readers are settled now.
    for index in reversed(positions):
        if constant[index]:
            layer_of[index] = min((layer_of[user] for user in users[index]), default=0)
    return tuple(layer_of[index] for index in positions)


def _find_block(call: OperatorCall, paths: set[str]) -> tuple[str, str, str] | None:
    """Return key, path and class of the block in which an operation ran."""
    for (key, path), kind in zip(call.stack, call.kinds, strict=True):
        if path in paths:
            return key, path, kind
    return None


class _ModuleTree:
    """Modules of a model, by path."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._children: dict[str, dict[str, None]] = defaultdict(dict)  # a dict keeps the order
        for path in sorted(paths):
            for child in filter(None, _ancestors(path)):
                self._children[child.rpartition(".")[0]][child] = None
        # Modules above a container of modules that have children: always opened.
        self._composite = {
            ancestor
            for path in list(self._children)
            if self._is_container(path)
            and any(self._children.get(child) for child in self._children[path])
            for ancestor in _ancestors(path)
        }

    def find_blocks(self, calls: Sequence[OperatorCall]) -> set[str]:
        """Return the paths of the modules that become layers; see `layers.block_paths`."""
        if self._is_container(""):
            return set(self._children[""])
        opened = {""}
        while True:
            found = set(self._leaves(opened))
            counts = Counter(block[1] for call in calls if (block := _find_block(call, found)))
            large = {
                path
                for path in found - opened
                if counts[path] > MAX_SHARE * len(calls)
                and self._children.get(path)
                and not self._is_container(path.rpartition(".")[0])
            }
            if not large:
                return found
            opened |= large

    def _leaves(self, opened: set[str]) -> Iterator[str]:
        waiting = [("", False)]  # a stack, not recursion: paths may be as deep as a sender likes
        while waiting:
            path, is_element = waiting.pop()
            children, is_container = self._children.get(path, {}), self._is_container(path)
            if not children or (is_element and not is_container):
                yield path
            elif is_container or path in opened or path in self._composite:
                waiting += [(child, is_container) for child in children]
            else:
                yield path

    def _is_container(self, path: str) -> bool:
        children = self._children.get(path, {})
        return bool(children) and all(child.rpartition(".")[2].isdecimal() for child in children)


def _ancestors(path: str) -> list[str]:
    """Return the root (an empty path), all modules above a path, and the path itself."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]
