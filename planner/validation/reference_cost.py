"""Reference computation of one plan's numbers, by plain loops over docs/concepts/planner.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, combinations, pairwise

from ...core.cluster.cluster import Cluster, LinkLevel
from ...core.cluster.pair_links import PairLink
from ...core.errors import InvalidInput
from ...core.graph.graph import Boundary, Parameter
from ...core.plan.plan import DirectSend, MemoryUse, PlanOptions
from ...core.profile.profile import Profile
from ...schedules.action_order import ActionOrder, check_depths, make_order
from ...schedules.activation_memory import most_in_flight
from ..simulator.durations import skip_times
from ..simulator.simulate import StageTimes, step_time
from .reference_placement import (
    StagePlacement,
    all_reduce_s,
    level_between,
    pair_link,
    transfer_s,
)
from .reference_skips import PassingTensors, find_passing_tensors

# Not imported from `schedules.traits`: a wrong entry there must not go unnoticed here.
CLOSED_FORM_DEPTH = ("gpipe", "1f1b")
"""Schedules with a formula for the micro-batches in flight; those of others are simulated."""

STRATEGIES = ("zero1", "fully_shard")
"""Strategies under which replicas share an optimizer's state."""

SPLIT_BACKWARD = ("zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that pass input gradients on before computing weight gradients."""


@dataclass(frozen=True)
class ReferenceSplit:
    """Layers of a profile cut into stages, with the devices of each stage.

    Attributes:
        counts: Layers of each stage, at least one, adding up to the profile's.
        devices: Devices of each stage as indices in the cluster, first replica first.
        recompute: True for stages that are recomputed; empty if none is.
        held: Micro-batches in flight at each stage; empty for the schedule's own numbers.
        chunks: Stages per device.
        direct: True if tensors bypass stages that do not read them instead of being relayed.
    """

    counts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    profile: Profile
    cluster: Cluster
    options: PlanOptions
    recompute: tuple[bool, ...] = ()
    held: tuple[int, ...] = ()
    chunks: int = 1
    direct: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.counts)

    @property
    def only_forward(self) -> bool:
        return self.options.objective == "latency"

    def layers(self, stage: int) -> range:
        begin = sum(self.counts[:stage])
        return range(begin, begin + self.counts[stage])

    def boundaries(self) -> tuple[Boundary, ...]:
        return tuple(self.profile.boundaries[end - 1] for end in accumulate(self.counts[:-1]))

    def place(self, stage: int) -> StagePlacement:
        return StagePlacement(self.cluster, self.devices[stage])

    def replicas(self, stage: int) -> int:
        return len(self.devices[stage])

    def recomputes(self, stage: int) -> bool:
        return bool(self.recompute) and self.recompute[stage]

    def microbatches(self, stage: int) -> int:
        """Return the number of micro-batches of the stage's first replica: ``n``."""
        if self.only_forward:
            return 1
        return math.ceil(self.options.num_microbatches / self.replicas(stage))

    def work_s(self, stage: int) -> tuple[float, float]:
        """Return forward and backward time on one replica: ``F`` and ``B``."""
        layers, speed = self.layers(stage), self.place(stage).speed
        forward_s, backward_s = work_s(self.profile, layers, speed, self.recomputes(stage))
        parts = self.backward_parts_s(stage)
        return forward_s, sum(parts) if parts else backward_s

    def backward_parts_s(self, stage: int) -> tuple[float, float] | None:
        """Return the backward for inputs and for weights; `None` if not split or not measured."""
        known = [entry for entry in self.profile.layers if entry.backward_input is not None]
        if self.only_forward or self.options.schedule not in SPLIT_BACKWARD or not known:
            return None
        layers, loss = self.layers(stage), self.profile.loss
        inputs_s = weights_s = 0.0
        for layer in layers:
            entry = self.profile.layers[layer]
            half_s = entry.backward.median_s / 2
            inputs_s += half_s if entry.backward_input is None else entry.backward_input.median_s
            weights_s += half_s if entry.backward_weight is None else entry.backward_weight.median_s
            inputs_s += entry.forward.median_s * self.recomputes(stage)
        if loss is not None and stage + 1 == self.num_stages:
            inputs_s += loss.backward.median_s
        speed = self.place(stage).speed
        return inputs_s / speed, weights_s / speed

    def send_forward(self, stage: int) -> tuple[int, float]:
        """Return bytes and time of the activations sent to the next stage."""
        if stage + 1 == self.num_stages:
            return 0, 0.0
        size = self.profile.boundaries[self.layers(stage)[-1]].forward_bytes
        size -= sum(past.forward_bytes for past in self.passing if past.crosses(stage))
        return self._sent(stage, stage + 1, size)

    def send_backward(self, stage: int) -> tuple[int, float]:
        """Return bytes and time of the gradients sent to the previous stage."""
        if stage == 0 or self.only_forward:
            return 0, 0.0
        size = self.profile.boundaries[self.layers(stage)[0] - 1].backward_bytes
        size -= sum(past.backward_bytes for past in self.passing if past.crosses(stage - 1))
        return self._sent(stage - 1, stage, size)

    @cached_property
    def passing(self) -> tuple[PassingTensors, ...]:
        return find_passing_tensors(self.profile, self.counts) if self.direct else ()

    def direct_sends(self) -> tuple[DirectSend, ...]:
        """Return the tensors that bypass stages as a plan lists them."""
        _, _, forward_channels, backward_channels = self.all_channels()
        found = []
        for index, past in enumerate(self.passing):
            forward = self._sent(past.source, past.target, past.forward_bytes)
            backward = self._sent(past.source, past.target, past.backward_bytes)
            if self.only_forward:
                backward = 0, 0.0
            found.append(
                DirectSend(
                    source=past.source,
                    target=past.target,
                    tensors=past.names,
                    forward_bytes=forward[0],
                    backward_bytes=backward[0],
                    forward_time_s=forward[1],
                    backward_time_s=backward[1],
                    forward_channel=forward_channels[index],
                    backward_channel=backward_channels[index],
                )
            )
        return tuple(found)

    def channels(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shared connection of each cut's activations and of each cut's gradients."""
        forward, backward, *_ = self.all_channels()
        return forward, backward

    def all_channels(self) -> tuple[tuple[int, ...], ...]:
        """Return the shared connections of cuts, then of bypassing tensors, both ways each.

        Numbered from 0 in order of appearance; -1 for a connection that nothing else uses.
        """
        numbers: dict[tuple[int, int], int] = {}
        neighbours = [(stage, stage + 1) for stage in range(self.num_stages - 1)]
        found = []
        for pairs in (neighbours, [(past.source, past.target) for past in self.passing]):
            for direction in (0, 1):
                found.append(tuple(self._exit(pair, direction, numbers) for pair in pairs))
        return tuple(found)

    def _exit(
        self, pair: tuple[int, int], direction: int, numbers: dict[tuple[int, int], int]
    ) -> int:
        if not self.cluster.levels:  # a single device, which sends nothing
            return -1
        level = self._level(*pair)
        group = self.place(pair[direction]).shared_exit(level)
        return -1 if group is None else numbers.setdefault((level, group), len(numbers))

    def _sent(self, stage: int, other: int, size: int) -> tuple[int, float]:
        # Stages on the same devices hand tensors over in memory.
        if self.devices[stage] == self.devices[other]:
            return 0, 0.0
        return size, transfer_s(self._link(stage, other), size)

    def whole_s(self, stage: int) -> float:
        """Return the time per micro-batch of a stage and the cut behind it: ``tau``."""
        back_s = self.send_backward(stage + 1)[1] if stage + 1 < self.num_stages else 0.0
        return sum(self.work_s(stage)) + self.send_forward(stage)[1] + back_s

    def sync_s(self, stage: int) -> float:
        """Return the time to all-reduce the stage's gradients over its replicas: ``A``."""
        if self.only_forward:
            return 0.0
        owned = weights_of(self.profile, self.options, self.layers(stage))
        rounds = self.microbatches(stage) if self.strategy(stage) == "fully_shard" else 0
        size = owned.summed_bytes(self.options, rounds, recompute=self.recomputes(stage))
        return self.place(stage).all_reduce_s(size)

    def exposed_sync_s(self, stage: int) -> float:
        """Return the part of the all-reduce that the preceding layers do not hide: ``E``."""
        return max(0.0, self.sync_s(stage) - self._in_front_s(stage)[1])

    def tied_sync_s(self) -> float:
        """Return the time to all-reduce tied weights, one ring after another: ``Z``."""
        if self.only_forward or not self.cluster.levels:
            return 0.0
        total_s = 0.0
        for parameter in filter(is_learned, parameters_of(self.profile)):
            owners = self._owners(parameter)
            if len(owners) > 1:
                gradient, _ = bytes_of_parameter(parameter, self.options)
                total_s += max(
                    all_reduce_s(link, gradient, len(owners)) for link in self._links_among(owners)
                )
        return total_s

    def depth(self, stage: int) -> int:
        """Return the micro-batches in flight on one replica under the schedule's own warm-up."""
        own = self.microbatches(stage)
        if self.options.schedule == "gpipe":
            return own
        if self.options.schedule not in CLOSED_FORM_DEPTH and not self.only_forward:
            return most_in_flight(self._order())[stage]
        # 1F1B: from the last stage to the front, one round more than what the next stage holds.
        ahead = held = 0
        for later in range(self.num_stages - 1, stage - 1, -1):
            held = 1 + math.ceil(ahead / self.replicas(later))
            ahead = held * self.replicas(later)
        return min(own, held)

    def in_flight(self, stage: int) -> int:
        return self.held[stage] if self.held else self.depth(stage)

    def strategy(self, stage: int) -> str:
        """Return the strategy of the stage's replicas: zero1 first, and only what saves memory."""
        if self.replicas(stage) == 1:
            return "single"
        shared = [name for name in STRATEGIES if name in self.options.strategies]
        allowed = ["replicate", *shared[:1]]
        return min(allowed, key=lambda name: self._memory_by(stage, name).total_bytes)

    def memory(self, stage: int) -> MemoryUse:
        return self._memory_by(stage, self.strategy(stage))

    def _memory_by(self, stage: int, strategy: str) -> MemoryUse:
        return memory(
            self.profile,
            self.options,
            self.layers(stage),
            replicas=self.replicas(stage),
            strategy=strategy,
            recompute=self.recomputes(stage),
            microbatches=self.microbatches(stage),
            held=self.in_flight(stage),
            past=(
                sum(past.forward_bytes for past in self.passing if past.goes_by(stage)),
                sum(past.backward_bytes for past in self.passing if past.goes_by(stage)),
            ),
        )

    def limit_bytes(self, stage: int) -> int | None:
        memory_bytes = self.cluster.devices[self.devices[stage][0]].memory_bytes
        if memory_bytes is None:
            return None
        allowed = int(memory_bytes * self.options.memory_fraction)
        return max(allowed - self.reserved_bytes(stage), 0)

    def reserved_bytes(self, stage: int) -> int:
        memory_bytes = self.cluster.devices[self.devices[stage][0]].memory_bytes
        kept = self.options.reserves
        if memory_bytes is None or kept is None:
            return 0
        fragments = math.ceil(kept.fragmentation * memory_bytes)
        return kept.context_bytes + kept.communication_bytes + fragments

    def step_model_s(self) -> float:
        """Return the closed form of GPipe's step, or 1F1B's for every other schedule."""
        stages = range(self.num_stages)
        repeats = [self.microbatches(stage) - 1 for stage in stages]
        total_s = sum(self.whole_s(stage) for stage in stages)
        if self.options.schedule == "gpipe":
            total_s += max(repeats[stage] * self.work_s(stage)[0] for stage in stages)
            total_s += max(repeats[stage] * self.work_s(stage)[1] for stage in stages)
        else:
            total_s += max(repeats[stage] * self.whole_s(stage) for stage in stages)
        return total_s + max(self.exposed_sync_s(stage) for stage in stages) + self.tied_sync_s()

    def objective(self) -> float:
        """Return the value that the options minimise; PipeDream's objective is not defined here.

        Tensors are relayed, except for schedules whose objective is the simulated step.
        """
        is_simulated = (
            self.options.objective == "step_time" and self.options.schedule not in CLOSED_FORM_DEPTH
        )
        if self.direct and not is_simulated:
            return replace(self, direct=False).objective()
        stages, name = range(self.num_stages), self.options.objective
        if name == "throughput":
            slowest_s = max(self.whole_s(stage) / self.replicas(stage) for stage in stages)
            syncs_s = max(self.sync_s(stage) for stage in stages)
            return slowest_s + syncs_s / self.options.num_microbatches
        if name == "latency":
            return sum(self.work_s(stage)[0] + self.send_forward(stage)[1] for stage in stages)
        if name == "memory":
            return max(self.memory(stage).total_bytes for stage in stages)
        if name == "devices":
            return len({device for stage in stages for device in self.devices[stage]})
        if name == "balance_time":
            return max(sum(self.work_s(stage)) for stage in stages)
        if name == "balance_size":
            return max(self._size_bytes(stage) for stage in stages)
        if is_simulated:
            return self.step_time_s()
        return self.step_model_s()

    def bound_s(self) -> float:
        """Return a lower bound on the simulated step of this split."""
        fastest = max(device.speed for device in self.cluster.devices)
        whole_s = work_s(self.profile, range(len(self.profile.layers)), fastest)
        if self.only_forward:
            return whole_s[0]
        splits = self.options.schedule in SPLIT_BACKWARD
        stages = range(self.num_stages)
        parts = [self.backward_parts_s(stage) for stage in stages]
        gradients_s = sum(part[0] for part in parts if part) if parts[0] else whole_s[1] / 2
        bounds = [whole_s[0] + gradients_s if splits else sum(whole_s)]
        for stage in range(self.num_stages):
            forward_s, backward_s = self._in_front_s(stage)
            if splits:
                backward_s = 0.0
            own_s = self.microbatches(stage) * sum(self.work_s(stage))
            bounds.append(forward_s + own_s + max(backward_s, self.sync_s(stage)))
        return max(bounds)

    def step_time_s(self) -> float:
        """Return the simulated step."""
        stages, options = range(self.num_stages), self.options
        forward_channel, backward_channel = self.channels()
        parts = [found for found in map(self.backward_parts_s, stages) if found]
        times = StageTimes(
            backward_input_s=[inputs_s for inputs_s, _ in parts],
            backward_weight_s=[weights_s for _, weights_s in parts],
            forward_s=[self.work_s(stage)[0] for stage in stages],
            backward_s=[self.work_s(stage)[1] for stage in stages],
            send_forward_s=[self.send_forward(stage)[1] for stage in stages[:-1]],
            send_backward_s=[self.send_backward(stage)[1] for stage in stages[1:]],
            sync_s=[self.sync_s(stage) for stage in stages],
            tied_sync_s=self.tied_sync_s(),
            forward_channel=forward_channel,
            backward_channel=backward_channel,
            skips=skip_times(self.direct_sends()),
        )
        return step_time(
            "forward_only" if self.only_forward else options.schedule,
            times,
            1 if self.only_forward else options.num_microbatches,
            [self.replicas(stage) for stage in stages],
            [self.in_flight(stage) for stage in stages]
            if options.schedule == "1f1b" and not self.only_forward
            else (),
            self.chunks,
        )[0]

    def either_way(self) -> tuple[float, ...]:
        """Return the simulated step with relays, and with direct sends if they are allowed."""
        ways = (False, True) if self.options.skips == "direct" else (False,)
        return tuple(replace(self, direct=direct).step_time_s() for direct in ways)

    def is_usable(self) -> bool:
        """Return True if the split breaks no rule of cuts, placement, options or memory."""
        return next(self.faults(), None) is None

    def faults(self) -> Iterator[str]:
        """Yield every rule that the split breaks, in words."""
        wrong = list(self.basic_faults())
        if wrong:
            yield from wrong
            return
        yield from self._count_faults()
        yield from self._cut_faults()
        yield from self._pin_faults()
        for stage in range(self.num_stages):
            yield from self._stage_faults(stage)

    def basic_faults(self) -> Iterator[str]:
        """Yield broken rules of placement and schedule, without which no number is defined."""
        yield from self._placement_faults()
        yield from self._schedule_faults()

    def _placement_faults(self) -> Iterator[str]:
        positions = self.num_stages // self.chunks
        places = [self.place(stage) for stage in range(positions)]
        alone = [
            f"stage {stage}: {fault}"
            for stage, place in enumerate(places)
            for fault in place.faults(is_last=not any(map(place.is_in_front_of, places)))
        ]
        if alone:
            yield from alone
            return
        for one, other in combinations(range(positions), 2):
            first, second = self.place(one), self.place(other)
            if first.is_like(second) and max(first.ranks()) >= min(second.ranks()):
                yield f"stage {other} does not follow stage {one} on devices of their kind"
        # Later chunks return to the devices of the first; every other lap of a V runs backwards.
        for stage in range(positions, self.num_stages):
            lap, position = divmod(stage, positions)
            folds = self.options.schedule in ("zbv", "dualpipev") and lap % 2 == 1
            expected = self.devices[positions - 1 - position if folds else position]
            if self.devices[stage] != expected:
                yield f"stage {stage} is not on the devices that its schedule assigns"

    def _schedule_faults(self) -> Iterator[str]:
        options, num_stages = self.options, self.num_stages
        if self.only_forward:
            return
        try:
            self._order()
            if options.schedule == "1f1b" and self.held:
                replicas = [self.replicas(stage) for stage in range(num_stages)]
                check_depths(options.num_microbatches, replicas, self.held)
        except InvalidInput as error:
            yield str(error)

    def _count_faults(self) -> Iterator[str]:
        options, num_stages = self.options, self.num_stages
        if options.num_stages not in (None, num_stages):
            yield f"it has {num_stages} stages, not num_stages={options.num_stages}"
        if options.max_stages is not None and num_stages > options.max_stages:
            yield f"it has {num_stages} stages, more than max_stages={options.max_stages}"
        most = 1 if self.only_forward else options.num_microbatches
        if options.max_replicas is not None:
            most = min(most, options.max_replicas)
        for stage in range(num_stages):
            if self.replicas(stage) > most:
                yield f"stage {stage} has {self.replicas(stage)} replicas, more than {most}"
        if options.regular != "no" and options.regular_within is None:
            counts = [self.replicas(stage) for stage in range(num_stages)]
            if min(counts) != max(counts):
                yield f"stages have {counts} replicas despite regular={options.regular!r}"
            blocks = [len(self._blocks(stage)) for stage in range(num_stages)]
            if options.regular == "equal_blocks" and min(blocks) != max(blocks):
                yield f"stages have {blocks} blocks despite regular='equal_blocks'"

    def _cut_faults(self) -> Iterator[str]:
        for index, boundary in enumerate(self.boundaries()):
            if not boundary.legal:
                yield f"the cut after stage {index} is illegal: {boundary.reason}"
        owner = self._stage_of_each_name()
        if self.options.cut_at == "blocks" or (
            self.options.regular == "equal_blocks" and self.options.regular_within is None
        ):
            for stage in range(self.num_stages - 1):
                cut = set(self._blocks(stage)) & set(self._blocks(stage + 1))
                if cut:
                    yield f"the cut after stage {stage} divides the block {min(cut)!r}"
                elif not self._blocks(stage) and not self._blocks(stage + 1):
                    yield f"the cut after stage {stage} is not at a block"
        for name in self.options.no_cut_after:
            layer = list(owner).index(name) if name in owner else None
            if layer is None:
                yield f"no_cut_after names layer {name!r}, which does not exist"
            elif any(self.layers(stage)[-1] == layer for stage in range(self.num_stages - 1)):
                yield f"a stage ends after {name!r}, which no_cut_after forbids"
        for one, other in self.options.together:
            if one not in owner or other not in owner:
                yield f"together names layers {one!r} and {other!r}, which do not both exist"
            elif owner[one] != owner[other]:
                yield f"{one!r} and {other!r} are in stages {owner[one]} and {owner[other]}"
        if self.options.tied == "together":
            for parameter in filter(is_learned, parameters_of(self.profile)):
                if len(self._owners(parameter)) > 1:
                    yield f"{parameter.names[0]!r} is in several stages despite tied='together'"

    def _blocks(self, stage: int) -> frozenset[str]:
        """Return the paths of the numbered modules that a stage has layers of."""
        found = set()
        for layer in self.layers(stage):
            parts = self.profile.layers[layer].layer.name.partition("@")[0].split(".")
            number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
            if number is not None:
                found.add(".".join(parts[: number + 1]))
        return frozenset(found)

    def _pin_faults(self) -> Iterator[str]:
        owner = self._stage_of_each_name()
        for pin in self.options.pins:
            if pin.layer not in owner:
                yield f"pins names layer {pin.layer!r}, which does not exist"
                continue
            stage = owner[pin.layer]
            if pin.stage not in (None, stage):
                yield f"{pin.layer!r} is in stage {stage}, pinned to stage {pin.stage}"
            kind = self.place(stage).kind
            if pin.kind not in (None, kind):
                yield f"{pin.layer!r} is on a {kind!r}, pinned to a {pin.kind!r}"

    def _stage_faults(self, stage: int) -> Iterator[str]:
        options, held, least = self.options, self.in_flight(stage), self.depth(stage)
        never = options.recompute == "never" or self.only_forward
        if never and self.recomputes(stage):
            yield f"stage {stage} is recomputed despite recompute='never'"
        if options.recompute == "always" and not self.only_forward and not self.recomputes(stage):
            yield f"stage {stage} is not recomputed despite recompute='always'"
        most = least
        is_last = stage + 1 == self.num_stages
        if options.schedule == "1f1b" and not self.only_forward and not is_last:
            most = min(self.microbatches(stage), least + options.max_extra_in_flight)
        if not least <= held <= most:
            yield f"stage {stage}: in_flight is {held}, outside {least} to {most}"
        # Stages that share a device share its memory.
        devices = set(self.devices[stage])
        needed = sum(
            self.memory(other).total_bytes
            for other in range(self.num_stages)
            if devices & set(self.devices[other])
        )
        limit = self.limit_bytes(stage)
        if limit is not None and needed > limit:
            yield f"stage {stage}: needs {needed} bytes, its device allows {limit}"

    def _order(self) -> ActionOrder:
        name, num_microbatches = self.options.schedule, self.options.num_microbatches
        replicas = [self.replicas(stage) for stage in range(self.num_stages)]
        return make_order(name, num_microbatches, replicas, chunks=self.chunks)

    def _stage_of_each_name(self) -> dict[str, int]:
        names = [entry.layer.name for entry in self.profile.layers]
        return {
            names[layer]: stage for stage in range(self.num_stages) for layer in self.layers(stage)
        }

    def _level(self, stage: int, other: int) -> int:
        # The last device of a stage is next to the first device of a later one.
        return level_between(self.cluster, self.devices[stage][-1], self.devices[other][0])

    def _link(self, stage: int, other: int) -> LinkLevel | PairLink:
        pair = self.devices[stage][-1], self.devices[other][0]
        return pair_link(self.cluster, *pair) or self.cluster.levels[self._level(stage, other)]

    def _links_among(self, stages: list[int]) -> list[LinkLevel | PairLink]:
        """Return the outermost level between any two stages, and the links of pairs of groups."""
        levels = [
            level_between(self.cluster, one, two)
            for first, second in combinations(stages, 2)
            for one in (self.devices[first][0], self.devices[first][-1])
            for two in (self.devices[second][0], self.devices[second][-1])
        ]
        pairs = [
            pair_link(self.cluster, one, two)
            for first, second in combinations(stages, 2)
            for one in self.devices[first]
            for two in self.devices[second]
        ]
        return [self.cluster.levels[max(levels)], *(link for link in pairs if link)]

    def _owners(self, parameter: Parameter) -> list[int]:
        return [
            stage
            for stage in range(self.num_stages)
            if not set(self.layers(stage)).isdisjoint(parameter.layers)
        ]

    def _in_front_s(self, stage: int) -> tuple[float, float]:
        # At the fastest speed, as this time is part of lower bounds.
        fastest = max(device.speed for device in self.cluster.devices)
        entries = self.profile.layers[: self.layers(stage)[0]]
        forward_s = math.fsum(entry.forward.median_s for entry in entries)
        backward_s = math.fsum(entry.backward.median_s for entry in entries)
        return forward_s / fastest, backward_s / fastest

    def _size_bytes(self, stage: int) -> int:
        layers = self.layers(stage)
        return self.memory(stage).weights_bytes + saved_bytes(self.profile, layers)


def work_s(
    profile: Profile, layers: range, speed: float, recompute: bool = False
) -> tuple[float, float]:
    """Return forward and backward time of a stage; the last stage includes the loss."""
    entries = [profile.layers[layer] for layer in layers]
    forward_s = math.fsum(entry.forward.median_s for entry in entries)
    backward_s = math.fsum(entry.backward.median_s for entry in entries)
    if recompute:
        backward_s += forward_s
    if profile.loss and layers[-1] + 1 == len(profile.layers):
        forward_s += profile.loss.forward.median_s
        backward_s += profile.loss.backward.median_s
    return forward_s / speed, backward_s / speed


@dataclass
class WeightSums:
    """Bytes of the weights that a stage uses, and elements of those that are trained.

    ``own`` are the elements of each trained weight that no other layer uses, ``copy_bytes`` those
    of an element's master copy. ``layers`` are the bytes of what a layer alone uses, of its
    gradients, and its trained elements.
    """

    weights: int = 0
    gradients: int = 0
    copies: int = 0
    elements: int = 0
    copy_bytes: int = 0
    own: list[int] = field(default_factory=list)
    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def add(self, parameter: Parameter, options: PlanOptions) -> None:
        self.weights += parameter.size_bytes
        learned = is_learned(parameter)
        gradient, copy = bytes_of_parameter(parameter, options) if learned else (0, 0)
        if parameter.kind == "parameter" and len(parameter.layers) == 1:
            before = self.layers.get(parameter.layers[0], (0, 0, 0))
            more = (parameter.size_bytes, gradient, parameter.numel * learned)
            self.layers[parameter.layers[0]] = (
                before[0] + more[0], before[1] + more[1], before[2] + more[2],
            )  # fmt: skip
        if not learned:
            return
        self.gradients += gradient
        self.copies += copy
        self.elements += parameter.numel
        if len(parameter.layers) == 1:
            self.own.append(parameter.numel)
            if options.precision not in ("bf16_autocast", "fp16_autocast"):
                self.copy_bytes = copy // max(1, parameter.numel) or self.copy_bytes

    def of_single_layers(self) -> tuple[int, int]:
        """Return the bytes of weights and gradients of those that a single layer uses."""
        layers = self.layers.values()
        return sum(layer[0] for layer in layers), sum(layer[1] for layer in layers)

    def summed_bytes(self, options: PlanOptions, rounds: int, *, recompute: bool) -> int:
        """Return the size of an all-reduce like all collectives of a step.

        Without ``rounds`` each replica has whole weights. Otherwise each gathers them, half of an
        all-reduce, for every pass over that many micro-batches, and gradients are scattered.
        """
        if not rounds:
            return self.gradients
        passes = 2 + recompute + (options.schedule in SPLIT_BACKWARD)
        weights, gradients = self.of_single_layers()
        return self.gradients - gradients + rounds * math.ceil((passes * weights + gradients) / 2)

    def shared(self, options: PlanOptions, strategy: str, replicas: int) -> list[int]:
        """Return what a replica holds more by its strategy.

        Of weights, gradients, copies and state, and beside them while it works.
        """
        if strategy not in STRATEGIES:
            return [0] * 5
        # Whole weights are dealt to replicas by zero1: at worst the largest comes on top.
        left_out = max(self.own, default=0) if strategy == "zero1" else 0
        elements = sum(self.own) - left_out
        weights, gradients = self.of_single_layers() if strategy == "fully_shard" else (0, 0)
        sizes = weights, gradients, self.copy_bytes * elements, state_bytes(elements, options)
        parts = parts_of_replica(sizes, replicas)
        more = [part - size for part, size in zip(parts, sizes, strict=True)]
        return [*more, self._gathered(options) if strategy == "fully_shard" else 0]

    def _gathered(self, options: PlanOptions) -> int:
        """Return the bytes of a layer's whole weights, its gradient and that as it is summed."""
        layer = max((each[0] for each in self.layers.values()), default=0)
        elements = max((each[2] for each in self.layers.values()), default=0)
        summed = layer + HELD_IN[options.precision or "fp32"][0] * elements
        if options.schedule in SPLIT_BACKWARD:  # all layers at once
            return sum(self.of_single_layers()) + summed
        return layer + 2 * summed


def weights_of(profile: Profile, options: PlanOptions, layers: range) -> WeightSums:
    """Return the sums of the weights that these layers use."""
    owned = WeightSums()
    for parameter in parameters_of(profile):
        if not set(layers).isdisjoint(parameter.layers):
            owned.add(parameter, options)
    return owned


def memory(
    profile: Profile,
    options: PlanOptions,
    layers: range,
    *,
    recompute: bool,
    microbatches: int,
    held: int,
    past: tuple[int, int] = (0, 0),
    replicas: int = 1,
    strategy: str = "replicate",
) -> MemoryUse:
    """Return the memory of a device that holds these layers, storage by storage.

    ``held`` micro-batches are in flight at once; ``past`` bytes, forward and backward, bypass the
    stage instead of being relayed. Replicas share the optimizer's state of weights that no other
    layer uses, by the strategy.
    """
    arriving = returning = 0
    if layers[0] > 0:
        arriving = profile.boundaries[layers[0] - 1].forward_bytes - past[0]
    if layers[-1] + 1 < len(profile.layers):
        returning = profile.boundaries[layers[-1]].backward_bytes - past[1]
    workspace = max(profile.layers[layer].workspace_bytes for layer in layers)
    owned = weights_of(profile, options, layers)
    if options.objective == "latency":
        return MemoryUse(
            weights_bytes=owned.weights, workspace_bytes=workspace, receive_buffers_bytes=arriving
        )
    kept = saved_bytes(profile, layers)
    if recompute:
        # The backward needs all activations of one micro-batch again, beside its workspace.
        workspace += kept
        kept = arriving
        if layers[0] == 0:
            kept = sum(tensor.size_bytes for tensor in profile.inputs)
    more = owned.shared(options, strategy, replicas)
    return MemoryUse(
        weights_bytes=owned.weights + more[0],
        gradients_bytes=owned.gradients + more[1],
        weight_copies_bytes=owned.copies + more[2],
        optimizer_bytes=state_bytes(owned.elements, options) + more[3],
        activations_bytes=kept * held,
        workspace_bytes=workspace + more[4],
        receive_buffers_bytes=(arriving + returning) * most_posted(microbatches),
    )


def parts_of_replica(sizes: tuple[int, ...], replicas: int) -> list[int]:
    """Return a replica's part of each size: one lies behind the other, cuts are rounded up."""
    ends = [math.ceil(Fraction(end, replicas)) for end in accumulate(sizes)]
    return [end - begin for begin, end in pairwise((0, *ends))]


HELD_IN: dict[str, tuple[int, int, int]] = {
    "fp32": (0, 0, 4),
    "bf16": (0, 0, 2),
    "bf16_mixed": (2, 4, 4),
    "bf16_mixed_bf16_gradients": (0, 4, 4),
    "fp16_mixed": (2, 4, 4),
    "bf16_autocast": (0, 2, 4),
    "fp16_autocast": (0, 2, 4),
}
"""By recipe, bytes of a gradient beyond its weight's, of a second copy and of each moment."""


def bytes_of_parameter(parameter: Parameter, options: PlanOptions) -> tuple[int, int]:
    """Return the bytes of a parameter's gradient and of its second copy."""
    wider, copy, _ = HELD_IN[options.precision or "fp32"]
    if options.optimizer == "none" and copy == 4:
        copy = 0  # a master copy is what an optimizer updates
    return parameter.size_bytes + wider * parameter.numel, copy * parameter.numel


def state_bytes(elements: int, options: PlanOptions) -> int:
    """Return the bytes of the optimizer's state of so many elements."""
    moment = HELD_IN[options.precision or "fp32"][2]
    if options.optimizer == "adamw_8bit":
        # Two codes of a byte an element, two scales of four bytes for every 256 elements.
        return 2 * elements + elements * 8 // 256
    averages = {"none": 0, "sgd": 0, "adafactor": 0, "momentum": 1, "muon": 1, "adam": 2}
    return averages[options.optimizer] * moment * elements


def most_posted(messages: int) -> int:
    """Return the most receives of one kind that are posted and not yet read, one after another."""
    # A rank posts what it reads next and the one after that; reading the first posts a third.
    posted, most = 0, 0
    for read in range(messages):
        while posted < messages and posted - read < 2:
            posted += 1
        most = max(most, posted - read)
    return most


def saved_bytes(profile: Profile, layers: range) -> int:
    """Return the bytes that autograd saves per micro-batch for these layers and their loss."""
    # A storage that several layers save is counted once.
    saved = sum(
        storage.size_bytes
        for storage in profile.storages
        if not set(layers).isdisjoint(storage.layers)
    )
    if not profile.storages:
        saved = sum(profile.layers[layer].saved_activation_bytes for layer in layers)
    if profile.loss and layers[-1] + 1 == len(profile.layers):
        saved += profile.loss.saved_activation_bytes
    return saved


def parameters_of(profile: Profile) -> list[Parameter]:
    """Return the profile's parameters, or one fp32 weight per layer if it lists none."""
    if profile.parameters:
        return list(profile.parameters)
    sizes = [entry.layer.parameter_bytes for entry in profile.layers]
    return [
        Parameter(names=("weight",), size_bytes=size, numel=(size + 3) // 4, layers=(index,))
        for index, size in enumerate(sizes)
    ]


def is_learned(parameter: Parameter) -> bool:
    return parameter.kind == "parameter" and parameter.trainable
