"""Tensors of which a rank holds a part, as torch's distributed checkpoints know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

Box = tuple[tuple[int, ...], Tensor]
"""Where in the whole tensor a block is, and the memory of it here."""


class DividedTensor(Tensor):
    """A whole tensor by its shape, with this rank's memory of some blocks of it.

    Along ``dim`` the whole is a row of ``parts``, sizes that add up to its own (one if empty). The
    rank has piece ``shard`` of ``degree`` equal pieces of each, one behind the other in ``local``,
    which may itself be sharded over replicas. It is for saving and loading, not for arithmetic.
    """

    local: Tensor
    boxes: list[Box]

    @staticmethod
    def __new__(
        cls: type[DividedTensor],
        local: Tensor,
        dim: int,
        parts: Sequence[int],
        shard: int,
        degree: int,
        shape: Sequence[int],
    ) -> DividedTensor:
        made = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device, layout=torch.strided
        )
        made.local = local
        found = list(_blocks_of(local))
        for part, start in _iterate_pieces(dim, parts or [shape[dim]], shard, degree):
            found_here = (_cut(block, dim, part, start) for block in found)
            made.boxes = [*getattr(made, "boxes", []), *(box for box in found_here if box)]
        return made

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        raise TypeError(f"a part of a tensor does not support {func}")

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"DividedTensor({tuple(self.shape)}, {len(self.boxes)} blocks)"

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return what this rank can write; called by torch."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the blocks that this rank has; called by torch."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=block.size())
            for offset, block in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of a block; called by torch."""
        return next(block for offset, block in self.boxes if torch.Size(offset) == index.offset)


def _blocks_of(local: Tensor) -> Iterator[Box]:
    """Yield the blocks of a rank's part that are here: all of it, or a replica's shard."""
    if not isinstance(local, DTensor):
        yield (0,) * local.dim(), local.detach()
        return
    memory: Tensor = local.to_local().detach()
    for chunk in local.__create_chunk_list__():
        yield tuple(chunk.offsets), memory


def _iterate_pieces(
    dim: int, parts: Sequence[int], shard: int, degree: int
) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the range of each piece in the rank's part, and where it begins in the whole."""
    begin = 0
    for size, end in zip(parts, accumulate(parts), strict=True):
        piece = size // degree
        yield (begin, begin + piece), end - size + shard * piece
        begin += piece


def _cut(block: Box, dim: int, piece: tuple[int, int], start: int) -> Box | None:
    """Return what a block has of a piece, at its offset in the whole."""
    offset, memory = block
    first = max(offset[dim], piece[0])
    last = min(offset[dim] + memory.shape[dim], piece[1])
    if first >= last or not memory.numel():
        return None
    moved = (*offset[:dim], start + first - piece[0], *offset[dim + 1 :])
    return moved, memory.narrow(dim, first - offset[dim], last - first)
