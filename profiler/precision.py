"""The precision layers run in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..core.options import ProfilingOptions

Context = Callable[[], AbstractContextManager[object]]


def forward_context(options: ProfilingOptions, device: torch.device) -> Context:
    """What every forward runs in: ``torch.autocast`` if asked for. A backward follows its forward.

    Made anew for each layer, so each converts its own weights, as every stage does.
    """
    if options.autocast is None:
        return nullcontext
    dtype: torch.dtype = getattr(torch, options.autocast)
    return lambda: torch.autocast(device.type, dtype=dtype)
