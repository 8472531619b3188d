"""Gradient hooks of weights, called once a step with the whole gradient.

Autograd would call them with shares of micro-batches, replicas and parts. A mask gives the same
either way, a clamp does not; so they are called once shares are summed, as for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ...core.errors import InvalidInput

Convert = Callable[[str, Tensor], Tensor]


class GradientHooks:
    """The gradient hooks of a rank's parameters.

    Args:
        parameters: The rank's parameters by name, in an order that is equal on all that share them.
        divided: Functions that join a gradient by name, and take this rank's part; for parts only.
        shared: Those of whose gradients other ranks have shares too.
        keeps: Put aside all gradients in a step, so that `restore` can bring them back.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        divided: tuple[Convert, Convert] | None = None,
        shared: Collection[Tensor] = (),
        *,
        keeps: bool = False,
    ) -> None:
        self._parameters, self._divided = parameters, divided
        self._shared, self._keeps = {id(each) for each in shared}, keeps
        self._hooks: dict[str, list[dict[int, Callable[[Tensor], Tensor | None]]]] = {}
        self._before: dict[str, Tensor | None] = {}
        self._collect()

    def _collect(self) -> None:
        """Take hooks off the parameters; their handles go on working."""
        for name, parameter in self._parameters.items():
            found: Any = parameter._backward_hooks
            if found:
                self._hooks.setdefault(name, []).append(found)
                parameter._backward_hooks = None

    def begin(self, *, sums: bool) -> None:
        """Put aside the gradients of earlier steps, which have been through the hooks."""
        self._collect()
        hooked = [name for name, tables in self._hooks.items() if any(tables)]
        for name in hooked:
            if not sums and id(self._parameters[name]) in self._shared:
                raise InvalidInput(
                    f"{name} has a gradient hook, and other ranks have shares of its gradient, "
                    "which are not summed in this step; remove the hook, or sum in every step "
                    "(accumulate=1)"
                )
        aside = self._parameters if self._keeps else hooked
        self._before = {name: self._parameters[name].grad for name in aside}
        for name in aside:
            self._parameters[name].grad = None

    def restore(self) -> None:
        """Bring back what was put aside, in a step that an error ends."""
        for name, before in self._before.items():
            self._parameters[name].grad = before

    @torch.no_grad()
    def finish(self) -> None:
        """Call the hooks, and add the gradients of earlier steps."""
        for name, before in self._before.items():
            parameter = self._parameters[name]
            if (gradient := parameter.grad) is None:
                parameter.grad = before
            elif name in self._hooks:
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                whole = self._divided[0](name, whole) if self._divided else whole
                for hook in (hook for table in self._hooks[name] for hook in [*table.values()]):
                    if (changed := hook(whole)) is not None:
                        whole = changed
                made = self._divided[1](name, whole) if self._divided else whole
                if isinstance(gradient, DTensor):
                    made = distribute_tensor(made, gradient.device_mesh, gradient.placements)
                parameter.grad = made if before is None else before + made
            elif before is not None:
                parameter.grad = before.add_(gradient)
        self._before = {}
