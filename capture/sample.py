"""Call structure of a model: its tensor inputs by name, flat and in order."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.errors import InvalidInput
from ..core.graph.tensors import DType, TensorSpec

ACCEPTED = "a tensor, a tuple of tensors (positional), or a dict of tensors (keywords)"


def dtype_name(dtype: torch.dtype) -> DType:
    """Return the name of a dtype: ``"float32"`` for ``torch.float32``."""
    return cast(DType, str(dtype).removeprefix("torch."))


def tensor_spec(name: str, tensor: Tensor, *, requires_grad: bool = False) -> TensorSpec:
    """Describe the shape and dtype of a tensor (real, fake or meta)."""
    return TensorSpec(
        name=name,
        shape=tuple(int(size) for size in tensor.shape),
        dtype=dtype_name(tensor.dtype),
        requires_grad=requires_grad,
    )


@dataclass(frozen=True)
class CallStructure:
    """Names of the positional and keyword inputs a model is called with.

    ``recipe`` is the `CaptureRecipe` as JSON; empty before the model is captured.
    """

    positional: tuple[str, ...]
    keyword: tuple[str, ...]
    recipe: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names in flat order: positional ones first."""
        return self.positional + self.keyword

    def to_json(self) -> str:
        data: dict[str, Any] = {"positional": self.positional, "keyword": self.keyword}
        return json.dumps(data | ({"recipe": self.recipe} if self.recipe else {}))

    @classmethod
    def from_json(cls, text: str) -> CallStructure:
        data = json.loads(text)
        return cls(tuple(data["positional"]), tuple(data["keyword"]), data.get("recipe", ""))

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors of a call in flat order, given by position or by keyword.

        Raises:
            InvalidInput: An input is missing, unknown or not a tensor.
        """
        given = dict(zip(self.names, args, strict=False))
        if len(args) > len(self.names) or set(given) & set(kwargs):
            raise InvalidInput(
                f"expected the inputs {', '.join(self.names)}, once each; got {len(args)} by "
                f"position and {', '.join(kwargs) or 'none'} by keyword"
            )
        given.update(kwargs)
        unknown = sorted(set(given) - set(self.names))
        missing = [name for name in self.names if name not in given]
        if unknown or missing:
            raise InvalidInput(
                f"expected the inputs {', '.join(self.names)}; "
                f"missing {missing or 'none'}, unknown {unknown or 'none'}"
            )
        for name, value in given.items():
            if not isinstance(value, Tensor):
                raise InvalidInput(f"input {name!r} is a {type(value).__name__}, not a tensor")
        return tuple(given[name] for name in self.names)

    def as_sample(self, flat: Iterable[Tensor]) -> Any:
        """Return the call as a sample: a tuple, or a dict if keywords are used."""
        values = tuple(flat)
        return dict(zip(self.names, values, strict=True)) if self.keyword else values

    def unflatten(self, flat: Iterable[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the positional and keyword arguments of ``forward``."""
        values = list(flat)
        split = len(self.positional)
        return tuple(values[:split]), dict(zip(self.keyword, values[split:], strict=True))


def check_module(model: object) -> None:
    """Raise `InvalidInput`, with what it is and the remedy, unless a model is an ``nn.Module``."""
    if isinstance(model, nn.Module):
        return
    name = getattr(model, "__name__", "")
    if isinstance(model, type):
        raise InvalidInput(f"{name} is a class, not a module; create an instance: {name}(...)")
    if callable(model):
        raise InvalidInput(
            f"{name or type(model).__name__} is a function, not an nn.Module; give the module that "
            "it returns or calls, or make it the forward method of one"
        )
    raise InvalidInput(f"a model must be an nn.Module, not a {type(model).__name__}")


def read_sample(model: nn.Module, sample: Any) -> tuple[CallStructure, tuple[Tensor, ...]]:
    """Name the tensors of a sample after the parameters of the model's ``forward``.

    Raises:
        InvalidInput: The model is not a module, the sample has no accepted form, or ``forward``
            does not accept it.
    """
    check_module(model)
    kwargs = dict(sample) if isinstance(sample, Mapping) else {}
    positional = () if isinstance(sample, Mapping) else sample
    args = tuple(positional) if isinstance(positional, tuple | list) else (positional,)
    given = (*args, *kwargs.values())
    for value in given:
        if not isinstance(value, Tensor):
            raise InvalidInput(f"a sample is {ACCEPTED}; it contains a {type(value).__name__}")
    if not given:
        raise InvalidInput(f"a sample is {ACCEPTED}; this one is empty")
    for tensor in given:
        if tensor.dim() == 0:
            raise InvalidInput(
                "a 0-dimensional input cannot be split into micro-batches; give a tensor with a "
                "batch dimension"
            )
    structure = CallStructure(_positional_names(model, args, kwargs), tuple(kwargs))
    # A tensor passed twice is cloned: tracers would merge the two inputs into one.
    seen: set[int] = set()
    flat = []
    for tensor in given:
        flat.append(tensor.clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return structure, tuple(flat)


def get_integer_ranges(flat: Iterable[Tensor]) -> tuple[tuple[int, int] | None, ...]:
    """Return the least and largest value of each integer or boolean tensor; else `None`."""
    return tuple(
        None
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or not tensor.numel()
        else (int(tensor.min()), int(tensor.max()))
        for tensor in flat
    )


def _positional_names(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidInput(
            f"{type(model).__name__}.forward does not take this sample: {error}"
        ) from None
    names: list[str] = []
    for name, parameter in signature.parameters.items():
        if len(names) == len(args):
            break
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{index}" for index in range(len(args) - len(names))]
        else:
            names.append(name)
    return tuple(names)


def synthetic_inputs(
    inputs: Iterable[TensorSpec], device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """Create zero tensors of the given shapes, with which a model can be captured again."""
    return tuple(
        torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in inputs
    )
