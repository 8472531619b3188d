"""Assignment of an exported program's operations to layers, following `capture.program.layers`.

There is no model here, only the paths of its modules: a module whose children are all numbered
(as in `nn.Sequential` and `nn.ModuleList`) is taken for a container.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..blocks import ModuleTree, list_ancestors
from .program import OperatorCall


@dataclass(frozen=True)
class ExportedLayers:
    """Layers in execution order, with their modules' classes, and the layer of each operation.

    Names are unique; the second run of a module carries ``@1``.
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

    ``sources`` has for each call those that it reads, ``pinned`` whether it must stay where it
    happens (in-place or random), ``constant`` whether it depends on no input and no state; such an
    operation goes into the first layer that reads it. Where there are no modules, ``model`` names
    the only layer.
    """
    counted = [index for index, is_constant in enumerate(constant) if not is_constant]
    every_path = {*modules, *(path for call in calls for _, path in call.stack)}
    paths = _find_blocks(every_path, [calls[index] for index in counted])
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


def _find_blocks(modules: Iterable[str], calls: Sequence[OperatorCall]) -> set[str]:
    """Return the paths of the modules that become layers."""
    children: dict[str, dict[str, None]] = defaultdict(dict)  # a dict keeps the order
    for path in sorted(modules):
        for child in filter(None, list_ancestors(path)):
            children[child.rpartition(".")[0]][child] = None
    containers = {
        path
        for path, inside in children.items()
        if all(child.rpartition(".")[2].isdecimal() for child in inside)
    }
    if "" in containers:
        return set(children[""])

    def find(call: OperatorCall, paths: set[str]) -> str | None:
        block = _find_block(call, paths)
        return block and block[1]

    return ModuleTree(children, containers).choose_blocks(calls, find)
