"""Variations of a sample, which reveal values that a graph has frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def vary_inputs(flat: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield inputs of the same shapes, the most different first and the sample itself last.

    Floating-point values are interpolated between two permutations of the sample's own, so they
    stay in its range; integers, booleans and masks are permuted, so they stay valid indices.
    """
    generator = torch.Generator().manual_seed(1)
    yield tuple(_varied(tensor, generator) for tensor in flat)
    yield tuple(
        _varied(tensor, generator) if tensor.is_floating_point() else tensor for tensor in flat
    )
    yield tuple(flat)


def _varied(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.numel() < 2 or tensor.is_complex():
        return tensor
    if not tensor.is_floating_point():
        return _permuted(tensor, generator)
    low, high = float(tensor.min()), float(tensor.max())
    if low == high:
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        return tensor + noise
    if not tensor.isfinite().all() or ((tensor == low) | (tensor == high)).all():
        return _permuted(tensor, generator)
    share = torch.rand(tensor.shape, generator=generator).to(tensor)
    return torch.lerp(_permuted(tensor, generator), _permuted(tensor, generator), share)


def _permuted(tensor: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return tensor.detach().reshape(-1)[order].reshape(tensor.shape)
