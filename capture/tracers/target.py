"""The input of every tracer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..observation.observe import ForwardObservation
from ..sample import CallStructure


@dataclass(frozen=True)
class TracingTarget:
    """A model with its sample and the observation of an eager forward.

    Attributes:
        model: The model.
        structure: Names of its inputs.
        flat: The sample's tensors, in flat order.
        seen: Observation of an eager forward.
    """

    model: nn.Module
    structure: CallStructure
    flat: tuple[Tensor, ...]
    seen: ForwardObservation
