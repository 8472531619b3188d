"""Check of batch dependence: outputs that depend on the batch, which micro-batches change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from ..observation.nested_values import extract_tensors
from ..observation.preserve import preserve_model, seed_everything
from ..sample import CallStructure
from .check import RELATIVE_TOLERANCE, SEEDS, relative_difference


def describe_batch_dependence(
    model: nn.Module, structure: CallStructure, flat: Sequence[Tensor]
) -> list[str]:
    """Return a note if a sample's outputs change with its batch, in evaluation mode.

    Two things are tried. A batch beside a copy of itself has the same means, so only what knows the
    batch's size shows: sums over it, and divisions by it. A batch of which one sample is replaced
    by another shows models whose first dimension is not the batch, such as an `nn.LSTM`'s. Outputs
    that do not begin with the samples are left to the runtime, which refuses to join them. Models
    that draw random numbers in evaluation are not judged.
    """
    if len({tensor.shape[0] for tensor in flat}) != 1:
        return []

    run = partial(_run, model, structure)
    with preserve_model(model, training=False), torch.no_grad(), suppress(Exception):
        once, again = run(flat), run(flat, seed=SEEDS[1])
        if _find_difference(once, again) is None:
            for describe in (_describe_neighbours, _describe_size):
                # A model may take one batch size only, or samples that differ.
                with suppress(Exception):
                    if notes := describe(run, flat, once):
                        return notes
    return []


def _describe_size(
    run: Callable[[Sequence[Tensor]], list[Tensor]], flat: Sequence[Tensor], once: list[Tensor]
) -> list[str]:
    """Return a note if outputs change when the batch is doubled by its own copy."""
    found = _find_difference(once, run([torch.cat([tensor, tensor]) for tensor in flat]))
    if found is None:
        return []
    position, error = found
    return [
        f"output {position} of a sample differs by {error:.2g} (relative) when its batch is "
        "doubled: forward sums over the samples or divides by their number, which is a "
        "micro-batch's number in a pipeline; give that number as a constant, or move the sum "
        "into the loss"
    ]


def _describe_neighbours(
    run: Callable[[Sequence[Tensor]], list[Tensor]], flat: Sequence[Tensor], once: list[Tensor]
) -> list[str]:
    """Return a note if samples' outputs change when another sample of their batch is replaced.

    The last sample is replaced by the first, and the first by the last: a recurrence over the first
    dimension goes one way.
    """
    size = len(flat[0])
    for changed, source, kept in ((-1, 0, slice(size - 1)), (0, -1, slice(1, None))):
        batch = [tensor.clone() for tensor in flat]
        for tensor in batch:
            tensor[changed] = tensor[source]
        pairs = [
            (ours[kept], theirs[kept])
            for ours, theirs in zip(once, run(batch), strict=True)
            if ours.dim() and len(ours) == len(theirs) == size
        ]
        found = _find_difference([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
        if found is not None:
            return [
                f"outputs of a sample differ by {found[1]:.2g} (relative) when another sample of "
                "its batch is replaced, and in a pipeline it meets only those of its micro-batch. "
                "If the batch is not the first dimension of the inputs, which is split, make it "
                "so: nn.LSTM, nn.GRU, nn.MultiheadAttention and nn.Transformer have batch_first"
            ]
    return []


def _run(
    model: nn.Module, structure: CallStructure, flat: Sequence[Tensor], seed: int = SEEDS[0]
) -> list[Tensor]:
    leaves: list[Tensor] = []
    with preserve_model(model):
        seed_everything(seed)
        args, kwargs = structure.unflatten([tensor.clone() for tensor in flat])
        extract_tensors(model(*args, **kwargs), leaves)
    return leaves


def _find_difference(once: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[int, float] | None:
    """Return the first output that differs, and by how much; the other batch may be larger."""
    for position, (ours, theirs) in enumerate(zip(once, other, strict=True)):
        if not ours.is_floating_point():
            continue
        samples = theirs[: len(ours)] if ours.dim() else theirs
        if samples.shape != ours.shape:
            continue
        error = relative_difference(samples, ours)
        if error > max(RELATIVE_TOLERANCE, 20 * torch.finfo(ours.dtype).eps):
            return position, error
    return None
