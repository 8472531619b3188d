"""A model's parameters and buffers with all places where it holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class TensorSlot:
    """Where a module holds a tensor.

    Attributes:
        owner: The module.
        path: Its path in the model.
        table: ``_parameters`` or ``_buffers``.
        key: Under which name.
    """

    owner: nn.Module
    path: str
    table: str
    key: str

    @property
    def name(self) -> str:
        """The tensor's name in the model."""
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def is_persistent(self) -> bool:
        """Whether a ``state_dict`` holds it."""
        return self.key not in self.owner._non_persistent_buffers_set

    def get(self) -> Tensor:
        found: Tensor = getattr(self.owner, self.table)[self.key]
        return found

    def put(self, tensor: Tensor) -> None:
        getattr(self.owner, self.table)[self.key] = tensor


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """One parameter or buffer.

    Attributes:
        tensor: As the model holds it.
        places: All of them, first to last; several for a tied weight or a module used twice.
    """

    tensor: Tensor
    places: tuple[TensorSlot, ...]

    @property
    def name(self) -> str:
        """The first of its names, which it is known by."""
        return self.places[0].name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.places)

    @property
    def home(self) -> TensorSlot:
        """Where it is initialised: an unsplit model is built from there."""
        return self.places[0]

    @property
    def is_persistent(self) -> bool:
        return any(place.is_persistent for place in self.places)

    @property
    def kind(self) -> str:
        return "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"


def list_tensors(model: nn.Module) -> list[ModelTensor]:
    """Every parameter and buffer of a model, once, in the order of its modules."""
    found: dict[int, list[TensorSlot]] = {}
    tensors: dict[int, Tensor] = {}
    for place in _places(model):
        tensor = place.get()
        tensors[id(tensor)] = tensor
        found.setdefault(id(tensor), []).append(place)
    return [ModelTensor(tensors[key], tuple(places)) for key, places in found.items()]


def _places(model: nn.Module) -> Iterator[TensorSlot]:
    for path, module in model.named_modules(remove_duplicate=False):
        for table in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, table).items():
                if tensor is not None:
                    yield TensorSlot(module, path, table, key)


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory of the same kind."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = type(tensor)(made, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
