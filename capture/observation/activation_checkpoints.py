"""Interception of ``torch.utils.checkpoint``, however the model imported it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

_OWN_OPTIONS = (
    "use_reentrant",
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
)

_INDIRECTION = "__dynamo_disable"
"""Attribute of the wrapped function under which ``checkpoint`` looks up what to call."""

# Replacing torch.utils.checkpoint.checkpoint itself would miss models that imported the function
# by name. torch._disable_dynamo's wrapper looks its target up at every call, so setting this one
# attribute redirects every reference to the function.


@contextmanager
def _replaced(replacement: Callable[..., Any]) -> Iterator[None]:
    written: Any = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
    before = getattr(written, _INDIRECTION, None)
    setattr(written, _INDIRECTION, replacement)
    try:
        yield
    finally:
        if before is None:
            delattr(written, _INDIRECTION)
        else:
            setattr(written, _INDIRECTION, before)


@contextmanager
def watch_checkpoints(seen: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Call ``seen(function, options)`` at every checkpoint, which then proceeds as usual."""
    written: Any = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]

    def watch(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen(function, {key: kwargs[key] for key in _OWN_OPTIONS if key in kwargs})
        return written(function, *args, **kwargs)

    with _replaced(watch):
        yield


@contextmanager
def disable_checkpoints() -> Iterator[None]:
    """Replace every checkpoint by a plain call."""

    def plain(function: Any, *args: Any, **kwargs: Any) -> Any:
        given = {key: value for key, value in kwargs.items() if key not in _OWN_OPTIONS}
        return function(*args, **given)

    with _replaced(plain):
        yield
