"""Weights held by several ranks: those of replicated stages, and tied ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import InvalidInput
from ...core.graph.graph import Parameter
from ...core.plan.schedule import Schedule
from ..ranks.process_groups import ProcessGroups, RankSet
from .gradient_sync import SharedWeight


class WeightPlacement:
    """The stages and ranks that hold each parameter and buffer of a model."""

    def __init__(
        self, records: Sequence[Parameter], balance: Sequence[int], schedule: Schedule
    ) -> None:
        self._records, self.stage_ranks = records, schedule.stage_ranks
        self._stage_of = [stage for stage, count in enumerate(balance) for _ in range(count)]

    def rank_sets(self) -> list[RankSet]:
        """Return the sets of several ranks that hold the same weights, all replicas among them."""
        sets = {*map(self._ranks_of, self._records), *self.stage_ranks}
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
            ranks = self._ranks_of(record)
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
        return [
            SharedWeight(name, here[name], self._stages_of(record), ranks)
            for record, name, ranks in self._shared(last_first, here)
        ]

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
        for _, name, holders in self._shared(self._records, here):
            value = here[name].contiguous()  # gloo takes no strides, and no booleans
            bytes_of = value.view(torch.uint8) if value.dtype is torch.bool else value
            dist.broadcast(bytes_of, group_src=0, group=groups[holders])
            here[name].copy_(value)
        return groups

    def _shared(
        self, records: Sequence[Parameter], here: Mapping[str, Tensor]
    ) -> Iterator[tuple[Parameter, str, RankSet]]:
        """Yield what several ranks hold, this one among them, with its first name here."""
        for record in records:
            name = next((name for name in record.names if name in here), None)
            ranks = self._ranks_of(record)
            if name is not None and len(ranks) > 1:
                yield record, name, ranks

    def _stages_of(self, record: Parameter) -> tuple[int, ...]:
        return tuple(sorted({self._stage_of[layer] for layer in record.layers}))

    def _ranks_of(self, record: Parameter) -> RankSet:
        stages = self._stages_of(record)
        return tuple(sorted({rank for stage in stages for rank in self.stage_ranks[stage]}))
