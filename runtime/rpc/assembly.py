"""The master has every worker build its stages, and notes what it needs to know of the model."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed.rpc as rpc

from ...capture.sample import CallStructure
from ...core.plan.plan import Plan
from ..partition.cut import TiedGroup
from .calls import answer, send
from .liveness import RollCall
from .stage import StageServer
from .stage_builder import Built, Order, OutputForm, Source, build


@dataclass(frozen=True)
class Assembly:
    """A model in stages on workers.

    Attributes:
        stages: References to the stages, in pipeline order.
        names: The model's parameters and buffers, in its own order.
        tied: Weights of several stages.
        structure: How the model is called.
        output: How its output is put together.
        microbatch_size: Samples that a micro-batch has to have; `None` for any number.
        most_stages: The most stages that one worker serves.
    """

    stages: tuple[rpc.RRef[StageServer], ...]
    names: tuple[str, ...]
    tied: tuple[TiedGroup, ...]
    structure: CallStructure
    output: OutputForm
    microbatch_size: int | None
    most_stages: int


def assemble(
    roll: RollCall,
    source: Source,
    plan: Plan,
    workers: Sequence[str],
    devices: Sequence[str | None],
    sample: Any,
) -> Assembly:
    """Build all stages, all workers at once.

    Args:
        roll: Says whether the workers are there.
        source: The model.
        plan: Where to cut.
        workers: The worker of each stage.
        devices: Where each stage runs there.
        sample: See `runtime.cut.cut_for_plan`.
    """
    placed: dict[str, list[int]] = {}
    for index, worker in enumerate(workers):
        placed.setdefault(worker, []).append(index)
    started = {}
    for worker, indices in placed.items():
        places = tuple(devices[index] for index in indices)
        order = Order(source, plan, tuple(indices), places, sample)
        started[worker] = send(worker, answer, build, order)
    built: dict[str, Built] = {
        worker: roll.wait(worker, future, "building the stages")
        for worker, future in started.items()
    }
    by_index = {
        index: stage
        for worker, indices in placed.items()
        for index, stage in zip(indices, built[worker].stages, strict=True)
    }
    first = built[workers[0]]
    return Assembly(
        stages=tuple(by_index[index] for index in range(len(workers))),
        names=first.names,
        tied=first.tied,
        structure=first.structure,
        output=pickle.loads(first.output),
        microbatch_size=first.microbatch_size,
        most_stages=max(len(indices) for indices in placed.values()),
    )
