"""Repeated blocks of a model, found in the names of its layers.

Most runtimes cut only between decoder blocks, and count those blocks alone: what precedes them
(embeddings) belongs to the first stage, what follows (norm and head) to the last.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidInput

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
    """

    prefix: str
    starts: tuple[int, ...]
    end: int
    num_layers: int

    @property
    def num_blocks(self) -> int:
        return len(self.starts)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Return the layer positions at which blocks begin or end."""
        return (*self.starts, self.end)

    def name(self, block: int) -> str:
        """Return the name of a block's module."""
        return f"{self.prefix}.{block}" if self.prefix else str(block)

    def count(self, cut: int) -> int:
        """Return how many whole blocks are in front of a layer position."""
        return self.num_blocks if cut >= self.end else max(0, bisect_right(self.starts, cut) - 1)

    def is_inside(self, cut: int) -> bool:
        """Return whether a cut at this layer position divides a block."""
        return self.starts[0] < cut < self.end and cut not in self.starts

    def position(self, blocks: int) -> int:
        """Return the layer position behind that many blocks."""
        return self.cuts[blocks]


def find_stack(layer_names: Sequence[str]) -> BlockStack:
    """Find the blocks of a model by the names of its layers.

    Layers between two blocks that belong to neither count as part of the one before.

    Raises:
        InvalidInput: There are no numbered blocks, several stacks of them (an encoder and a
            decoder), or their numbers are not 0, 1, 2, ... in order.
    """
    found = find_stacks(layer_names)
    if len(found) > 1:
        raise InvalidInput(
            f"the model has {len(found)} stacks of blocks "
            f"({', '.join(repr(stack.prefix) for stack in found)}); only models with one stack of "
            "blocks can be counted in blocks"
        )
    return found[0]


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
