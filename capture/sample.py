"""Call structure of a model: its tensor inputs by name, flat and in order."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.errors import InvalidInput
from ..core.graph.tensors import DType, TensorSpec
from ..core.units import count, name_type
from .call_form import collect_tensors, describe_argument, rebuild_argument

ACCEPTED = "one argument, a tuple of arguments (positional), or a dict of them (keywords)"


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
    """Names of the tensors a model is called with, and the arguments they are part of.

    Attributes:
        positional: Names of the tensors given by position.
        keyword: Names of the tensors given by keyword.
        recipe: The `CaptureRecipe` as JSON; empty before the model is captured.
        arguments: Name and form (`call_form`) of every argument, positional ones first; empty if
            every argument is a tensor.
        by_position: Number of arguments given by position, where ``arguments`` are listed.
    """

    positional: tuple[str, ...]
    keyword: tuple[str, ...]
    recipe: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    by_position: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names in flat order: positional ones first."""
        return self.positional + self.keyword

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Return the names of the arguments, each a tensor or a nest of tensors and constants."""
        return tuple(name for name, _ in self.arguments) or self.names

    def to_json(self) -> str:
        data: dict[str, Any] = {"positional": self.positional, "keyword": self.keyword}
        if self.arguments:
            data |= {"arguments": self.arguments, "by_position": self.by_position}
        return json.dumps(data | ({"recipe": self.recipe} if self.recipe else {}))

    @classmethod
    def from_json(cls, text: str) -> CallStructure:
        data = json.loads(text)
        return cls(
            tuple(data["positional"]),
            tuple(data["keyword"]),
            data.get("recipe", ""),
            tuple((name, form) for name, form in data.get("arguments", ())),
            data.get("by_position", 0),
        )

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors of a call in flat order; arguments by position or by keyword.

        Raises:
            InvalidInput: An input is missing, unknown, or not of the captured form.
        """
        names = self.argument_names
        given = dict(zip(names, args, strict=False))
        if len(args) > len(names) or set(given) & set(kwargs):
            raise InvalidInput(
                f"expected the inputs {', '.join(names)}, once each; got {len(args)} by "
                f"position and {', '.join(kwargs) or 'none'} by keyword"
            )
        given.update(kwargs)
        unknown = sorted(set(given) - set(names))
        forms = dict(self.arguments)
        # An argument that was None at capture may be left out: that is what it is by default.
        missing = [
            name for name in names if name not in given and forms.get(name, name) is not None
        ]
        if unknown or missing:
            raise InvalidInput(
                f"expected the inputs {', '.join(names)}; "
                f"missing {missing or 'none'}, unknown {unknown or 'none'}"
            )
        found: dict[int, Tensor] = {}
        for index, name in enumerate(names):
            form = forms[name] if forms else {"tensor": index}
            collect_tensors(form, given.get(name), name, found)
        return tuple(found[index] for index in range(len(self.names)))

    def as_sample(self, flat: Iterable[Tensor]) -> Any:
        """Return the call as a sample: a tuple, or a dict if keywords are used."""
        values = tuple(flat)
        if not self.arguments:
            return dict(zip(self.names, values, strict=True)) if self.keyword else values
        args, kwargs = self.unflatten(values)
        return kwargs or args

    def unflatten(self, flat: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of ``forward``."""
        values = list(flat)
        if not self.arguments:
            split = len(self.positional)
            return tuple(values[:split]), dict(zip(self.keyword, values[split:], strict=True))
        made = [(name, rebuild_argument(form, values)) for name, form in self.arguments]
        split = self.by_position
        return tuple(value for _, value in made[:split]), dict(made[split:])

    def split_call(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a batch: one argument, a tuple, or a dict of keywords."""
        alone = self.arguments[0][1] if len(self.arguments) == 1 else None
        if isinstance(batch, Mapping) and not (alone and set(batch) != {self.arguments[0][0]}):
            return (), dict(batch)
        if type(batch) is tuple or (type(batch) is list and not alone):
            # A tuple of several for a model of one argument is that argument, as in a sample.
            return ((batch,) if alone and len(batch) > 1 else tuple(batch)), {}
        return (batch,), {}


def check_module(model: object) -> None:
    """Raise `InvalidInput`, with what it is and the remedy, unless a model is an ``nn.Module``."""
    if isinstance(model, nn.Module):
        if isinstance(model, torch.jit.ScriptModule):
            raise InvalidInput(
                f"{model.original_name} is a ScriptModule, of which only whole calls can be "
                "captured; give the module that it was made from, or put it into an nn.Module"
            )
        _check_initialised(model)
        _check_no_update_in_backward(model)
        return
    name = getattr(model, "__name__", "")
    if isinstance(model, type):
        raise InvalidInput(f"{name} is a class, not a module; create an instance: {name}(...)")
    if callable(model):
        raise InvalidInput(
            f"{name or type(model).__name__} is a function, not an nn.Module; give the module that "
            "it returns or calls, or make it the forward method of one"
        )
    raise InvalidInput(f"a model must be an nn.Module, not {name_type(model)}")


def _check_no_update_in_backward(model: nn.Module) -> None:
    """Refuse hooks on accumulated gradients, other than those of our own pipelines."""
    ours = f"{__name__.partition('.')[0]}."
    for name, parameter in model.named_parameters():
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if not all(getattr(each, "__module__", "").startswith(ours) for each in hooks.values()):
            raise InvalidInput(
                f"{name} has a hook on its accumulated gradient, as for an optimizer that steps in "
                "backward, and a backward runs once for each micro-batch; remove the hook "
                "(register_post_accumulate_grad_hook) and step after the whole batch"
            )


def _check_initialised(model: nn.Module) -> None:
    lazy = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if is_lazy(tensor)
    ]
    if lazy:
        shown = f"{', '.join(lazy[:3])}{' ...' if len(lazy) > 3 else ''}"
        raise InvalidInput(
            f"{count(len(lazy), 'parameter')} of {type(model).__name__} ({shown}) have no shape "
            "yet: its lazy modules get theirs from the first batch; call the model on a sample "
            "before you profile it or build a pipeline of it, on every rank with the same seed"
        )


