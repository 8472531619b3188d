"""Tensor routes: the values that each stage sends to later ones, relayed or direct.

A relayed value crosses every cut between the stage that makes it and the last one that reads it. A
direct value goes from each stage that uses it to the next one that does, so that stages in between
never hold it. It travels from reader to reader rather than from its maker to each of them: no rank
sends it twice, and gradients are summed where relays would sum them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from ...capture.captured import Captured
from ...core.errors import PlanMismatch
from ...core.graph.tensors import TensorSpec
from ...core.plan.plan import DirectSend
from ...core.units import count


@dataclass(frozen=True, eq=False)  # looked up at every message: by identity
class TensorRoute:
    """The tensors that one stage sends to a later one in a message, and their gradients back.

    Attributes:
        source: The sending stage.
        target: The stage that reads them or passes them on.
        tensors: Their specs, in the order of both stages.
        positions: For each tensor, its position among the values live behind the source and among
            those live in front of the target.
    """

    source: int
    target: int
    tensors: tuple[TensorSpec, ...]
    positions: tuple[tuple[int, int], ...] = ()

    @property
    def skips(self) -> bool:
        """Return True if there are stages in between."""
        return self.target > self.source + 1


class TensorRoutes:
    """All routes between the stages of a model.

    The inputs of a stage are ordered by route, those from the nearest stage first, and so are its
    outputs.
    """

    def __init__(self, routes: Sequence[TensorRoute], num_stages: int) -> None:
        self.num_stages = num_stages
        self.all = tuple(sorted(routes, key=lambda route: (route.source, route.target)))
        self._into: list[list[TensorRoute]] = [[] for _ in range(num_stages)]
        self._out_of: list[list[TensorRoute]] = [[] for _ in range(num_stages)]
        for route in self.all:
            self._into[route.target].insert(0, route)
            self._out_of[route.source].append(route)

    def into(self, stage: int) -> Sequence[TensorRoute]:
        """Return the routes on which a stage receives, the nearest source first."""
        return self._into[stage]

    def out_of(self, stage: int) -> Sequence[TensorRoute]:
        """Return the routes on which a stage sends, the nearest target first."""
        return self._out_of[stage]

    def received(self, stage: int) -> tuple[TensorSpec, ...]:
        """Return the inputs of a stage that is not the first."""
        return tuple(spec for route in self.into(stage) for spec in route.tensors)

    def sent(self, stage: int) -> tuple[TensorSpec, ...]:
        """Return the outputs of a stage that is not the last."""
        return tuple(spec for route in self.out_of(stage) for spec in route.tensors)


def find_routes(
    captured: Captured, balance: Sequence[int], *, direct: bool = False
) -> TensorRoutes:
    """Return the routes between stages with the given numbers of layers.

    ``direct`` lets values skip the stages that do not use them. All cuts must be legal.

    Raises:
        PlanMismatch: The model's evaluation graph would need other routes than training.
    """
    found = list(_routes(captured, balance, direct))
    if direct and captured.evaluation is not None:
        others = _routes(captured.evaluation, balance, direct)
        # Both graphs run through the same stages and messages, so their routes must be equal.
        positions = {(route.source, route.target, route.positions) for route in found}
        if positions != {(route.source, route.target, route.positions) for route in others}:
            raise PlanMismatch(
                "this model's evaluation runs another graph, in which other stages read the values "
                "sent directly; plan with skips='relay'"
            )
    return TensorRoutes(found, len(balance))


def check_planned(routes: TensorRoutes, planned: Sequence[DirectSend]) -> None:
    """Check that the values that skip stages are those the plan was priced with."""
    found = {
        (route.source, route.target): len(route.tensors) for route in routes.all if route.skips
    }
    wanted = {(send.source, send.target): len(send.tensors) for send in planned}
    for source, target in sorted({*found, *wanted}):
        ours, theirs = (sends.get((source, target), 0) for sends in (found, wanted))
        if ours != theirs:
            raise PlanMismatch(
                f"this model sends {count(ours, 'tensor')} directly from stage {source} to stage "
                f"{target}, but the plan was made for {theirs}; profile and plan this model again"
            )


def _routes(captured: Captured, balance: Sequence[int], direct: bool) -> Iterator[TensorRoute]:
    """Yield the routes into each stage, by following its live values back to their last user."""
    ends = list(accumulate(balance))
    live = [captured.cuts[end - 1] for end in ends[:-1]]
    used_in = _used_in(captured, balance) if direct else {}
    for target in range(1, len(balance)):
        nodes, specs = live[target - 1].nodes, live[target - 1].boundary.tensors
        by_source: dict[int, list[int]] = {}
        for position, node in enumerate(nodes):
            # A relayed value counts as used by every stage, so its source is the stage before.
            users = used_in.get(node, range(len(balance)))
            if target in users:
                source = max(stage for stage in users if stage < target)
                by_source.setdefault(source, []).append(position)
        for source, positions in by_source.items():
            there = {node: position for position, node in enumerate(live[source].nodes)}
            yield TensorRoute(
                source,
                target,
                tuple(specs[position] for position in positions),
                tuple((there[nodes[position]], position) for position in positions),
            )


def _used_in(captured: Captured, balance: Sequence[int]) -> dict[fx.Node, set[int]]:
    """Return the stages that make or read each value; the last one reads the model's outputs."""
    stage_of = [stage for stage, layers in enumerate(balance) for _ in range(layers)]
    layer_of = captured.layers.layer_of
    found: dict[fx.Node, set[int]] = {}
    for node in captured.program.graph.nodes:
        made = stage_of[layer_of[node]] if node in layer_of else 0
        found[node] = {made}
        for user in node.users:
            if user.op == "output":
                found[node].add(len(balance) - 1)
            elif user in layer_of:
                found[node].add(stage_of[layer_of[user]])
    return found
