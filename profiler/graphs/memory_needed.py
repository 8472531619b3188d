"""Lower bound on the memory that measuring a graph takes, computed before any is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import fx

from ...capture.program.program import storage_key, tensors_of, value_of
from ...capture.program.segment import get_constants
from ..layers.layer_run import LayerRun, bytes_of


class HeldBytes:
    """Bytes of the distinct storages of the values held, from values without memory."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._holders: Counter[int] = Counter()

    def added_bytes(self, value: Any) -> int:
        """Return the bytes that holding one more value would add."""
        return sum(size for key, size in _storages(value).items() if not self._holders[key])

    def add(self, value: Any) -> None:
        self.size_bytes += self.added_bytes(value)
        self._holders.update(_storages(value).keys())

    def drop(self, value: Any) -> None:
        for key, size in _storages(value).items():
            self._holders[key] -= 1
            if not self._holders[key]:
                self.size_bytes -= size


def within_budget(
    nodes: Iterable[fx.Node], given: Iterable[fx.Node], wanted: set[fx.Node], budget_bytes: int
) -> list[fx.Node]:
    """Select, in order, the operations computable without holding more than the budget.

    Args:
        nodes: Their arguments are among them, or given.
        given: Values that are there from the start.
        wanted: Values that are to be kept; others are let go after their last use.
        budget_bytes: Of all values held at once, besides the given ones.
    """
    needed = _leading_to(list(nodes), wanted)
    last_use = {source: node for node in needed for source in node.all_input_nodes}
    kept = {*wanted, *given}
    held, there, found = HeldBytes(), set(given), []
    for node in there:
        held.add(value_of(node))
    # What is given is there in any case and takes nothing from the budget.
    budget_bytes += held.size_bytes
    for node in needed:
        value = value_of(node)
        fits = held.size_bytes + held.added_bytes(value) <= budget_bytes
        if fits and all(source in there for source in node.all_input_nodes):
            there.add(node)
            held.add(value)
            found.append(node)
        for source in set(node.all_input_nodes) & there:
            if last_use[source] is node and source not in kept:
                held.drop(value_of(source))
    # Again, since a value whose readers did not fit is of no use to anything.
    return _leading_to(found, wanted)


def _leading_to(nodes: list[fx.Node], wanted: set[fx.Node]) -> list[fx.Node]:
    """Select the nodes the wanted values depend on, in-place changes of those included."""
    needed = set(wanted)
    storages = {key for node in wanted for key in _storages(value_of(node))}
    found = []
    for node in reversed(nodes):
        # An in-place change may have no reader of its own; it counts if it writes to memory that
        # a needed value is in.
        if node in needed or not storages.isdisjoint(_storages(value_of(node))):
            found.append(node)
            needed.update(node.all_input_nodes)
            storages.update(k for n in node.all_input_nodes for k in _storages(value_of(n)))
    return found[::-1]


def least_bytes(run: LayerRun, held: Iterable[fx.Node] = ()) -> int:
    """Sum a layer's inputs, outputs, parameters, gradients, buffers and constants, and ``held``."""
    values = HeldBytes()
    for node in (*held, *run.reads, *run.writes):
        if node is not None:
            values.add(value_of(node))
    return values.size_bytes + run.parameter_bytes + bytes_of(run.parameters) + fixed_bytes(run)


def fixed_bytes(run: LayerRun) -> int:
    """Sum a layer's buffers and constants."""
    if run.segment is None:
        return 0
    return bytes_of([*run.segment.buffers(), *get_constants(run.segment).values()])


def _storages(value: Any) -> dict[int, int]:
    return {storage_key(t): t.untyped_storage().nbytes() for t in tensors_of(value)}
