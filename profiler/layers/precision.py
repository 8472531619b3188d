"""The precision layers run in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch

from ...capture.observation.autocast_cache import convert_once
from ...core.errors import InvalidInput
from ...core.requests.requests import ProfilingOptions
from ..machine.memory import ON_CUDA

Context = Callable[[], AbstractContextManager[object]]


def forward_context(
    options: ProfilingOptions, device: torch.device, *, cached: bool = True
) -> Context:
    """Return the context of every forward: ``torch.autocast`` if asked for.

    Inside of `keep_conversions` weights are converted once if ``cached``, as stages do in a step;
    not where a model is captured, whose forwards with and without gradients would share what was
    converted.
    """
    if options.autocast is None:
        return nullcontext
    dtype: torch.dtype = getattr(torch, options.autocast)
    if cached:
        return partial(convert_once, device, dtype)
    return partial(torch.autocast, device.type, dtype, cache_enabled=False)


@contextmanager
def as_in_training(device: torch.device) -> Iterator[None]:
    """Turn gradients on and autocast off, and make the device current, whatever the caller set."""
    if torch.is_inference_mode_enabled():
        raise InvalidInput(
            "a model cannot be profiled in inference mode, which has no backward; call it outside "
            "of torch.inference_mode()"
        )
    with torch.enable_grad(), ExitStack() as settings:
        if torch.amp.is_autocast_available(device.type):
            settings.enter_context(torch.autocast(device.type, enabled=False))
        if device.type in ON_CUDA:
            if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
                reason = "with CUDA_LAUNCH_BLOCKING each kernel is waited for: times are wrong"
                raise InvalidInput(f"{reason}; unset it", field="/profiling/device")
            settings.enter_context(torch.cuda.device(device))
        yield
