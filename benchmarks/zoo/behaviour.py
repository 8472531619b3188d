"""Outputs, gradients and buffers of a model for one input, and the difference of two of these.

Written apart from the gate inside `stagewright.capture`, so that a mistake there is seen here.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

TOLERANCE = 1e-4
"""Relative, by norm. Single precision and another order of the same sums stay below 1e-5; a wrong
derivative, a frozen choice or a lost buffer is off by 1e-2 and more."""

FLOOR = 1e-5
"""Gradients smaller than this share of the largest one are rounding."""

Behaviour = dict[str, Any]
"""Values by what they are: ``output.logits``, ``gradient of head.weight``, ``buffer norm.mean``."""


def flatten(sample: Any) -> list[Tensor]:
    """Return the tensors of a sample, in order, from containers and data classes too."""
    return [value for _, value in leaves(sample) if isinstance(value, Tensor)]


def call(model: nn.Module, sample: Any, flat: list[Tensor]) -> Any:
    """Return the model on other tensors, passed as those of the sample are."""
    made = _with_tensors(sample, iter(flat))
    if isinstance(sample, Mapping):
        return model(**made)
    return model(*made) if isinstance(sample, tuple) else model(made)


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_with_tensors(item, tensors) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        made = {name: _with_tensors(getattr(value, name), tensors) for name in fields}
        return dataclasses.replace(value, **made)
    return value


def leaves(value: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    """Every value inside an output, with its path; data classes are opened too."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def seed_all(seed: int) -> None:
    """Python's random numbers, numpy's and torch's."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def observe(
    model: nn.Module,
    forward: Callable[[list[Tensor]], Any],
    flat: list[Tensor],
    *,
    seed: int,
    differentiate: bool = True,
    with_inputs: bool = False,
    hand_back: Callable[[], None] = lambda: None,
) -> Behaviour:
    """Run once, forwards and backwards, and write down what there is to see.

    Args:
        model: Whose gradients and buffers are looked at afterwards.
        forward: Takes the flat inputs, gives the model's own output.
        flat: The inputs; copied, the same tensor twice staying the same tensor twice.
        seed: Of the random numbers the model draws.
        differentiate: Whether to run backwards at all.
        with_inputs: Ask for gradients of floating inputs as well.
        hand_back: Called after the outputs' backward pass, to carry gradients over cuts.
    """
    for parameter in model.parameters():
        parameter.grad = None
    copies = {id(tensor): tensor.detach().clone() for tensor in flat}
    sources = [tensor for tensor in copies.values() if tensor.is_floating_point()]
    for tensor in sources:
        tensor.requires_grad_(with_inputs)
    given = {key: tensor.clone() for key, tensor in copies.items()}
    seed_all(seed)
    with torch.set_grad_enabled(differentiate):
        output = forward([given[id(tensor)] for tensor in flat])
    found: Behaviour = {"output's type": type(output).__name__}
    roots = []
    for path, value in leaves(output):
        found[path] = value.detach().clone() if isinstance(value, Tensor) else value
        if isinstance(value, Tensor) and value.requires_grad:
            roots.append(value)
    if differentiate and roots:
        torch.autograd.backward(roots, [_cotangent(root) for root in roots])
        hand_back()
    if differentiate:
        found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    for index, tensor in enumerate(sources if with_inputs else ()):
        found[f"gradient of input {index}"] = tensor.grad
    return found | {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}


def weights(model: nn.Module) -> Behaviour:
    """Return copies of parameters and buffers."""
    found = {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    return found | {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}


def _cotangent(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 + output.numel())
    values = torch.rand(output.shape, generator=generator, dtype=torch.float64) - 0.3
    return values.to(output.dtype)


def differences(found: Behaviour, expected: Behaviour) -> dict[str, float]:
    """Return each quantity's error relative to its norm; infinite if only one of the two has it.

    A gradient that is `None` counts as zero: an optimizer's step is the same.
    """
    norms = [
        float(_plain(value).norm())
        for what, value in expected.items()
        if what.startswith("gradient") and isinstance(value, Tensor)
    ]
    floor = FLOOR * max(norms, default=0.0)
    off = {}
    for what in expected | found:
        if what not in expected or what not in found:
            off[what] = float("inf")
        elif what.startswith("gradient"):
            off[what] = _gradient_difference(found[what], expected[what], floor)
        else:
            off[what] = relative_difference(found[what], expected[what])
    return off


def _gradient_difference(found: Tensor | None, expected: Tensor | None, floor: float) -> float:
    there = found if expected is None else expected
    if there is None:
        return 0.0
    zero = torch.zeros_like(there)
    return relative_difference(
        zero if found is None else found, zero if expected is None else expected, floor
    )


def relative_difference(found: Any, expected: Any, floor: float = 0.0) -> float:
    """Norm of the difference over the norm expected; NaN equals NaN, and infinity itself."""
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return 0.0 if type(found) is type(expected) and found == expected else float("inf")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    ours, theirs = _plain(found), _plain(expected)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(same.all()):
        return 0.0
    difference = float((ours - theirs)[~same].norm())
    norm = float(theirs[theirs.isfinite()].norm())
    relative = difference / max(norm, floor, 1e-30)
    return relative if relative == relative else float("inf")


def _plain(tensor: Tensor) -> Tensor:
    """Dense, real, in double precision; no more than another view of the same numbers."""
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()
