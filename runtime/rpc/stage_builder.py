"""Building of stages: every worker builds the model, cuts it, and keeps its own stages."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.utils import _pytree as pytree

from ...capture.observation.nested_values import TensorPosition
from ...capture.sample import CallStructure
from ...core.errors import InvalidInput, PlanMismatch
from ...core.graph.tensors import TensorSpec
from ...core.plan.plan import Plan
from ...core.units import list_some, name_type
from ...schedules.plan_schedule import schedule_of
from ..engine.rank_facts import list_facts
from ..partition.cut import CutModel, check_no_references, cut_for_plan
from ..ranks.consistency import Facts, compare_facts
from ..ranks.device_placement import take_gpu
from ..supported_plans import check_stateful_layers
from .calls import call_safely, pickle_value, send
from .liveness import LivenessCheck
from .stage import StageServer


@dataclass(frozen=True)
class ModelSource:
    """Model in a form that can be sent to workers.

    ``data`` is the module with its weights or a pickled function that builds it, for which ``seed``
    makes all workers build equal weights.
    """

    data: bytes
    is_module: bool
    seed: int

    @classmethod
    def of(cls, model: Any, seed: int) -> ModelSource:
        """Pack a module or a function; raise `InvalidInput` if that is impossible."""
        if isinstance(model, nn.Module):
            return cls(_save_module(model), True, seed)
        if not callable(model):
            raise InvalidInput(
                f"the model is {name_type(model)}; it must be a torch.nn.Module or a "
                "function without arguments that builds it on each worker"
            )
        return cls(pickle_value(model, "the function that builds the model"), False, seed)

    def build(self) -> nn.Module:
        """Build the model on a worker, where its code must be importable."""
        try:
            if self.is_module:
                # May execute code of the sender, as every RPC may: the processes of a session trust
                # each other. On the CPU, since this machine may lack the sender's device.
                model = torch.load(io.BytesIO(self.data), map_location="cpu", weights_only=False)
            else:
                model = self._call_factory()
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise InvalidInput(
                f"the model cannot be built here ({type(error).__name__}: {error}); its code "
                "must be importable under the same name on every worker"
            ) from error
        if not isinstance(model, nn.Module):
            raise InvalidInput(f"the function built {name_type(model)}, not a module")
        return model

    def _call_factory(self) -> Any:
        factory = pickle.loads(self.data)
        # Each worker keeps only some stages of its copy; together they are one model only if all
        # copies start equal. The worker's own generators are left alone.
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return factory()


def _save_module(model: nn.Module) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(model, stream)
    except Exception as error:
        raise InvalidInput(
            f"the model cannot be sent to the workers ({type(error).__name__}: {error}); pass a "
            "function that builds it instead"
        ) from error
    return stream.getvalue()


@dataclass(frozen=True)
class BuiltStages:
    """The stages a worker built, and facts it learned about the whole model.

    Attributes:
        stages: References to its stages, in pipeline order.
        names: Names of the model's parameters and buffers, in the model's order.
        structure: Call structure of the model.
        output: The model's output, pickled, with a `TensorPosition` for every value.
        facts: What must be equal on all workers.
        fixed_inputs: Inputs of a micro-batch if no other shapes work; `None` if any do.
    """

    stages: tuple[rpc.RRef[StageServer], ...]
    names: tuple[str, ...]
    structure: CallStructure
    output: bytes
    facts: Facts
    fixed_inputs: tuple[TensorSpec, ...] | None


def build_on_workers(
    liveness: LivenessCheck,
    source: ModelSource,
    plan: Plan,
    workers: Sequence[str],
    devices: Sequence[str | None],
    sample: Any,
) -> BuiltStages:
    """Build all stages in parallel, given the worker and device of each; return them as one."""
    # One request per worker, not per stage: a worker captures the model once for all its stages.
    by_worker: dict[str, list[int]] = {}
    for index, worker in enumerate(workers):
        by_worker.setdefault(worker, []).append(index)
    started = {}
    for worker, indices in by_worker.items():
        places = {index: devices[index] for index in indices}
        started[worker] = send(worker, call_safely, build, source, plan, places, sample)
    built: dict[str, BuiltStages] = {
        worker: liveness.wait(worker, future, "building the stages")
        for worker, future in started.items()
    }
    compare_facts({worker: each.facts for worker, each in built.items()})
    found = {worker: iter(built[worker].stages) for worker in built}
    return replace(built[workers[0]], stages=tuple(next(found[worker]) for worker in workers))


def build(
    source: ModelSource, plan: Plan, devices: Mapping[int, str | None], sample: Any
) -> BuiltStages:
    """Build a worker's stages from a single capture, since tracing is not thread-safe.

    ``devices`` names the device of each; `None` for the CPU.
    """
    model = source.build()
    cut_model = cut_for_plan(model, plan, sample)
    check_no_references(cut_model, "on another worker")
    check_stateful_layers(cut_model.captured.graph.layers, plan, schedule_of(plan))
    for tied in cut_model.tied:
        raise PlanMismatch(
            f"{list_some(tied.names, 3)} are one weight of several stages, and over RPC a weight "
            "has one stage; plan with --tied together, or use a DistributedPipeline"
        )
    program = cut_model.captured.program
    if program.losses:
        raise InvalidInput(
            f"forward leaves a number with a gradient in {list_some(program.losses, 3)}, as "
            "auxiliary losses are left, and a pipeline over RPC differentiates outputs alone; "
            "return it from forward, or use a DistributedPipeline"
        )
    output = program.output
    if output is None:
        places = [TensorPosition(index) for index in range(len(program.flat_outputs))]
        output = pytree.tree_unflatten(places, program.out_spec)
    return BuiltStages(
        tuple(
            rpc.RRef(_create_server(cut_model, index, device)) for index, device in devices.items()
        ),
        tuple(model.state_dict()),
        cut_model.structure,
        pickle_value(output, "the form of the model's output"),
        list_facts(model, cut_model.captured.graph, plan, schedule_of(plan), {}),
        cut_model.captured.fixed_inputs,
    )


def _create_server(cut_model: CutModel, index: int, device: str | None) -> StageServer:
    stage = cut_model.stages[index]
    place = None if device is None else torch.device(device)
    if place is not None and place.type == "cuda" and place.index is None:
        take_gpu()
        place = torch.device("cuda", torch.cuda.current_device())
    return StageServer(stage, index, place)
