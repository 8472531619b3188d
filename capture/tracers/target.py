"""What is traced."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..observation.observe import ForwardObservation
from ..sample import CallStructure


@dataclass(frozen=True)
class TracingTarget:
    """A model, and what tracers know of it.

    Attributes:
        model: The model.
        structure: How it is called.
        flat: With what.
        seen: What an eager forward showed.
    """

    model: nn.Module
    structure: CallStructure
    flat: tuple[Tensor, ...]
    seen: ForwardObservation
