"""Split batches into micro-batches and join their outputs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...capture.observation.nested_values import list_tensors, replace_tensors
from ...capture.sample import dtype_name
from ...core.errors import InvalidInput
from ...core.graph.tensors import TensorSpec


def split_batch(
    flat: Sequence[Tensor],
    num_microbatches: int,
    fixed: Sequence[TensorSpec] | None,
    names: Sequence[str],
    *,
    is_converted: bool = False,
) -> list[tuple[Tensor, ...]]:
    """Split a batch into micro-batches along the first dimension.

    ``fixed`` are the inputs of a micro-batch for a model captured at fixed shapes; `None` splits as
    evenly as possible, into fewer pieces if there are fewer samples. ``is_converted`` allows other
    floating dtypes than the captured ones, for a caller that checks them (`PrecisionCheck`).
    """
    if fixed is not None:
        check_inputs(flat, fixed, is_converted=is_converted)
    size = fixed[0].shape[0] if fixed else None
    lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in flat]
    if len(set(lengths)) != 1 or not lengths[0]:
        pairs = ", ".join(f"{n}: {length}" for n, length in zip(names, lengths, strict=True))
        raise InvalidInput(f"inputs are split along their first dimension, which differs: {pairs}")
    if size is not None and lengths[0] % size:
        raise InvalidInput(
            f"a batch of {lengths[0]} is not a multiple of the micro-batch size {size} the model "
            f"was captured at; pass {size * num_microbatches} samples, or profile and plan at "
            "another size. Leave the last batch of the data out (drop_last=True), or evaluate it "
            "with the unsplit model"
        )
    if size is not None and lengths[0] != size * num_microbatches:
        raise InvalidInput(
            f"a batch of {lengths[0]} is not {num_microbatches} micro-batches of {size}; pass "
            f"{size * num_microbatches} samples, or plan with {lengths[0] // size} micro-batches"
        )
    pieces = min(num_microbatches, lengths[0])
    columns = [torch.tensor_split(tensor, pieces) for tensor in flat]
    return list(zip(*columns, strict=True))


def check_inputs(
    flat: Sequence[Tensor], fixed: Sequence[TensorSpec], *, is_converted: bool = False
) -> None:
    """Check inputs against those captured: dtypes, and dimensions but the first, the batch."""
    for spec, tensor in zip(fixed, flat, strict=True):
        is_same_kind = is_converted and (
            tensor.is_floating_point() and getattr(torch, spec.dtype).is_floating_point
        )
        if dtype_name(tensor.dtype) != spec.dtype and not is_same_kind:
            raise InvalidInput(
                f"input {spec.name!r} has the dtype {dtype_name(tensor.dtype)}, but the model was "
                f"captured with {spec.dtype}, and its forward may do something else for another; "
                f"pass {spec.dtype}, or profile and plan with a sample of the dtype you use"
            )
        if tuple(tensor.shape[1:]) != spec.shape[1:] or tensor.dim() != len(spec.shape):
            raise InvalidInput(
                f"input {spec.name!r} has shape {tuple(tensor.shape)}, but the model was captured "
                f"at {spec.shape}, and only its first dimension, the samples, may differ: the "
                "graph may hold the other sizes as numbers. Pad or cut the input to that size, or "
                "profile and plan at the size you use"
            )


def join_outputs(outputs: list[tuple[Any, ...]], sizes: Sequence[int]) -> tuple[Any, ...]:
    """Join the flat outputs of micro-batches.

    Tensors are concatenated along their first dimension, which must be the micro-batch's samples;
    floating scalars are averaged with ``sizes``, the samples of each micro-batch, as weights;
    anything else must be equal in all.

    Raises:
        InvalidInput: An output has none of these forms.
    """
    joined: list[Any] = []
    for position, column in enumerate(zip(*outputs, strict=True)):
        if not isinstance(column[0], Tensor):
            if any(value != column[0] for value in column):
                raise InvalidInput(f"output {position} differs between micro-batches: {column}")
            joined.append(column[0])
        elif len(column) == 1:
            joined.append(column[0])
        elif column[0].dim() == 0:
            if not (column[0].is_floating_point() or column[0].is_complex()):
                raise InvalidInput(
                    f"output {position} is one {dtype_name(column[0].dtype)} for each of "
                    f"{len(column)} micro-batches, and may be a count, a maximum or something "
                    "else of the batch; return one entry per sample, or a floating mean"
                )
            total = sum(value * size for value, size in zip(column, sizes, strict=True))
            joined.append(total / sum(sizes))
        elif [len(value) for value in column] != list(sizes):
            raise InvalidInput(
                f"output {position} has shape {tuple(column[0].shape)} for a micro-batch of "
                f"{sizes[0]}; outputs are joined along their first dimension, which must be the "
                "batch (the states of an nn.LSTM have it second, for example)"
            )
        else:
            joined.append(torch.cat(list(column)))
    return tuple(joined)


def split_target(target: Any, num_microbatches: int) -> list[Any]:
    """Split a batch's target, a tensor or a nest of tensors, by micro-batch."""
    columns = []
    for tensor in list_tensors(target):
        length = tensor.shape[0] if tensor.dim() else 0
        if not length or length % num_microbatches:
            raise InvalidInput(
                f"a target of shape {tuple(tensor.shape)} does not divide into {num_microbatches} "
                "micro-batches along its first dimension; give one entry per sample"
            )
        columns.append(torch.tensor_split(tensor, num_microbatches))
    pieces = zip(*columns, strict=True) if columns else [()] * num_microbatches
    return [replace_tensors(target, row) for row in pieces]


def describe_shapes(value: Any) -> str:
    """Return the shapes of a nest's leaves as text, for example ``(4, 10), (4,)``."""
    leaves = pytree.tree_leaves(value)
    found = [str(tuple(leaf.shape)) if hasattr(leaf, "shape") else repr(leaf) for leaf in leaves]
    return ", ".join(found)
