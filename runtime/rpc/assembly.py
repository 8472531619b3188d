"""Assembly of a pipeline: the master has every worker build its stages."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed.rpc as rpc

from ...capture.sample import CallStructure
from ...core.plan.plan import Plan
from ..partition.cut import TiedGroup
from .calls import call_safely, send
from .liveness import LivenessCheck
from .stage import StageServer
from .stage_builder import BuildRequest, BuiltStages, ModelSource, OutputForm, build


@dataclass(frozen=True)
class Assembly:
    """Model whose stages live on workers.

    Attributes:
        stages: References to the stages, in pipeline order.
        names: Names of the model's parameters and buffers, in the model's order.
        tied: Weights shared by several stages.
        structure: Call structure of the model.
        output: Structure of the model's output.
        microbatch_size: Required samples per micro-batch; `None` if any number works.
        most_stages: Largest number of stages on one worker.
    """

    stages: tuple[rpc.RRef[StageServer], ...]
    names: tuple[str, ...]
    tied: tuple[TiedGroup, ...]
    structure: CallStructure
    output: OutputForm
    microbatch_size: int | None
    most_stages: int


def assemble(
    liveness: LivenessCheck,
    source: ModelSource,
    plan: Plan,
    workers: Sequence[str],
    devices: Sequence[str | None],
    sample: Any,
) -> Assembly:
    """Build all stages on all workers in parallel, given the worker and device of each stage."""
    # One request per worker, not per stage: a worker captures the model once for all its stages.
    by_worker: dict[str, list[int]] = {}
    for index, worker in enumerate(workers):
        by_worker.setdefault(worker, []).append(index)
    started = {}
    for worker, indices in by_worker.items():
        places = tuple(devices[index] for index in indices)
        order = BuildRequest(source, plan, tuple(indices), places, sample)
        started[worker] = send(worker, call_safely, build, order)
    built: dict[str, BuiltStages] = {
        worker: liveness.wait(worker, future, "building the stages")
        for worker, future in started.items()
    }
    by_index = {
        index: stage
        for worker, indices in by_worker.items()
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
        most_stages=max(len(indices) for indices in by_worker.values()),
    )
