"""Tree of the modules that layers belong to, with equal neighbours folded into one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_DEPTH = 64
"""Deepest nesting of modules shown; whatever is below appears as single layers."""

OWN = "(itself)"
"""Name of the node for operations that a module runs outside its children."""


@dataclass(frozen=True)
class ModuleNode:
    """A module with all layers below it.

    Attributes:
        name: Path below the parent node, e.g. ``attn`` or ``encoder.0``; for folded neighbours
            the first and the last, ``0..11``.
        layers: Indices of its layers, ascending within each of ``repeats`` equal parts.
        children: Its child modules; empty for a layer.
        repeats: Number of equal neighbours folded into this node.
    """

    name: str
    layers: tuple[int, ...]
    children: tuple[ModuleNode, ...] = ()
    repeats: int = 1


def module_tree(names: Sequence[str], classes: Sequence[str] = ()) -> tuple[ModuleNode, ...]:
    """Build the tree and return its outermost nodes, ordered by their first layer.

    The names are dotted paths of modules. A module with a single child is merged with it.
    Neighbours with equal children, layer by layer of the same cost class, are folded into one node;
    an unknown class is ``""``.
    """
    entries = [(index, tuple(name.split("."))) for index, name in enumerate(names)]
    return _folded(_children(entries), list(classes) or [""] * len(names))


def _children(entries: Sequence[tuple[int, tuple[str, ...]]], depth: int = 0) -> list[ModuleNode]:
    """Group layers by the first component of their path; an empty path is the module itself."""
    # Names come from documents of others: beyond this depth they stay whole, so that the
    # recursion is bounded.
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
    """Fold equal neighbours, at every depth."""
    runs: list[list[ModuleNode]] = []
    for node in nodes:
        if runs and _same(runs[-1][-1], node, classes):
            runs[-1].append(node)
        else:
            runs.append([node])
    return tuple(_joined(run, classes) for run in runs)


def _same(one: ModuleNode, other: ModuleNode, classes: Sequence[str]) -> bool:
    """Return True if two nodes have equal children and known, equal cost classes."""
    if len(one.layers) != len(other.layers) or len(one.children) != len(other.children):
        return False
    kinds = [[classes[index] for index in node.layers] for node in (one, other)]
    # An empty class is an unknown cost, which equals nothing.
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
    # Merge the runs' children first: four equal blocks then show their parts once, not four times.
    parts = zip(*(node.children for node in run), strict=True)
    joined = [ModuleNode(part[0].name, _layers(part), _below(part)) for part in parts]
    return ModuleNode(
        first_to_last(first.name, run[-1].name), _layers(run), _folded(joined, classes), len(run)
    )


def _below(nodes: Sequence[ModuleNode]) -> tuple[ModuleNode, ...]:
    """Merge the children of equal nodes position by position."""
    parts = zip(*(node.children for node in nodes), strict=True)
    return tuple(ModuleNode(part[0].name, _layers(part), _below(part)) for part in parts)


def _layers(nodes: Sequence[ModuleNode]) -> tuple[int, ...]:
    return tuple(index for node in nodes for index in node.layers)


def first_to_last(first: str, last: str) -> str:
    """Join the names of a run's ends, writing their common parent once: ``layers.0..11``."""
    start = first.rpartition(".")[0]
    if start and last.startswith(f"{start}."):
        return f"{first}..{last[len(start) + 1 :]}"
    return f"{first}..{last}"
