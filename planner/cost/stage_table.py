"""The stage table: costs of every candidate stage, for chains and branched graphs alike.

For a chain of layers a position is a place between two layers; for a graph of branches it is the
set of layers in front of a cut. Ids of positions ascend along every stage, from 0 (nothing is in
front) to N (everything is).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...core.graph.graph import Parameter
from ...core.profile.profile import Profile

Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]
Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]

Order = tuple[int, ...]
"""The profile's layer at each place; empty for the profile's own order."""


@dataclass(frozen=True, eq=False)
class StageTable(ABC):
    """Costs of E stages between N + 1 positions, on the device profiled; nothing of options.

    Attributes:
        num_atoms: N.
        most_stages: No plan has more.
        first: Position each stage begins at, shape (E,), ascending.
        last: Position it ends at, ascending among stages with one first position.
        forward_s: Forward time per micro-batch, the loss included where the stage is last.
        backward_s: Backward time per micro-batch, with the loss where the stage is last.
        recompute_s: Forward time without the loss.
        weights_bytes: Parameters and buffers used, each storage once.
        gradients_bytes: One gradient per trainable parameter, in its dtype.
        learned_elements: Elements of the trainable parameters.
        saved_bytes: Activations kept for backward per micro-batch.
        workspace_bytes: Largest temporary memory of any layer.
        arriving_bytes: Per position, activations that cross a cut there, shape (N + 1,).
        returning_bytes: Per position, gradients that cross it back.
        input_bytes: Per position, what a stage that begins there reads: ``arriving_bytes``, at
            the front the model's inputs.
        front_forward_s: Per position, forward time of all layers in front.
        front_backward_s: Per position, their backward time.
        tied: Trainable parameters used by several layers.
    """

    profile: Profile
    num_atoms: int
    most_stages: int
    first: Positions
    last: Positions
    forward_s: Seconds
    backward_s: Seconds
    recompute_s: Seconds
    weights_bytes: Bytes
    gradients_bytes: Bytes
    learned_elements: Bytes
    saved_bytes: Bytes
    workspace_bytes: Bytes
    arriving_bytes: Bytes
    returning_bytes: Bytes
    input_bytes: Bytes
    front_forward_s: Seconds
    front_backward_s: Seconds
    tied: tuple[Parameter, ...]

    @abstractmethod
    def holds(self, layer: int) -> Mask:
        """Return a mask of the stages that hold a layer of the profile, shape (E,)."""

    @abstractmethod
    def layout(self, positions: Sequence[int]) -> tuple[Order, tuple[int, ...]]:
        """Return the layer order, and the cuts in it, of the stages between these positions."""

    @property
    @abstractmethod
    def keeps_order(self) -> bool:
        """Return True if stages follow the profile's order of layers."""

    @cached_property
    def whole_s(self) -> tuple[float, float]:
        """Return the forward and backward time of the whole model, the loss included."""
        whole = int(np.searchsorted(self.first, 0, side="right")) - 1
        return float(self.forward_s[whole]), float(self.backward_s[whole])
