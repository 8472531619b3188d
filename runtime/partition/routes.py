"""Which values each stage sends to which: from stage to stage, or past those that read nothing.

A value relayed goes over every cut between its maker and its last reader. A value sent straight
goes from each stage that has a use for it to the next one that does, so stages between never hold
it. It passes from reader to reader rather than from its maker to each: no rank sends a value
twice, and gradients are summed where relays would sum them.
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
    """What goes from one stage to a later one in one message, and its gradients back.

    Attributes:
        source: The stage that sends it.
        target: The stage that reads it, or hands it on.
        tensors: In the order in which both name them.
        positions: Of each tensor among what is live behind the source, and in front of the target.
    """

    source: int
    target: int
    tensors: tuple[TensorSpec, ...]
    positions: tuple[tuple[int, int], ...] = ()

    @property
    def skips(self) -> bool:
        """Whether there are stages between."""
        return self.target > self.source + 1


class TensorRoutes:
    """All hops of a model's stages.

    A stage takes its inputs hop by hop, those of the nearest stage first, and hands out its outputs
    likewise.
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
        """Those a stage receives from, the nearest first."""
        return self._into[stage]

    def out_of(self, stage: int) -> Sequence[TensorRoute]:
        """Those a stage sends to, the nearest first."""
        return self._out_of[stage]

    def received(self, stage: int) -> tuple[TensorSpec, ...]:
        """A later stage's inputs."""
        return tuple(spec for route in self.into(stage) for spec in route.tensors)

    def sent(self, stage: int) -> tuple[TensorSpec, ...]:
        """Outputs of a stage that is not the last."""
        return tuple(spec for route in self.out_of(stage) for spec in route.tensors)


def find_routes(
    captured: Captured, balance: Sequence[int], *, direct: bool = False
) -> TensorRoutes:
    """What stages of so many layers send each other.

    Args:
        captured: The model, to be cut where it is legal.
        balance: Layers of each stage.
        direct: Whether values pass by the stages that have no use for them.

    Raises:
        PlanMismatch: Evaluation has a graph of its own whose values take other ways.
    """
    found = list(_routes(captured, balance, direct))
    if direct and captured.evaluation is not None:
        others = _routes(captured.evaluation, balance, direct)
        ways = {(route.source, route.target, route.positions) for route in found}
        if ways != {(route.source, route.target, route.positions) for route in others}:
            raise PlanMismatch(
                "evaluation runs a graph of its own, in which other stages read what is sent "
                "straight; plan with skips='relay'"
            )
    return TensorRoutes(found, len(balance))


def check_planned(routes: TensorRoutes, planned: Sequence[DirectSend]) -> None:
    """The values that pass by stages are those a plan was priced with.

    Raises:
        PlanMismatch: Naming the stages.
    """
    found = {
        (route.source, route.target): len(route.tensors) for route in routes.all if route.skips
    }
    wanted = {(send.source, send.target): len(send.tensors) for send in planned}
    for source, target in sorted({*found, *wanted}):
        ours, theirs = (sends.get((source, target), 0) for sends in (found, wanted))
        if ours != theirs:
            raise PlanMismatch(
                f"this model sends {count(ours, 'tensor')} straight from stage {source} to stage "
                f"{target}, the plan was made for {theirs}; profile and plan this model again"
            )


def _routes(captured: Captured, balance: Sequence[int], direct: bool) -> Iterator[TensorRoute]:
    ends = list(accumulate(balance))
    live = [captured.cuts[end - 1] for end in ends[:-1]]
    used_in = _used_in(captured, balance) if direct else {}
    for target in range(1, len(balance)):
        nodes, specs = live[target - 1].nodes, live[target - 1].boundary.tensors
        by_source: dict[int, list[int]] = {}
        for position, node in enumerate(nodes):
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
    """The stages that make or read each value; what the model returns is read by the last one."""
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
