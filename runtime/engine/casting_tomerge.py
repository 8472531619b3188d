"""Mixed precision: stages run under autocast to a dtype, or as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def casting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to a dtype, if there is one."""
    if dtype is None:
        return nullcontext()
    # Weights are cast anew in every action: a cache would outlive the step that fills it.
    return torch.autocast(device.type, dtype, cache_enabled=False)
