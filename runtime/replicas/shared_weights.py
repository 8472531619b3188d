"""Weights held by several ranks: those of replicated stages, and tied ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.graph.graph import Parameter
from ...core.plan.schedule import Schedule
from ..ranks.process_groups import RankSet
from .gradient_sync import SharedWeight


def find_holders(record: Parameter, stage_of: Sequence[int], schedule: Schedule) -> RankSet:
    """Return the ranks whose stages use a parameter or buffer, ascending."""
    stages = {stage_of[layer] for layer in record.layers}
    return tuple(sorted({rank for stage in stages for rank in schedule.stage_ranks[stage]}))


def shared_weights(
    parameters: Sequence[Parameter], stage_of: Sequence[int], schedule: Schedule, module: nn.Module
) -> list[SharedWeight]:
    """Return a rank's weights that other ranks hold too, including frozen ones, last layers first.

    Backwards complete gradients in this order.
    """
    here = dict(module.named_parameters(remove_duplicate=False))
    found = []
    for record in sorted(parameters, key=lambda each: each.layers, reverse=True):
        name = next((name for name in record.names if name in here), None)
        ranks = find_holders(record, stage_of, schedule)
        if name is None or len(ranks) < 2:
            continue
        stages = tuple(sorted({stage_of[layer] for layer in record.layers}))
        found.append(SharedWeight(name, here[name], stages, ranks))
    return found


def broadcast_initial_values(
    parameters: Sequence[Parameter],
    stage_of: Sequence[int],
    schedule: Schedule,
    module: nn.Module,
    groups: dict[RankSet, dist.ProcessGroup],
) -> None:
    """Give all holders of each parameter and buffer the values of the lowest-numbered one.

    Without it ranks that initialised randomly would train different copies of one weight.
    """
    here = dict(_tensors(module))
    with torch.no_grad():
        for record in parameters:
            name = next((name for name in record.names if name in here), None)
            ranks = find_holders(record, stage_of, schedule)
            if name is not None and len(ranks) > 1:
                value = here[name].contiguous()  # gloo takes no strides, and no booleans
                bytes_of = value.view(torch.uint8) if value.dtype is torch.bool else value
                dist.broadcast(bytes_of, group_src=0, group=groups[ranks])
                here[name].copy_(value)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
