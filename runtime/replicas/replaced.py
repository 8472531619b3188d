"""Parameters of a model that others replaced when a pipeline was built on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.errors import InvalidInput

_replaced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Names of parameters that were replaced by shards."""


def replace_parameter(before: nn.Parameter, now: nn.Parameter, name: str) -> None:
    """Move what a script has put on a parameter to the one that replaces it.

    An optimizer that goes on updating the old one is refused at its step.
    """
    _watch_optimizers()
    _replaced[before] = name
    vars(now).update(vars(before))
    now._backward_hooks = before._backward_hooks


_watch_optimizers = cache(lambda: register_optimizer_step_pre_hook(_check_parameters))


def _check_parameters(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        if (name := _replaced.get(weight)) is not None:
            raise InvalidInput(
                f"the optimizer updates {name} as it was before the pipeline was built, which "
                "trains shards of it instead; make the optimizer afterwards, by "
                "training.optimizer(...) or pipeline.optimizer(...)"
            )


def release_others(roots: Iterable[nn.Module], own: nn.Module) -> None:
    """Move a model's parameters and buffers that are not in ``own`` to the meta device.

    Other ranks train them: whoever read the first values here would take them for trained ones.
    """
    kept = {id(each) for each in (*own.parameters(), *own.buffers())}
    made: dict[int, tuple[Tensor, Tensor]] = {}  # old ones stay, so that ids are not used again
    for module in (each for root in roots for each in root.modules()):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and not tensor.is_meta and id(tensor) not in kept:
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _on_meta(tensor)
                    table[key] = made[id(tensor)][1]  # type: ignore[assignment]


def _on_meta(tensor: Tensor) -> Tensor:
    found = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        found = nn.Parameter(found, requires_grad=tensor.requires_grad)
        vars(found).update(vars(tensor))
        tensor.data = tensor.data.new_empty(0)
    return found