def read_sample(model: nn.Module, sample: Any) -> tuple[CallStructure, tuple[Tensor, ...]]:
    """Name the tensors of a sample after the parameters of the model's ``forward``.

    Raises:
        InvalidInput: The model is not a module, the sample has no accepted form, or ``forward``
            does not accept it.
    """
    check_module(model)
    args, kwargs = _split_sample(model, sample)
    names = [*_positional_names(model, args), *kwargs]
    given: dict[str, Tensor] = {}
    forms: list[tuple[str, Any]] = []
    by_position = 0
    for name, value in zip(names, (*args, *kwargs.values()), strict=True):
        taken = set() if isinstance(value, Tensor) else set(names)
        forms.append((name, describe_argument(value, name, given, taken)))
        by_position = len(given) if len(forms) == len(args) else by_position
    if not given:
        raise InvalidInput(f"a sample is {ACCEPTED}; this one contains no tensor")
    for name, tensor in given.items():
        if tensor.is_meta and {each.is_meta for each in model.parameters()} == {False}:
            raise InvalidInput(f"{name!r} of the sample is on the device meta; create it on cpu")
        if tensor.dim() == 0:
            raise InvalidInput(
                "a 0-dimensional input cannot be split into micro-batches; give a tensor with a "
                "batch dimension, or a number"
            )
    tensors = tuple(given)
    structure = CallStructure(tensors[:by_position], tensors[by_position:])
    if not all(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        structure = replace(structure, arguments=tuple(forms), by_position=len(args))
    # A tensor passed twice is cloned: tracers would merge the two inputs into one.
    seen: set[int] = set()
    flat = []
    for tensor in given.values():
        flat.append(tensor.clone() if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return structure, tuple(flat)


def _split_sample(model: nn.Module, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a sample.

    A dict or list is taken for a single argument if ``forward`` takes it as such only.
    """
    kwargs = dict(sample) if isinstance(sample, Mapping) else {}
    args = tuple(sample) if type(sample) in (tuple, list) else () if kwargs else (sample,)
    accepts = inspect.signature(model.forward).bind
    try:
        accepts(*args, **kwargs)
    except TypeError as error:
        with suppress(TypeError):
            accepts(sample)
            return (sample,), {}
        raise InvalidInput(
            f"{type(model).__name__}.forward does not take this sample: {error}"
        ) from None
    return args, kwargs


def get_integer_ranges(flat: Iterable[Tensor]) -> tuple[tuple[int, int] | None, ...]:
    """Return the least and largest value of each integer or boolean tensor; else `None`."""
    return tuple(
        None
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or not tensor.numel()
        else (int(tensor.min()), int(tensor.max()))
        for tensor in flat
    )


def _positional_names(model: nn.Module, args: Sequence[Any]) -> tuple[str, ...]:
    signature = inspect.signature(model.forward)
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
