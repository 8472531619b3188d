"""Layers folded by the modules they belong to, equal neighbours together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_DEPTH = 64
"""Of modules within modules; what is below stands as single layers."""

OWN = "(itself)"
"""What a module runs of its own beside its parts."""


@dataclass(frozen=True)
class ModuleNode:
    """A module with all layers below it.

    Attributes:
        name: Its path below the node above, e.g. ``attn`` or ``encoder.0``; of equal neighbours
            the first and the last, ``0..11``.
        layers: Indices of the layers in it, ascending in each of ``repeats`` equal parts.
        children: Its parts; none for a layer.
        repeats: How many equal neighbours stand here as one.
    """

    name: str
    layers: tuple[int, ...]
    children: tuple[ModuleNode, ...] = ()
    repeats: int = 1


def module_tree(names: Sequence[str], classes: Sequence[str] = ()) -> tuple[ModuleNode, ...]:
    """The outermost modules, in the order their first layers run.

    A module with one part only is one node with it. Neighbours with the same parts, all of the
    same cost classes, stand as one node.

    Args:
        names: Of the layers, as dotted paths of modules.
        classes: Cost class of each layer, empty where not known; none if empty.
    """
    entries = [(index, tuple(name.split("."))) for index, name in enumerate(names)]
    return _folded(_children(entries), list(classes) or [""] * len(names))


def _children(entries: Sequence[tuple[int, tuple[str, ...]]], depth: int = 0) -> list[ModuleNode]:
    """Nodes by the first part of each path; an empty path is the module itself."""
    if depth == MAX_DEPTH or not any(path for _, path in entries):
        return [ModuleNode(".".join(path) or OWN, (index,)) for index, path in entries]
    parts: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for index, path in entries:
        parts.setdefault(path[0] if path else OWN, []).append((index, path[1:]))
    return [_node(name, below, depth) for name, below in parts.items()]


def _node(name: str, entries: Sequence[tuple[int, tuple[str, ...]]], depth: int) -> ModuleNode:
    if len(entries) == 1:
        index, path = entries[0]
        return ModuleNode(".".join((name, *path)), (index,))
    children = _children(entries, depth + 1)
    if len(children) == 1:
        (only,) = children
        return ModuleNode(f"{name}.{only.name}", only.layers, only.children)
    return ModuleNode(name, tuple(index for index, _ in entries), tuple(children))


def _folded(nodes: Sequence[ModuleNode], classes: Sequence[str]) -> tuple[ModuleNode, ...]:
    """Equal neighbours as one, at every depth."""
    runs: list[list[ModuleNode]] = []
    for node in nodes:
        if runs and _same(runs[-1][-1], node, classes):
            runs[-1].append(node)
        else:
            runs.append([node])
    return tuple(_joined(run, classes) for run in runs)


def _same(one: ModuleNode, other: ModuleNode, classes: Sequence[str]) -> bool:
    """Whether two nodes cost the same layer by layer; unknown classes never do."""
    if len(one.layers) != len(other.layers) or len(one.children) != len(other.children):
        return False
    kinds = [[classes[index] for index in node.layers] for node in (one, other)]
    if kinds[0] != kinds[1] or not all(kinds[0]):
        return False
    return all(
        before.name == after.name and _same(before, after, classes)
        for before, after in zip(one.children, other.children, strict=True)
    )


def _joined(run: Sequence[ModuleNode], classes: Sequence[str]) -> ModuleNode:
    first = run[0]
    if len(run) == 1:
        children = _folded(first.children, classes)
        if len(children) == 1:  # all parts are equal
            return replace(children[0], name=f"{first.name}.{children[0].name}")
        return replace(first, children=children)
    parts = zip(*(node.children for node in run), strict=True)
    joined = [ModuleNode(part[0].name, _layers(part), _below(part)) for part in parts]
    return ModuleNode(
        first_to_last(first.name, run[-1].name), _layers(run), _folded(joined, classes), len(run)
    )


def _below(nodes: Sequence[ModuleNode]) -> tuple[ModuleNode, ...]:
    """Parts of nodes that are equal, each with those of all."""
    parts = zip(*(node.children for node in nodes), strict=True)
    return tuple(ModuleNode(part[0].name, _layers(part), _below(part)) for part in parts)


def _layers(nodes: Sequence[ModuleNode]) -> tuple[int, ...]:
    return tuple(index for node in nodes for index in node.layers)


def first_to_last(first: str, last: str) -> str:
    """Two names as those of a run, what they begin with once: ``layers.0..11``."""
    start = first.rpartition(".")[0]
    if start and last.startswith(f"{start}."):
        return f"{first}..{last[len(start) + 1 :]}"
    return f"{first}..{last}"
