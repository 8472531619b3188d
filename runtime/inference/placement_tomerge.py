"""A stage for every replica, with its weights on its device."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from ...capture.capture import default_device
from ...capture.program.segment import Segment
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..partition.cut import CutModel
from .stage_device import Seat


def seats_for(
    plan: Plan, devices: Sequence[torch.device | str] | None, model: nn.Module
) -> list[list[Seat]]:
    """Where each replica of each stage works.

    On one device replicas have nothing to gain, and each stage has one seat.

    Args:
        plan: How many replicas each stage has.
        devices: One, or one for every device of the plan, stage by stage; `None` for the model's.
        model: To see where it is.

    Raises:
        InvalidInput: Another number of devices.
    """
    replicas = [stage.replicas for stage in plan.stages]
    given = [default_device(model)] if devices is None else list(devices)
    if len(given) == 1:
        return [[Seat(given[0])] for _ in replicas]
    if len(given) != sum(replicas):
        counts = "-".join(map(str, replicas))
        raise InvalidInput(
            f"give one device, or {sum(replicas)}: one for every replica of the plan's stages "
            f"({counts}); got {len(given)}"
        )
    rest = iter(given)
    return [[Seat(next(rest)) for _ in range(count)] for count in replicas]


def placed(
    pieces: CutModel, seats: Sequence[Sequence[Seat]], model: nn.Module
) -> list[list[Segment]]:
    """The stages of each seat, in evaluation mode.

    The model's own modules go where their stage is. A further replica, and a stage that holds a
    weight of an earlier one on another device, have copies: threads that work at the same time
    cannot move one module to and fro.

    Raises:
        PlanMismatch: Capture froze an operation in training mode.
    """
    homes: dict[int, torch.device] = {}
    found = []
    for stage, places in zip(pieces.stages, seats, strict=True):
        stage.train(False)
        held = [id(tensor) for tensor in (*stage.parameters(), *stage.buffers())]
        own = all(homes.setdefault(key, places[0].device) == places[0].device for key in held)
        here = [stage] if own else [copy.deepcopy(stage)]
        here += [copy.deepcopy(stage) for _ in places[1:]]
        for each, seat in zip(here, places, strict=True):
            each.to(seat.device)
        if own:
            stage.give_buffers(model)
        found.append(here)
    model.eval()
    return found
