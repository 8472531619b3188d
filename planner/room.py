"""Bytes of a stage for every place it may end at once."""

from __future__ import annotations

from ..core.plan import OPTIMIZER_BYTES_PER_ELEMENT
from .price import Pricer
from .stage_table import Bytes


class Room:
    """What `Pricer.memory` sums up for one stage after another, as rows of whole tables.

    Positions are indices of the tables. Rows are kept, so that a search may ask again.
    """

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._rows: dict[tuple[int, bool, int, int], Bytes] = {}

    def row(self, first: int, again: bool, depth: int, replicas: int) -> Bytes:
        """Bytes of a stage from ``first`` to each position; those up to ``first`` mean nothing."""
        key = (first, again, depth, replicas)
        if key not in self._rows:
            self._rows[key] = self._needed(*key)
        return self._rows[key]

    def _needed(self, first: int, again: bool, depth: int, replicas: int) -> Bytes:
        costs, options = self.pricer.costs, self.pricer.options
        saved = costs.saved_bytes[first]
        kept = costs.input_bytes[first] * depth + saved if again else saved * depth
        state = OPTIMIZER_BYTES_PER_ELEMENT[options.optimizer]
        share = -(-self.pricer.num_microbatches // replicas)
        row: Bytes = (
            costs.weights_bytes[first]
            + costs.gradients_bytes[first]
            + costs.learned_elements[first] * state
            + kept
            + costs.workspace_bytes[first]
            + share * (costs.arriving_bytes[first] + costs.returning_bytes)
        )
        return row
