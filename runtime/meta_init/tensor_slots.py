"""A model's parameters and buffers with all slots that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class TensorSlot:
    """An entry of a module that holds a tensor.

    The module ``owner`` at ``path`` holds it in ``table``, which is ``_parameters`` or
    ``_buffers``, under ``key``.
    """

    owner: nn.Module
    path: str
    table: str
    key: str

    @property
    def name(self) -> str:
        """Return the tensor's name in the model."""
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def is_persistent(self) -> bool:
        """Return True if the model's ``state_dict`` contains it."""
        return self.key not in self.owner._non_persistent_buffers_set

    def get(self) -> Tensor:
        found: Tensor = getattr(self.owner, self.table)[self.key]
        return found

    def put(self, tensor: Tensor) -> None:
        getattr(self.owner, self.table)[self.key] = tensor


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """One parameter or buffer of a model, with several slots if tied or in a module used twice."""

    tensor: Tensor
    slots: tuple[TensorSlot, ...]

    @property
    def name(self) -> str:
        """Return the first of its names."""
        return self.slots[0].name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.slots)

    @property
    def home(self) -> TensorSlot:
        """Return its first slot, where it is initialised, as in the unsplit model."""
        return self.slots[0]

    @property
    def is_persistent(self) -> bool:
        return any(slot.is_persistent for slot in self.slots)

    @property
    def kind(self) -> str:
        return "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"


def list_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return every parameter and buffer of a model once, in the order of its modules."""
    found: dict[int, list[TensorSlot]] = {}
    tensors: dict[int, Tensor] = {}
    for slot in _slots(model):
        tensor = slot.get()
        tensors[id(tensor)] = tensor
        found.setdefault(id(tensor), []).append(slot)
    return [ModelTensor(tensors[key], tuple(slots)) for key, slots in found.items()]


def _slots(model: nn.Module) -> Iterator[TensorSlot]:
    for path, module in model.named_modules(remove_duplicate=False):
        for table in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, table).items():
                if tensor is not None:
                    yield TensorSlot(module, path, table, key)


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return uninitialised memory on a device, of the same class and with the same attributes."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return made
    parameter = type(tensor)(made, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
