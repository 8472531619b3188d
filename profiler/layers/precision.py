"""The precision layers run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ...core.errors import InvalidInput
from ...core.requests.requests import ProfilingOptions

Context = Callable[[], AbstractContextManager[object]]


def forward_context(
    options: ProfilingOptions, device: torch.device, *, cached: bool = True
) -> Context:
    """Return the context of every forward: ``torch.autocast`` if asked for.

    Made anew for each layer, so each converts its own weights, as every stage does. A weight used
    twice inside is converted once if ``cached``; not where a model is captured, whose forwards with
    and without gradients would share what was converted.
    """
    if options.autocast is None:
        return nullcontext
    dtype: torch.dtype = getattr(torch, options.autocast)

    @contextmanager
    def autocast() -> Iterator[None]:
        try:
            # torch empties its cache of converted weights only when the outermost autocast ends.
            with torch.autocast(device.type, dtype=dtype, cache_enabled=cached):
                yield
        finally:
            torch.clear_autocast_cache()

    return autocast


@contextmanager
def as_in_training(device: torch.device) -> Iterator[None]:
    """Turn gradients on and autocast off in the block, whatever the caller has set."""
    if torch.is_inference_mode_enabled():
        raise InvalidInput(
            "a model cannot be profiled in inference mode, which has no backward; call it outside "
            "of torch.inference_mode()"
        )
    off: AbstractContextManager[object] = nullcontext()
    if torch.amp.is_autocast_available(device.type):
        off = torch.autocast(device.type, enabled=False)
    with torch.enable_grad(), off:
        yield
