"""The numbers of one split, counted again from the profile by plain loops.

Written apart from the planner's tables, so that the two check each other. Only the schedule and
its simulator are shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from ..core.cluster import Cluster
from ..core.graph import Boundary, Parameter
from ..core.plan import OPTIMIZER_BYTES_PER_ELEMENT, MemoryUse, PlanOptions
from ..core.profile import Profile
from .schedules import in_flight, make_schedule, too_many_stages
from .simulate import StageTimes, simulate


@dataclass(frozen=True)
class Split:
    """All layers of a profile cut into stages, stage s on the cluster's device s.

    A stage without a device has no limit and sends nothing.

    Attributes:
        counts: Layers of each stage, at least one, adding up to the profile's.
    """

    counts: tuple[int, ...]
    profile: Profile
    cluster: Cluster
    options: PlanOptions

    @property
    def num_stages(self) -> int:
        return len(self.counts)

    def layers(self, stage: int) -> range:
        """Indices of the stage's layers."""
        begin = sum(self.counts[:stage])
        return range(begin, begin + self.counts[stage])

    def boundaries(self) -> tuple[Boundary, ...]:
        """The profile's boundary at each cut."""
        return tuple(self.profile.boundaries[end - 1] for end in accumulate(self.counts[:-1]))

    def work_s(self, stage: int) -> tuple[float, float]:
        """Forward and backward; the last stage also carries the loss."""
        entries = [self.profile.layers[layer] for layer in self.layers(stage)]
        forward_s = math.fsum(entry.forward.median_s for entry in entries)
        backward_s = math.fsum(entry.backward.median_s for entry in entries)
        if self.profile.loss and self._is_last(stage):
            forward_s += self.profile.loss.forward.median_s
            backward_s += self.profile.loss.backward.median_s
        return forward_s, backward_s

    def send_forward(self, stage: int) -> tuple[int, float]:
        """Bytes and time of the activations sent to the next stage."""
        if stage + 1 >= min(self.num_stages, len(self.cluster.devices)):
            return 0, 0.0
        size = self.profile.boundaries[self.layers(stage)[-1]].forward_bytes
        return size, self.cluster.link(stage, stage + 1).transfer_time_s(size)

    def send_backward(self, stage: int) -> tuple[int, float]:
        """Bytes and time of the gradients sent to the previous stage."""
        if not 0 < stage < len(self.cluster.devices):
            return 0, 0.0
        size = self.profile.boundaries[self.layers(stage)[0] - 1].backward_bytes
        return size, self.cluster.link(stage - 1, stage).transfer_time_s(size)

    def in_flight(self, stage: int) -> int:
        """Most micro-batches the stage holds at once."""
        options = self.options
        return in_flight(options.schedule, stage, self.num_stages, options.num_microbatches)

    def memory(self, stage: int) -> MemoryUse:
        """Every byte counted again, storage by storage."""
        profile, layers = self.profile, set(self.layers(stage))
        weights = gradients = state = 0
        for parameter in _parameters(profile):
            if layers.isdisjoint(parameter.layers):
                continue
            weights += parameter.size_bytes
            if _is_learned(parameter):
                gradients += parameter.size_bytes
                state += parameter.numel * OPTIMIZER_BYTES_PER_ELEMENT[self.options.optimizer]
        saved = 0
        for storage in profile.storages:
            saved += 0 if layers.isdisjoint(storage.layers) else storage.size_bytes
        if not profile.storages:
            saved = sum(profile.layers[layer].saved_activation_bytes for layer in layers)
        if profile.loss and self._is_last(stage):
            saved += profile.loss.saved_activation_bytes
        received = 0
        if stage > 0:
            received += profile.boundaries[min(layers) - 1].forward_bytes
        if not self._is_last(stage):
            received += profile.boundaries[max(layers)].backward_bytes
        return MemoryUse(
            weights_bytes=weights,
            gradients_bytes=gradients,
            optimizer_bytes=state,
            activations_bytes=saved * self.in_flight(stage),
            workspace_bytes=max(profile.layers[layer].workspace_bytes for layer in layers),
            receive_buffers_bytes=received * self.options.num_microbatches,
        )

    def limit_bytes(self, stage: int) -> int | None:
        """What the stage's device allows, `None` for no limit."""
        if stage >= len(self.cluster.devices):
            return None
        memory_bytes = self.cluster.devices[stage].memory_bytes
        return None if memory_bytes is None else int(memory_bytes * self.options.memory_fraction)

    def tied_sync_s(self) -> float:
        """One ring after another over the stages that own each tied weight."""
        total_s = 0.0
        for parameter in self.profile.parameters:
            owners = []
            for stage in range(min(self.num_stages, len(self.cluster.devices))):
                if not set(self.layers(stage)).isdisjoint(parameter.layers):
                    owners.append(stage)
            if _is_learned(parameter) and len(owners) > 1:
                link = self.cluster.link(owners[0], owners[-1])
                total_s += link.all_reduce_time_s(parameter.size_bytes, len(owners))
        return total_s

    def objective_s(self) -> float:
        """The closed form of `objective`."""
        forwards, backwards, whole = [], [], []
        for stage in range(self.num_stages):
            forward_s, backward_s = self.work_s(stage)
            outgoing_s = self.send_forward(stage)[1]
            if stage + 1 < self.num_stages:
                outgoing_s += self.send_backward(stage + 1)[1]
            forwards.append(forward_s)
            backwards.append(backward_s)
            whole.append(forward_s + backward_s + outgoing_s)
        slowest_s = max(whole)
        if self.options.schedule == "gpipe":
            slowest_s = max(forwards) + max(backwards)
        repeats = self.options.num_microbatches - 1
        return sum(whole) + repeats * slowest_s + self.tied_sync_s()

    def is_usable(self) -> bool:
        """Whether devices and the schedule suffice, cuts are legal and every stage fits."""
        options, num_stages = self.options, self.num_stages
        if num_stages > len(self.cluster.devices):
            return False
        if too_many_stages(options.schedule, num_stages, options.num_microbatches):
            return False
        if not all(boundary.legal for boundary in self.boundaries()):
            return False
        for stage in range(num_stages):
            limit = self.limit_bytes(stage)
            if limit is not None and self.memory(stage).total_bytes > limit:
                return False
        return True

    def step_time_s(self) -> float:
        """The simulated step."""
        stages, options = range(self.num_stages), self.options
        times = StageTimes(
            forward_s=[self.work_s(stage)[0] for stage in stages],
            backward_s=[self.work_s(stage)[1] for stage in stages],
            send_forward_s=[self.send_forward(stage)[1] for stage in stages[:-1]],
            send_backward_s=[self.send_backward(stage)[1] for stage in stages[1:]],
            tied_sync_s=self.tied_sync_s(),
        )
        schedule = make_schedule(options.schedule, self.num_stages, options.num_microbatches)
        return simulate(schedule, times, with_events=False).step_time_s

    def _is_last(self, stage: int) -> bool:
        return stage + 1 == self.num_stages


def _parameters(profile: Profile) -> list[Parameter]:
    """The profile's, or one fp32 weight a layer where it lists none."""
    if profile.parameters:
        return list(profile.parameters)
    parameters = []
    for index, entry in enumerate(profile.layers):
        size = entry.layer.parameter_bytes
        parameters.append(
            Parameter(names=("weight",), size_bytes=size, numel=(size + 3) // 4, layers=(index,))
        )
    return parameters


def _is_learned(parameter: Parameter) -> bool:
    return parameter.kind == "parameter" and parameter.trainable
