"""Guard that stops a forward before it changes the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.errors import CaptureError
from ..program.program import storage_key

_CHANGE_NO_VALUE = ("detach_", "requires_grad_", "set_")


class ParameterGuard(TorchDispatchMode):
    """Dispatch mode that raises `CaptureError` if an operation would write to a parameter."""

    # Parameters could not be restored afterwards without keeping a second copy of all weights,
    # which a large model has no memory for. So the write is prevented.

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {
            storage_key(parameter): name
            for name, parameter in reversed(list(model.named_parameters()))
        }

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        for tensor in _written(func, args, given):
            name = self._names.get(storage_key(tensor))
            if name is not None:
                raise changes_parameter(name)
        return func(*args, **given)


def changes_parameter(name: str) -> CaptureError:
    return CaptureError(
        f"forward changes its own parameter {name!r}; do so after the optimizer's step instead",
        operation=name,
    )


def _written(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    schema = func._schema  # type: ignore[attr-defined]
    if not schema.is_mutable or schema.name.rpartition("::")[2] in _CHANGE_NO_VALUE:
        return
    for position, declared in enumerate(schema.arguments):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(declared.name)
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor) and not isinstance(
                tensor, torch.nn.UninitializedParameter
            ):
                yield tensor
