"""The modes of a thread that decide what an operation does, to be had elsewhere or later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class Surroundings:
    """Modes torch keeps for every thread apart; a new thread starts with none of them.

    Attributes:
        grad: Whether autograd records.
        inference: Whether inference mode is on.
        autocast: For each device type whether autocast is on, and to what.
        autocast_cache: Whether autocast keeps the weights it converted.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this thread."""
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
    def entered(self) -> Iterator[None]:
        """Have them in this thread."""
        with ExitStack() as stack:
            if self.inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype, enabled, cache_enabled=self.autocast_cache)
                    )
            yield
