"""Replica strategy that shards a stage's weights, gradients and optimizer state (FSDP2).

``torch.distributed.fsdp.fully_shard`` keeps weights in shards, gathers them and reduces their
gradients. It is designed to do so in hooks on a module's forward and backward, once each. A stage
has several micro-batches in flight, may go backward in two parts, and must not synchronise where
another replica waits for this one. So the hooks are put on a module that merely holds the stage,
and triggered at the right moments of the schedule, by passing a single number through that module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ...core.errors import InvalidInput
from ...core.plan.schedule import Work
from .gradient_sync import split_by_size
from .replication import StageStrategy

ENDS_WITH_GRADIENTS = (Work.BACKWARD, Work.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class FullyShard:
    """Options for sharding a stage's weights, gradients and optimizer state over its replicas.

    Attributes:
        reshard_after_forward: Gather the weights for every action and free them after it, instead
            of once per step: less memory during a step, more communication.
        reduce_every_backward: Reduce gradients after every backward instead of once per step: whole
            gradients exist during backwards only, with more communication.
        part_bytes: Weights are gathered, and gradients reduced, in parts of about this size; a
            part is held twice meanwhile.
    """

    reshard_after_forward: bool = False
    reduce_every_backward: bool = False
    part_bytes: int = 64 * 2**20

    @property
    def synchronises_in_actions(self) -> bool:
        """Return True if replicas synchronise within a step, not only at its beginning and end."""
        return self.reshard_after_forward or self.reduce_every_backward


class _Unit(nn.Module):
    """Holder of modules with sharded weights, called with a single number to run the hooks."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, value: Tensor) -> Tensor:
        return value * 1


class ShardedStage(StageStrategy):
    """Stage whose weights are gathered when they are needed and sharded again.

    Gradients are reduced in every step, even within ``no_sync``, so that no whole gradient remains
    between steps.

    ``parts`` are the stage and other modules that read its weights. Those named are sharded, the
    others stay whole.
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
            # torch caches what it derives from a mesh by the mesh's ranks and names. The group's
            # name keeps a second pipeline on the same ranks from getting the first one's groups.
            names = (f"replicas {group.group_name}",)
            mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=names)
            whole = [self._stage.get_parameter(name) for name in self._names]
            self._units = [
                _unit(parts, set(some), mesh)
                for some in split_by_size(whole, lambda p: p.nbytes, options.part_bytes)
            ]
        # The buffers for whole weights are allocated at the first gathering. If that were in an
        # evaluation under inference mode, they would be inference tensors, unfit for training.
        self._gather()
        self._reshard()

    def begin(self, *, trains: bool, sums: bool) -> None:
        if self._is_interrupted:  # an error ended the last step before its gradients were reduced
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
        """Add the whole gradients to those of the shards, and free them."""
        align_gradients(self._whole(), self._group)
        with self._current():
            for unit in self._units:
                unit.set_reshard_after_backward(reshards)
                # The unit's hooks surround this backward of a zero: the one in front finds the
                # weights gathered already, the one behind reduces whatever is in `.grad`.
                seed = torch.zeros((), device=self._device, requires_grad=True)
                unit(seed).backward()  # type: ignore[operator]

    def _whole(self) -> list[nn.Parameter]:
        """Return the trainable weights, which must be gathered."""
        found = [self._stage.get_parameter(name) for name in self._names]
        return [parameter for parameter in found if parameter.requires_grad]

    def _drop_gradients(self) -> None:
        """Drop whole gradients left by an interrupted step."""
        self._gather()
        for parameter in self._whole():
            parameter.grad = None

    def _current(self) -> AbstractContextManager[Any]:
        """Make the stage's device current, for ``fully_shard`` uses the current one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _unit(parts: Sequence[nn.Module], weights: set[nn.Parameter], mesh: DeviceMesh) -> FSDPModule:
    """Shard the given weights of the parts, and no others."""
    others = {p for part in parts for p in part.parameters() if p not in weights}
    made: Any = _Unit(parts)
    fully_shard(made, mesh=mesh, reshard_after_forward=False, ignored_params=others)
    # Gradients are sums over replicas: each micro-batch's loss is a share of the batch's mean.
    made.set_gradient_divide_factor(1.0)
    made.set_force_sum_reduction_for_comms(True)
    unit: FSDPModule = made
    return unit


def select_shardable(stage: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of a stage's parameters that ``fully_shard`` accepts, in the given order.

    It does not accept scalars and non-contiguous parameters. Trainable parameters of any but the
    dtype with the most bytes are left out too, because a reduction has a single dtype.
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


def check_whole_weights(model: nn.Module) -> None:
    """Raise `InvalidInput` for weights that are sharded already, as by tensor parallelism."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise InvalidInput(
                f"the parameter {name!r} is a DTensor, sharded over ranks already; a pipeline in "
                "processes takes whole weights, and shards those of a stage over its replicas by "
                "strategy='fully_shard'. Tensor parallelism goes with a Pipeline in each process"
            )


def is_sharded(tensor: Tensor) -> bool:
    """Return True if a rank holds only a shard of a weight."""
    return isinstance(tensor, DTensor)


def has_gradient_anywhere(
    has_one: Sequence[bool], group: dist.ProcessGroup, device: torch.device
) -> list[bool]:
    """Return, for each weight in one order, whether any replica has a gradient; called on all."""
    # Filled on the device: the host would wait for a copy.
    counts = torch.ones(len(has_one), device=device)
    for at, each in enumerate(has_one):
        if not each:
            counts.narrow(0, at, 1).zero_()
    dist.all_reduce(counts, group=group)
    # Read only if this replica lacks one: `tolist` makes the host wait for the GPU.
    return list(has_one) if all(has_one) else [count > 0 for count in counts.tolist()]


def align_gradients(weights: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give a weight a gradient of zeros if only other replicas have one.

    ``fully_shard`` reduces the gradients there are. If replicas differed in which those are, their
    messages would differ in size.
    """
    if not weights:
        return
    has_one = [weight.grad is not None for weight in weights]
    for weight, is_wanted in zip(
        weights, has_gradient_anywhere(has_one, group, weights[0].device), strict=True
    ):
        if is_wanted and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
