"""Bytes of a stage for every place it may end at once."""

from __future__ import annotations

from functools import lru_cache

from ...core.plan.plan import OPTIMIZER_BYTES_PER_ELEMENT, PlanOptions
from .chain import Tables
from .stage_table import Bytes

MAX_KEPT = 64
"""Tables kept, and 64 times as many rows."""


class Room:
    """What `Pricer.memory` sums up for one stage after another, as rows and whole tables.

    Positions are indices of the tables. What was asked for last is kept.
    """

    def __init__(self, costs: Tables, options: PlanOptions, num_microbatches: int) -> None:
        self.costs, self.num_microbatches = costs, num_microbatches
        self.state_bytes = OPTIMIZER_BYTES_PER_ELEMENT[options.optimizer]
        self.row = lru_cache(maxsize=64 * MAX_KEPT)(self._row)
        self.table = lru_cache(maxsize=MAX_KEPT)(self._table)

    def _row(self, first: int, again: bool, depth: int, replicas: int) -> Bytes:
        """Bytes of a stage from ``first`` to each position; those up to ``first`` mean nothing."""
        row: Bytes = self._needed(slice(first, first + 1), again, depth, replicas)[0]
        return row

    def _table(self, again: bool, depth: int, replicas: int) -> Bytes:
        """The same from every position."""
        return self._needed(slice(None), again, depth, replicas)

    def _needed(self, firsts: slice, again: bool, depth: int, replicas: int) -> Bytes:
        costs = self.costs
        saved = costs.saved_bytes[firsts]
        inputs = costs.input_bytes[firsts, None]
        share = -(-self.num_microbatches // replicas)
        found: Bytes = (
            costs.weights_bytes[firsts]
            + costs.gradients_bytes[firsts]
            + costs.learned_elements[firsts] * self.state_bytes
            + (inputs * depth + saved if again else saved * depth)
            + costs.workspace_bytes[firsts]
            + share * (costs.arriving_bytes[firsts, None] + costs.returning_bytes)
        )
        return found
