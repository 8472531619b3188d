"""Weights held by several ranks: those of replicated stages, and tied ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import InvalidInput
from ...core.graph.graph import Parameter
from ...core.plan.schedule import Schedule
from ..ranks.process_groups import ProcessGroups, RankSet
from ..ranks.rank_grid import RankGrid
from .gradient_sync import SharedWeight


class WeightPlacement:
    """The stages and ranks that hold each parameter and buffer of a model.

    ``grid`` holds the ranks that share each rank of the schedule, by tensor parallelism: those have
    equal gradients of a whole weight, and parts of a divided one. So replicas add up gradients
    among ranks of one shard, whichever weight it is.
    """

    def __init__(
        self,
        records: Sequence[Parameter],
        balance: Sequence[int],
        schedule: Schedule,
        grid: RankGrid | None = None,
        rank: int = 0,
    ) -> None:
        self._records, self._rank = records, rank
        self._grid = grid or RankGrid((1,) * len(schedule.ranks))
        self._scheduled = schedule.stage_ranks
        self._stage_of = [stage for stage, count in enumerate(balance) for _ in range(count)]

    def replicas_of(self, stage: int) -> RankSet:
        """Return the ranks of a stage's replicas that have this rank's shard of it."""
        return self._with_shard(self._scheduled[stage], self._shard)

    def replica_of(self, stage: int) -> int:
        """Return the number of this rank's replica of a stage."""
        return self._scheduled[stage].index(self._grid.locate(self._rank)[0])

    def sharing_ranks(self) -> RankSet:
        """Return the ranks that share this rank's stages, this one among them, by shard."""
        return self._grid.ranks_of(self._grid.locate(self._rank)[0])

    def rank_sets(self) -> list[RankSet]:
        """Return the sets of several ranks that exchange weights, gradients or shards."""
        sets: set[RankSet] = set()
        for scheduled in {*map(self._scheduled_of, self._records), *self._scheduled}:
            sets.update(self._with_shard(scheduled, shard) for shard in self._shards(scheduled))
            sets.add(self._all_of(scheduled))
        sets.update(self._grid.ranks_of(rank) for rank in range(len(self._grid.widths)))
        return [ranks for ranks in sets if len(ranks) > 1]

    def names_of(self, stage: int) -> set[str]:
        """Return all names of the weights that a stage uses and no other."""
        own = (record for record in self._records if self._stages_of(record) == (stage,))
        return {name for record in own for name in record.names}

    def check_gradients_dense(self, model: nn.Module) -> None:
        """Raise `InvalidInput` if several ranks hold a weight whose gradients are sparse."""
        sparse = {
            f"{path}.weight"
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }
        for record in self._records:
            ranks = self._all_of(self._scheduled_of(record))
            if record.trainable and len(ranks) > 1 and sparse.intersection(record.names):
                raise InvalidInput(
                    f"the gradients of {record.names[0]!r} are sparse, and cannot be summed over "
                    f"the {len(ranks)} ranks that hold it; build its embedding with sparse=False, "
                    "or plan its stages without replicas and in one piece (--tied together)"
                )

    def shared_weights(self, module: nn.Module) -> list[SharedWeight]:
        """Return a rank's weights that other ranks hold too, with frozen ones, last layers first.

        Backwards complete gradients in this order. The module has the model's names.
        """
        here = dict(module.named_parameters(remove_duplicate=False))
        last_first = sorted(self._records, key=lambda each: each.layers, reverse=True)
        found = []
        for record, name in self._named(last_first, here):
            scheduled = self._scheduled_of(record)
            ranks = self._with_shard(scheduled, self._shard)
            copies = len(self.sharing_ranks()) if self._is_mixed(scheduled) else 1
            if len(ranks) > 1:
                stages = self._stages_of(record)
                found.append(SharedWeight(name, here[name], stages, ranks, copies))
        return found

    def count_holders(
        self, module: nn.Module, divided: Collection[str], sharded: Callable[[Tensor], bool]
    ) -> dict[int, int]:
        """Return how many ranks hold each parameter of a module, by ``id``, where several do.

        ``divided`` names weights of which each shard has a part of its own; of those that are
        ``sharded`` each replica does.
        """
        here = dict(module.named_parameters(remove_duplicate=False))
        found = {}
        for record, name in self._named(self._records, here):
            scheduled = self._scheduled_of(record)
            copies = self._all_of(scheduled)
            if name in divided:
                copies = self._with_shard(scheduled, self._shard)
            count = len(copies)
            if sharded(here[name]):
                count //= len(scheduled)
            if count > 1:
                found[id(here[name])] = count
        return found

    @torch.no_grad()
    def broadcast_initial_values(
        self, module: nn.Module, ranks: ProcessGroups, device: torch.device
    ) -> dict[RankSet, dist.ProcessGroup]:
        """Give all holders of each parameter and buffer the values of the lowest-numbered one.

        Without it ranks that initialised randomly would train different copies of one weight.
        Called on every rank; returns the groups of `rank_sets` that include this one.
        """
        # Every rank computes the groups of all ranks, because creating one is a collective call.
        groups = ranks.create_groups(self.rank_sets())
        here: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        here.update(module.named_buffers(remove_duplicate=False))
        for group in groups.values():  # NCCL connects them here, also where a stage has no weights
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        for record, name in self._named(self._records, here):
            holders = self._all_of(self._scheduled_of(record))
            if len(holders) == 1:
                continue
            value = here[name].contiguous()  # gloo takes no strides, and no booleans
            bytes_of = value.view(torch.uint8) if value.dtype is torch.bool else value
            dist.broadcast(bytes_of, group_src=0, group=groups[holders])
            here[name].copy_(value)
        return groups

    def _named(
        self, records: Sequence[Parameter], here: Mapping[str, Tensor]
    ) -> Iterator[tuple[Parameter, str]]:
        """Yield what this rank holds, with its first name here."""
        for record in records:
            name = next((name for name in record.names if name in here), None)
            if name is not None and record.layers:
                yield record, name

    @property
    def _shard(self) -> int:
        return self._grid.locate(self._rank)[1]

    def _stages_of(self, record: Parameter) -> tuple[int, ...]:
        return tuple(sorted({self._stage_of[layer] for layer in record.layers}))

    def _scheduled_of(self, record: Parameter) -> RankSet:
        stages = self._stages_of(record)
        return tuple(sorted({rank for stage in stages for rank in self._scheduled[stage]}))

    def _all_of(self, scheduled: RankSet) -> RankSet:
        return tuple(rank for each in scheduled for rank in self._grid.ranks_of(each))

    def _is_mixed(self, scheduled: RankSet) -> bool:
        return len({self._grid.widths[rank] for rank in scheduled}) > 1

    def _shards(self, scheduled: RankSet) -> range:
        """Return the shards whose ranks add up gradients among themselves, or 0 for all ranks."""
        if not scheduled or self._is_mixed(scheduled):
            return range(1)
        return range(self._grid.widths[scheduled[0]])

    def _with_shard(self, scheduled: RankSet, shard: int) -> RankSet:
        """Return the ranks that add up gradients with those of a shard.

        A weight tied between stages of different degrees is whole, and all its ranks do so.
        """
        if self._is_mixed(scheduled):
            return self._all_of(scheduled)
        return self._grid.with_shard(scheduled, shard)
