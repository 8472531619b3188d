"""Replica strategy that shards a stage's weights, gradients and optimizer state (FSDP2).

``torch.distributed.fsdp.fully_shard`` keeps weights in shards, gathers them and reduces their
gradients. It is designed to do so in hooks on a module's forward and backward, once each. A stage
has several micro-batches in flight, and may go backward in two parts. So the hooks are put on
modules that merely hold the weights of one block of the stage each, and triggered when the stage's
code comes to that block, by passing a single number through such a module.

Collectives of one group have no names, so all replicas go through all blocks in one order in every
action: upwards in a forward, downwards in a backward, whatever the blocks are needed for. A replica
with fewer micro-batches than others does so without any work in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ...capture.program.parts import Part, Values
from ...capture.program.segment import Segment, get_segments, list_block_weights, run_blocks_by
from ...core.errors import InvalidInput
from ...core.plan.schedule import Work
from .deadlock_check import Round
from .replication import StageStrategy

REDUCES = (Work.BACKWARD, Work.BACKWARD_WEIGHT)


class _Unit(nn.Module):
    """Holder of modules with sharded weights, called with a single number to run the hooks."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, value: Tensor) -> Tensor:
        return value * 1


class ShardedStage(StageStrategy):
    """Stage whose weights are gathered block by block, and let go after each.

    Gradients are reduced when a block's backward ends, in every micro-batch, even within
    ``no_sync``, so that no whole gradient remains. The second part of a backward in two needs
    blocks in an order of its own, so it gathers all and reduces all.

    Weights of ``names`` are sharded, others stay whole. ``rounds`` are this replica's in a step.
    """

    def __init__(
        self,
        stage: Segment,
        names: Collection[str],
        group: dist.ProcessGroup,
        device: torch.device,
        rounds: Sequence[Round],
    ) -> None:
        self._group, self._device, self._rounds = group, device, rounds
        self._pending: Iterator[Round] = iter(())
        self._left: deque[int] = deque()
        self._held: list[int] = []
        self._reduces = False
        self._units: list[FSDPModule] = []
        self._names: list[set[str]] = []
        self._weights: list[list[nn.Parameter]] = []
        self._read: dict[frozenset[str], list[int]] = {}
        segments = get_segments(stage)
        with self._current():
            # torch caches what it derives from a mesh by the mesh's ranks and names. The group's
            # name keeps a second pipeline on the same ranks from getting the first one's groups.
            mesh = DeviceMesh.from_group(
                group, device.type, mesh_dim_names=(f"replicas {group.group_name}",)
            )
            for block in list_block_weights(stage):
                if own := [name for name in block if name in names]:
                    self._add_unit(segments, own, mesh)
        for segment in segments:
            run_blocks_by(segment, self._run_block)

    def _add_unit(self, segments: Sequence[Segment], names: list[str], mesh: DeviceMesh) -> None:
        stage, unit = segments[0], len(self._units)
        weights = {stage.get_parameter(name) for name in names}
        everything = stage.named_parameters(remove_duplicate=False)
        self._names.append({name for name, weight in everything if weight in weights})
        self._units.append(_shard(segments, weights, mesh))
        # The buffers for whole weights are allocated at the first gathering. If that were in an
        # evaluation under inference mode, they would be inference tensors, unfit for training.
        self._units[unit].unshard()
        self._weights.append([stage.get_parameter(name) for name in names])
        self._units[unit].reshard()

    def begin(self, *, trains: bool, sums: bool) -> None:
        for unit in self._held:  # by a step that an error ended
            self._units[unit].reshard()
        for weight in (weight for weights in self._weights for weight in weights):
            weight.grad = None
        self._held = []
        rounds = [each for each in self._rounds if trains or each.work is Work.FORWARD]
        # In an evaluation forwards follow each other, so a replica's own come first.
        self._pending = iter(rounds if trains else sorted(rounds, key=lambda each: -each.is_own))
        self._catch_up()

    def action_begins(self, work: Work, *, last: bool) -> None:
        downwards = work in (Work.BACKWARD, Work.BACKWARD_INPUT)
        units = range(len(self._units))
        self._left = deque(reversed(units) if downwards else units)
        self._reduces = work in REDUCES
        if work is Work.BACKWARD_WEIGHT:
            self._need(units)

    def action_ended(self, work: Work, *, last: bool) -> None:
        self._end_round()
        self._catch_up()

    def finish(self) -> None:
        whole = [weight for weights in self._weights for weight in weights]
        assert all(weight.grad is None for weight in whole), "a block's backward ended too early"

    def _catch_up(self) -> None:
        """Take part in the rounds up to the next one that has work here."""
        for following in self._pending:
            if following.is_own:
                break
            self.action_begins(following.work, last=False)
            self._end_round()

    def _end_round(self) -> None:
        """Go through the blocks that this action did not come to, and let go of the last."""
        with self._current():
            while self._left:
                self._gather_next(())
            self._let_go(())

    def _run_block(self, part: Part, run: Callable[[Values], Values], taken: Values) -> Values:
        """Run a part of the stage's code with its weights gathered, now and in its backward."""
        if part.targets not in self._read:
            self._read[part.targets] = [
                unit
                for unit, names in enumerate(self._names)
                if any(_reads(target, name) for target in part.targets for name in names)
            ]
        units = self._read[part.targets]
        if not units:
            return run(taken)
        self._need(units)
        lent = {_memory_of(weight) for unit in units for weight in self._weights[unit]}

        def keep(value: Tensor) -> Tensor:
            if _memory_of(value) in lent:  # a view of a weight, which is let go
                value = value.clone()
            if value.requires_grad and torch.is_grad_enabled():
                value.register_hook(lambda gradient: self._need(units))
            return value

        kept: Values = pytree.tree_map_only(Tensor, keep, run(taken))
        return kept

    def _need(self, units: Sequence[int]) -> None:
        """Gather these blocks, on the way all before them, and let go of others."""
        with self._current():
            while self._left and not set(units).issubset(self._held):
                self._gather_next(units)
            for unit in units:  # of a graph for evaluation with another order
                if unit not in self._held:
                    self._let_go(units)
                    self._gather(unit)

    def _gather_next(self, kept: Sequence[int]) -> None:
        self._let_go(kept)
        self._gather(self._left.popleft())

    def _gather(self, unit: int) -> None:
        self._units[unit].unshard()
        self._held.append(unit)

    def _let_go(self, kept: Sequence[int]) -> None:
        """Shard the weights of other blocks than these again, and reduce their gradients."""
        for unit in [each for each in self._held if each not in kept]:
            if self._reduces:
                self._reduce(unit)
            self._units[unit].reshard()
            self._held.remove(unit)

    def _reduce(self, unit: int) -> None:
        """Add the whole gradients to those of the shards, and free them."""
        align_gradients([w for w in self._weights[unit] if w.requires_grad], self._group)
        # The unit's hooks surround this backward of a zero: the one in front finds the weights
        # gathered already, the one behind reduces whatever is in `.grad`.
        with torch.enable_grad():
            seed = torch.zeros((), device=self._device, requires_grad=True)
            self._units[unit](seed).backward()  # type: ignore[operator]

    def _current(self) -> AbstractContextManager[Any]:
        """Make the stage's device current, for ``fully_shard`` uses the current one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _reads(target: str, name: str) -> bool:
    """Return True if a module or tensor of this name is, or has, the weight."""
    return target in ("", name) or name.startswith(f"{target}.")


def _shard(parts: Sequence[nn.Module], weights: set[nn.Parameter], mesh: DeviceMesh) -> FSDPModule:
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
