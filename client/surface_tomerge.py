"""Methods of a client out of functions that make steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any


def as_method(method: Callable[..., Any], steps: Callable[..., Any]) -> None:
    """Give a method the name, documentation and parameters of the function it is made of."""
    update_wrapper(method, steps)
    signature = inspect.signature(steps)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[own, *signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
