"""A forward that would change its own parameters is stopped before it does."""

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
    """Looks at every operation before it runs.

    Raises:
        CaptureError: From inside the operation, if it would write to a parameter of the model.
    """

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
        f"forward changes its own parameter {name!r}; do that after the optimizer's step instead",
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
