"""Calls between the processes of an RPC session that return errors as values.

``torch.distributed.rpc`` raises a remote error as its own type with a traceback for a message,
and prints it on the worker. Here the callee returns an error of this library that says where it
happened.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.futures import Future

from ...core.errors import ForeignError, InvalidInput, StagewrightError


class StageError(ForeignError):
    """Error of the model's code on a worker; the message names worker, stage and error."""


def worker_name() -> str:
    """Return the name of this process in its RPC session."""
    return str(rpc.get_worker_info().name)


def call_safely(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a worker; return its result or, if it raises, an error to send."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 (raised by the caller)
        return to_sendable(error)


def to_sendable(error: Exception, doing: str = "") -> StagewrightError:
    """Return an error of this process as one for the master; not this library's: a `StageError`."""
    return StageError.of(error).at(f"on {worker_name()}{doing and ', '}{doing}")


def send(
    to: str, function: Callable[..., Any], *args: Any, timeout_s: float | None = None
) -> Future[Any]:
    """Start a call on another process.

    Inside a ``dist_autograd`` context, autograd follows the tensors among the arguments.

    The limit is the session's timeout unless one is given.
    """
    # For torch, 0 means no limit, and only this sentinel means the session's timeout.
    seconds = rpc.constants.UNSET_RPC_TIMEOUT if timeout_s is None else timeout_s
    future: Future[Any] = rpc.rpc_async(to, function, args=args, timeout=seconds)
    return future


def call_method(owner: rpc.RRef[Any], method: str, *args: Any) -> Any:
    """Call a method of an object that this process holds, on behalf of another process."""
    return getattr(owner.local_value(), method)(*args)


def post(owner: rpc.RRef[Any], method: str, *args: Any) -> None:
    """Start a method of an object on the process that holds it; the method never raises."""
    send(owner.owner_name(), call_method, owner, method, *args)


def pickle_value(value: Any, what: str) -> bytes:
    """Pickle a value; raise `InvalidInput` that names it if that fails."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise InvalidInput(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, *anchored: Tensor) -> Tensor:
        ctx.others = len(anchored)  # type: ignore[attr-defined]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        # The edges alone matter: autograd visits the received tensors' nodes even without a
        # gradient, and their backward answers the sender, which waits for it.
        return gradients[0], *[None] * ctx.others  # type: ignore[attr-defined]


def anchor(value: Tensor, received: Iterable[Any]) -> Tensor:
    """Tie tensors received from other processes to a value, so that backward reaches them.

    Distributed autograd counts the messages it expects and waits for a gradient of every tensor
    that was received, even of one that the value does not depend on.
    """
    needed = [item for item in received if isinstance(item, Tensor) and item.requires_grad]
    if not needed or not torch.is_grad_enabled():
        return value
    anchored: Tensor = _Anchor.apply(value, *needed)  # type: ignore[no-untyped-call]
    return anchored


def anchor_one(values: Sequence[Any], received: Iterable[Any]) -> tuple[Any, ...]:
    """Anchor the first value that can have a gradient; one per message is enough."""
    anchored = list(values)
    for index, value in enumerate(anchored):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            anchored[index] = anchor(value, received)
            break
    return tuple(anchored)
