"""Made-up values in the place of a graph's parameters, buffers and constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain
from math import prod, sqrt

import torch
from torch import Tensor, nn

from ...capture.program.segment import Segment, get_constants
from ...core.graph.tensors import StateTensor


def meta_tensor(entry: StateTensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    tensor = _empty(entry, torch.device("meta"))
    if entry.kind == "parameter":
        floating = dtype.is_floating_point or dtype.is_complex
        return nn.Parameter(tensor, requires_grad=entry.requires_grad and floating)
    return tensor


def made_up(entry: StateTensor, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return a state tensor with random values for parameters, else as its fill says."""
    tensor = _empty(entry, device)
    fill = entry.fill
    with torch.no_grad():
        if entry.kind == "parameter" or fill is None:
            _random_weight(tensor, generator)
        elif fill.kind == "normal":
            _normal(tensor, fill.std, generator)
        elif fill.kind == "integers":
            tensor.random_(fill.low, fill.high, generator=generator)
        elif fill.kind == "constant":
            tensor.fill_(fill.value)
        elif fill.kind == "range":
            last = tensor.shape[-1] if tensor.dim() else 1
            row = fill.start + fill.step * torch.arange(last, device=device)
            tensor.copy_(row if tensor.dim() else row[0])
        elif fill.kind == "causal":
            tensor.fill_(1)
            tensor.tril_()
        else:
            values = torch.tensor(fill.values, device=device)
            tensor.copy_(values.reshape(tensor.shape))
    if entry.kind == "parameter":
        return nn.Parameter(tensor, requires_grad=meta_tensor(entry).requires_grad)
    return tensor


def _empty(entry: StateTensor, device: torch.device) -> Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if entry.strides is None:
        return torch.empty(entry.shape, dtype=dtype, device=device)
    return torch.empty_strided(entry.shape, entry.strides, dtype=dtype, device=device)


def _random_weight(tensor: Tensor, generator: torch.Generator) -> None:
    """Matrices keep the scale of what they are applied to; vectors scale by one half to three."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor.zero_()
    elif tensor.dim() >= 2:
        _normal(tensor, 1 / sqrt(max(1, prod(tensor.shape[1:]))), generator)
    else:
        tensor.fill_(1)
        tensor += 0.1 * torch.rand(tensor.shape, generator=generator, device=tensor.device)


def _normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    if tensor.element_size() == 1:  # eight-bit floats draw no random numbers
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=tensor.device) * std)
    else:
        tensor.normal_(0, std, generator=generator)


def tensor_places(
    roots: Iterable[nn.Module], *, plain: bool = True
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield every attribute that is a tensor; constants are ``plain`` attributes."""
    for module in chain.from_iterable(root.modules() for root in roots):
        tables = (module._parameters, module._buffers, vars(module) if plain else {})
        for name, tensor in [item for table in tables for item in table.items()]:
            if isinstance(tensor, Tensor):
                yield module, name, tensor


@contextmanager
def replace_tensors(
    roots: Iterable[nn.Module], value: Callable[[Tensor], Tensor], *, plain: bool = True
) -> Iterator[list[Tensor]]:
    """Put other tensors in the place of the modules' own for a while."""
    places = list(tensor_places(roots, plain=plain))
    try:
        made = [value(tensor) for _, _, tensor in places]
        for (module, name, _), tensor in zip(places, made, strict=True):
            setattr(module, name, tensor)
        yield made
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)


@contextmanager
def materialised(
    segment: Segment,
    state: Mapping[int, StateTensor],
    device: torch.device,
    generator: torch.Generator,
) -> Iterator[None]:
    """Give a segment memory and made-up values for a while; tied tensors stay tied."""
    value = cache(lambda meta: made_up(state[id(meta)], device, generator))
    constants = dict(get_constants(segment))
    with replace_tensors([segment], value, plain=False):
        try:
            segment.apply_to_constants(value)
            yield
        finally:
            # `apply_to_constants` visits them in the order `get_constants` lists them.
            restored = iter(constants.values())
            segment.apply_to_constants(lambda _: next(restored))
