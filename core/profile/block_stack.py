"""Repeated blocks of a model, found in the names of its layers.

Most runtimes cut only between decoder blocks, and count those blocks alone: what precedes them
(embeddings) belongs to the first stage, what follows (norm and head) to the last.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import InvalidInput
from .profile import Profile

_NUMBERED = re.compile(r"(?:(?P<prefix>.+?)\.)?(?P<index>\d+)(?:[.@].*)?")
"""A name with a number in its path, such as ``model.layers.3.mlp`` or, in a Sequential, ``3``."""


@dataclass(frozen=True)
class BlockStack:
    """Blocks ``<prefix>.0`` to ``<prefix>.<n - 1>`` of a model, as ranges of its layers.

    Attributes:
        prefix: Module that holds the blocks; empty for a model that is a Sequential itself.
        starts: Index of each block's first layer.
        num_layers: Layers of the whole model.
        end: Index of the first layer behind the last block.
        first: Number of the first block in its name; others than 0 in a Sequential whose blocks
            stand between other modules.
    """

    prefix: str
    starts: tuple[int, ...]
    end: int
    num_layers: int
    first: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.starts)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Return the layer positions at which blocks begin or end."""
        return (*self.starts, self.end)

    def name(self, block: int) -> str:
        """Return the name of a block's module."""
        number = self.first + block
        return f"{self.prefix}.{number}" if self.prefix else str(number)

    def count(self, cut: int) -> int:
        """Return how many whole blocks are in front of a layer position."""
        return self.num_blocks if cut >= self.end else max(0, bisect_right(self.starts, cut) - 1)

    def is_inside(self, cut: int) -> bool:
        """Return whether a cut at this layer position divides a block."""
        return self.starts[0] < cut < self.end and cut not in self.starts

    def position(self, blocks: int) -> int:
        """Return the layer position behind that many blocks."""
        return self.cuts[blocks]


def find_stack(
    layer_names: Sequence[str], layer_types: Sequence[str] = (), module_names: Sequence[str] = ()
) -> BlockStack:
    """Find the blocks of a model by the names of its layers.

    Layers between two blocks that belong to neither count as part of the one before. Given the
    types of layers, and the modules that hold weights, blocks that are nothing but a module of
    torch's own must be of one type: those of a Sequential of convolutions and activations do not
    repeat. Where more than half of them in a row do, as between the embedding and the head of a
    Sequential, those are the blocks.

    Raises:
        InvalidInput: There are no numbered blocks, several stacks of them (an encoder and a
            decoder), their numbers are not 0, 1, 2, ... in order, or they do not repeat.
    """
    found = find_stacks(layer_names)
    if len(found) > 1:
        raise InvalidInput(
            f"the model has {len(found)} stacks of blocks "
            f"({', '.join(repr(stack.prefix) for stack in found)}); only models with one stack of "
            "blocks can be counted in blocks"
        )
    if layer_types:
        return _find_repeated(found[0], layer_names, layer_types, module_names)
    return found[0]


def find_profile_stack(profile: Profile) -> BlockStack:
    """Find the blocks of a profile's model. Raises: InvalidInput."""
    layers = [entry.layer for entry in profile.layers]
    types = [layer.module_type for layer in layers]
    modules = [name for layer in layers for name in layer.module_fqns]
    return find_stack([layer.name for layer in layers], types * any(types), modules)


def _find_repeated(
    stack: BlockStack, names: Sequence[str], types: Sequence[str], modules: Sequence[str]
) -> BlockStack:
    kinds: list[list[str]] = [[] for _ in stack.starts]
    for layer in range(stack.starts[0], stack.end):
        block = bisect_right(stack.starts, layer) - 1
        # Not those between two blocks, such as an activation that all of them share.
        if f"{names[layer].partition('@')[0]}.".startswith(f"{stack.name(block)}."):
            kinds[block].append(types[layer])
    # Blocks with modules inside may differ: hybrid models alternate attention with other layers.
    depth = stack.name(0).count(".") + 1
    parts = [name.partition("@")[0].split(".") for name in (*names, *modules)]
    divided = {".".join(each[:depth]) for each in parts if len(each) > depth}
    holds = [len(kind) > 1 or stack.name(at) in divided for at, kind in enumerate(kinds)]
    breaks = [
        at
        for at in range(1, len(kinds))
        if kinds[at] != kinds[at - 1] and not (holds[at] and holds[at - 1])
    ]
    first, last = max(pairwise((0, *breaks, len(kinds))), key=lambda run: run[1] - run[0])
    if last - first == len(kinds):
        return stack
    if 2 * (last - first) > len(kinds):
        return BlockStack(
            stack.prefix, stack.starts[first:last], stack.cuts[last], stack.num_layers, first
        )
    other = breaks[0]
    raise InvalidInput(
        f"the model has no repeated blocks: {stack.name(0)!r} is {'+'.join(kinds[0])}, "
        f"{stack.name(other)!r} {'+'.join(kinds[other])}; only models with a stack of blocks "
        "of one kind can be counted in blocks"
    )


def find_stacks(layer_names: Sequence[str]) -> list[BlockStack]:
    """Find every stack of blocks of a model by the names of its layers, in their order.

    Raises:
        InvalidInput: There are no numbered blocks, or the numbers of a stack are not 0, 1, 2, ...
            in order.
    """
    found: dict[str, dict[int, list[int]]] = {}
    for layer, name in enumerate(layer_names):
        match = _NUMBERED.fullmatch(name)
        if match:
            blocks = found.setdefault(match["prefix"] or "", {})
            blocks.setdefault(int(match["index"]), []).append(layer)
    if not found:
        raise InvalidInput(
            "no layer is part of a numbered block such as 'layers.0'; only models with a stack of "
            "blocks can be counted in blocks"
        )
    return [_to_stack(prefix, blocks, len(layer_names)) for prefix, blocks in found.items()]


def _to_stack(prefix: str, blocks: dict[int, list[int]], num_layers: int) -> BlockStack:
    starts = tuple(members[0] for members in blocks.values())
    ends = tuple(members[-1] for members in blocks.values())
    in_order = all(end < start for end, start in zip(ends, starts[1:], strict=False))
    if list(blocks) != list(range(len(blocks))) or not in_order:
        raise InvalidInput(
            f"the blocks of {prefix!r} do not run in the order of their numbers: {list(blocks)}"
        )
    return BlockStack(prefix, starts, ends[-1] + 1, num_layers)
