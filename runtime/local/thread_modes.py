"""Thread-local modes of torch, captured to be applied in another thread or later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class ThreadModes:
    """Modes that torch keeps per thread; a new thread starts with the defaults.

    Autocast is held for each device type: whether it is enabled, and its dtype.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def current(cls) -> ThreadModes:
        """Return the modes of this thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _DEVICE_TYPES
            ),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Apply the modes to this thread inside the block."""
        with ExitStack() as stack:
            # First: a change of inference mode sets the grad mode as well.
            if self.inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype, enabled, cache_enabled=self.autocast_cache)
                    )
            yield
