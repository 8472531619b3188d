"""Check of batch dependence: outputs that depend on the batch size, which micro-batches change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..observation.nested_values import extract_tensors
from ..observation.preserve import preserve_model, seed_everything
from ..sample import CallStructure
from .check import RELATIVE_TOLERANCE, SEEDS, relative_difference


def describe_batch_dependence(
    model: nn.Module, structure: CallStructure, flat: Sequence[Tensor]
) -> list[str]:
    """Return a note if a sample's outputs change when its batch is doubled, in evaluation mode.

    A batch beside a copy of itself has the same means, so only what knows the batch's size shows:
    sums over it, and divisions by it. Outputs that do not begin with the samples are left to the
    runtime, which refuses to join them. Not judged are models that draw random numbers in
    evaluation, and models that do not take a batch of another size.
    """
    if len({tensor.shape[0] for tensor in flat}) != 1:
        return []
    doubled = [torch.cat([tensor, tensor]) for tensor in flat]
    with preserve_model(model, training=False), torch.no_grad():
        try:
            batches = ((flat, SEEDS[0]), (flat, SEEDS[1]), (doubled, SEEDS[0]))
            once, again, twice = (_run(model, structure, batch, seed) for batch, seed in batches)
        except Exception:  # noqa: BLE001 - a model may take one batch size only
            return []
    if len(twice) != len(once) or _find_difference(once, again) is not None:
        return []
    found = _find_difference(once, twice)
    if found is None:
        return []
    position, error = found
    return [
        f"output {position} of a sample differs by {error:.2g} (relative) when its batch is "
        "doubled: forward sums over the samples or divides by their number, which is a "
        "micro-batch's number in a pipeline; give that number as a constant, or move the sum "
        "into the loss"
    ]


def _run(
    model: nn.Module, structure: CallStructure, flat: Sequence[Tensor], seed: int
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
