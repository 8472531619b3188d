"""A stage whose weights, gradients and optimizer state are spread over its replicas.

``torch.distributed.fsdp.fully_shard`` keeps the weights in shards and can make them whole and
reduce their gradients. As it is meant to be used, hooks on a module's forward and backward do so,
once each. A stage has several micro-batches in flight, may go backward in two parts, and must not
wait for other replicas while one of them waits for it; so the hooks are put on a module that only
holds the stage, and are run when the schedule's course allows: by a pass of one number through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ...core.plan.schedule import Work
from .replication import StageStrategy

ENDS_WITH_GRADIENTS = (Work.BACKWARD, Work.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class FullyShard:
    """Spread a stage's weights, their gradients and optimizer state over its replicas.

    Attributes:
        reshard_after_forward: Gather the weights for every action and let them go after it,
            instead of once a step: less memory while a step runs, more to send.
        reduce_every_backward: Reduce gradients after every backward instead of once a step: a
            whole gradient is held during a backward only, and more is sent.
        part_bytes: Weights are gathered, and gradients reduced, in parts of about this size;
            meanwhile a part is held twice.
    """

    reshard_after_forward: bool = False
    reduce_every_backward: bool = False
    part_bytes: int = 64 * 2**20

    @property
    def synchronises_in_actions(self) -> bool:
        """Whether replicas wait for each other between the beginning and the end of a step."""
        return self.reshard_after_forward or self.reduce_every_backward


class _Unit(nn.Module):
    """Holds modules whose weights are sharded; called to run the hooks, with one number."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, value: Tensor) -> Tensor:
        return value * 1


class ShardedStage(StageStrategy):
    """Makes a stage's weights whole when they are needed, and spreads them again.

    Gradients are reduced in every step, also within ``no_sync``, so that they are never whole
    between steps.

    Args:
        parts: Modules that hold the weights: the stage, and others that read the same ones.
        names: Those of the first part that are to be sharded; the rest stay as they are.
        group: The stage's replicas.
        device: Where the stage is.
        options: When weights and gradients are whole.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        names: Iterable[str],
        group: dist.ProcessGroup,
        device: torch.device,
        options: FullyShard,
    ) -> None:
        self._stage, self._names = parts[0], tuple(names)
        self._group, self._device, self._options = group, device, options
        self._trains = self._is_interrupted = False
        with self._current():
            # torch remembers what it knows of a mesh by its ranks and names; a pipeline that is
            # made after another has groups of its own.
            names = (f"replicas {group.group_name}",)
            mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=names)
            self._units = [
                _unit(parts, {self._stage.get_parameter(name) for name in some}, mesh)
                for some in _in_parts(self._stage, self._names, options.part_bytes)
            ]
        self._gather()  # once outside of any inference mode, whose tensors could not be trained
        self._reshard()

    def begin(self, *, trains: bool, sums: bool) -> None:
        if self._is_interrupted:
            self._drop_gradients()
        self._trains, self._is_interrupted = trains, True
        if not (trains and self._options.reshard_after_forward):
            self._gather()

    def action_begins(self, work: Work, *, last: bool) -> None:
        if self._trains and self._options.reshard_after_forward:
            self._gather()

    def action_ended(self, work: Work, *, last: bool) -> None:
        if not self._trains or not self._options.synchronises_in_actions:
            return
        reshards = self._options.reshard_after_forward
        reduces = self._options.reduce_every_backward and work in ENDS_WITH_GRADIENTS
        if reduces or last:
            self._reduce(reshards=reshards or last)
        elif reshards:
            self._reshard()

    def finish(self) -> None:
        if self._trains and not self._options.synchronises_in_actions:
            self._reduce(reshards=True)
        self._reshard()
        self._is_interrupted = False

    def _gather(self) -> None:
        with self._current():
            for unit in self._units:
                unit.unshard()

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _reduce(self, *, reshards: bool) -> None:
        """Add the whole gradients to those of the shards, and let them go."""
        align_gradients(self._whole(), self._group)
        with self._current():
            for unit in self._units:
                unit.set_reshard_after_backward(reshards)
                seed = torch.zeros((), device=self._device, requires_grad=True)
                unit(seed).backward()  # type: ignore[operator]

    def _whole(self) -> list[nn.Parameter]:
        """The trainable weights; only while they are gathered."""
        found = [self._stage.get_parameter(name) for name in self._names]
        return [parameter for parameter in found if parameter.requires_grad]

    def _drop_gradients(self) -> None:
        """Forget what an interrupted step left in gradients that nobody else sees."""
        self._gather()
        for parameter in self._whole():
            parameter.grad = None

    def _current(self) -> AbstractContextManager[Any]:
        """``fully_shard`` works on the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _unit(parts: Sequence[nn.Module], weights: set[nn.Parameter], mesh: DeviceMesh) -> FSDPModule:
    """Shard these weights of the parts, and no others."""
    others = {p for part in parts for p in part.parameters() if p not in weights}
    made: Any = _Unit(parts)
    fully_shard(made, mesh=mesh, reshard_after_forward=False, ignored_params=others)
    made.set_gradient_divide_factor(1.0)  # a sum, as the loss is a mean already
    made.set_force_sum_reduction_for_comms(True)
    unit: FSDPModule = made
    return unit


def _in_parts(stage: nn.Module, names: Sequence[str], part_bytes: int) -> Iterator[list[str]]:
    """The names in order, up to so many bytes together."""
    part: list[str] = []
    size = 0
    for name in names:
        nbytes = stage.get_parameter(name).nbytes
        if part and size + nbytes > part_bytes:
            yield part
            part, size = [], 0
        part.append(name)
        size += nbytes
    if part:
        yield part


def select_shardable(stage: nn.Module, names: Iterable[str]) -> list[str]:
    """Which of a stage's parameters ``fully_shard`` takes, in the given order.

    Not single numbers, parameters whose memory is not in order, and trainable ones of another
    dtype than most of the trainable bytes are: one reduction has one dtype.
    """
    found = {name: stage.get_parameter(name) for name in names}
    sizes: dict[torch.dtype, int] = {}
    for parameter in found.values():
        if parameter.requires_grad:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
    reduced = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return [
        name
        for name, parameter in found.items()
        if parameter.dim() > 0
        and parameter.is_contiguous()
        and (not parameter.requires_grad or parameter.dtype is reduced)
    ]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank holds only a part of a weight."""
    return isinstance(tensor, DTensor)


def has_gradient_anywhere(
    has_one: Sequence[bool], group: dist.ProcessGroup, device: torch.device
) -> list[bool]:
    """For each weight whether any replica has a gradient; called on all of them.

    Args:
        has_one: Whether this replica does, of the same weights in the same order on each.
        group: The replicas.
        device: Where the group's messages are.
    """
    counts = torch.tensor(has_one, dtype=torch.float32, device=device)
    dist.all_reduce(counts, group=group)
    # Looked at only where this replica does not know: on a GPU it has to wait for the numbers.
    return list(has_one) if all(has_one) else [count > 0 for count in counts.tolist()]


def align_gradients(weights: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give a weight a gradient of zeros where another replica has one and this one has none."""
    if not weights:
        return
    has_one = [weight.grad is not None for weight in weights]
    for weight, is_wanted in zip(
        weights, has_gradient_anywhere(has_one, group, weights[0].device), strict=True
    ):
        if is_wanted and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
