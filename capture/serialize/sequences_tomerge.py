"""A nested ``nn.Sequential`` called whole, as the calls of its leaves that it makes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..observation.hooks_tomerge import HOOKS
from .leaf_modules import construct, leaf_module
from .literals import NotData


def is_plain_sequence(module: nn.Module) -> bool:
    """Whether it only calls its children in turn."""
    hooked = any(getattr(module, hooks, None) for hooks in HOOKS)
    return (
        type(module) is nn.Sequential
        and bool(len(module))
        and not hooked
        and "forward" not in vars(module)
    )


def leaves_of(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules it calls in the end, in order, with their names."""
    if is_plain_sequence(module):
        for own, child in module._modules.items():
            assert child is not None, "a Sequential calls every child"
            yield from leaves_of(f"{name}.{own}", child)
    else:
        yield name, module


def output_of(name: str, module: nn.Module, given: Tensor) -> Tensor:
    """What a listed leaf makes of a tensor, without memory; the leaf itself is not run.

    Raises:
        NotData: It is not a listed leaf.
    """
    dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
    again = construct(leaf_module(name, module), dtypes[0] if dtypes else None)
    try:
        with torch.no_grad():
            made = again(given)
    except Exception as error:
        raise NotData(f"a {type(module).__name__} that does not run without memory") from error
    if not isinstance(made, Tensor):
        raise NotData(f"a {type(module).__name__} that returns more than one tensor")
    return made
