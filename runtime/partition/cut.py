"""Cut a captured model into the stages of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...capture.capture import default_device, trace
from ...capture.captured import Captured
from ...capture.observation.nested_values import map_tensors
from ...capture.program.segment import Segment, adopt_unused, get_references
from ...capture.report import find_inside
from ...capture.sample import CallStructure, check_module, dtype_name, synthetic_inputs
from ...core.errors import CaptureError, InvalidInput, PlanMismatch, first_line
from ...core.graph.graph import Boundary, Parameter
from ...core.plan.plan import Plan
from ...core.units import name_type
from ..meta_init.meta_capture import (
    apply_planned_dtypes,
    buffers_on_meta,
    is_on_meta,
    replace_device,
)
from ..tensor_parallel.exchange import ShardGroup
from ..tensor_parallel.split_model import SplitModel, split_model
from .boundary import enter, enter_copy, leave
from .routes import TensorRoutes, check_planned, find_routes


@dataclass(frozen=True)
class TiedGroup:
    """A trainable parameter held by several stages, whose gradients must be summed.

    It has all its names, and the stages that hold it in ascending order.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class CutModel:
    """A model cut into stages.

    Attributes:
        captured: The whole model.
        stages: One module per stage, from flat tensors to a tuple of tensors. Together they hold
            every parameter and buffer of the model under its own name.
        boundaries: The tensors that cross each cut.
        routes: The tensors that stages send each other.
        tied: Parameters held by more than one stage.
        split: How layers were split over several ranks, if they were.
    """

    captured: Captured
    stages: tuple[Segment, ...]
    boundaries: tuple[Boundary, ...]
    routes: TensorRoutes
    tied: tuple[TiedGroup, ...]
    split: SplitModel | None = None

    @property
    def structure(self) -> CallStructure:
        return self.captured.structure


def cut(
    captured: Captured,
    balance: Sequence[int],
    *,
    direct: bool = False,
    checkpoints: Sequence[tuple[int, int]] = (),
    blocks: Collection[int] = (),
) -> CutModel:
    """Cut a model into stages with the given numbers of layers.

    ``direct`` lets values skip stages that do not use them; see `routes`. ``checkpoints`` are the
    layers that may keep only their inputs: the first, and the one behind the last of each.
    ``blocks`` are the stages whose weights are gathered block by block.
    """
    if sum(balance) != len(captured.layers) or min(balance, default=0) < 1:
        raise PlanMismatch(
            f"the balance {list(balance)} covers {sum(balance)} layers, but the model has "
            f"{len(captured.layers)}; plan again from a profile of this model"
        )
    edges = [0]
    for count in balance:
        edges.append(edges[-1] + count)
    # The plan may come from a profile of an earlier version of this model, so its cuts are checked.
    for position in edges[1:-1]:
        boundary = captured.cuts[position - 1].boundary
        if not boundary.legal:
            raise InvalidInput(
                f"cannot cut after {captured.layers.names[position - 1]!r}: {boundary.reason}"
            )
    _check_checkpoints(captured, checkpoints)
    routes = find_routes(captured, balance, direct=direct)
    stages = tuple(
        captured.segment(
            first,
            last,
            enter=enter_copy
            if captured.mutates_inputs(first, last)  # micro-batches are views of one batch
            else (enter if first else None),
            leave=leave,
            received=[there for route in routes.into(stage) for _, there in route.positions],
            sent=[here for route in routes.out_of(stage) for here, _ in route.positions],
            checkpoints=[span for span in checkpoints if first <= span[0] < last],
            enter_checkpoint=enter,
            copy_changed=enter_copy,
            blocks=stage in blocks,
        )
        for stage, (first, last) in enumerate(pairwise(edges))
    )
    stage_of = [index for index, count in enumerate(balance) for _ in range(count)]
    _adopt_unused(captured, stages, stage_of)
    return CutModel(
        captured=captured,
        stages=stages,
        boundaries=tuple(captured.cuts[position - 1].boundary for position in edges[1:-1]),
        routes=routes,
        tied=_tied_groups(captured.graph.parameters, stage_of),
    )


def _check_checkpoints(captured: Captured, checkpoints: Sequence[tuple[int, int]]) -> None:
    """Check that checkpoints begin and end where a stage could."""
    legal = {0, len(captured.layers)}
    legal.update(each.boundary.after + 1 for each in captured.cuts if each.boundary.legal)
    for first, last in checkpoints:
        if not {first, last} <= legal:
            raise PlanMismatch(
                f"the plan recomputes the layers {captured.layers.names[first]!r} to "
                f"{captured.layers.names[last - 1]!r} by themselves, and this model cannot be cut "
                "there; profile and plan this model again"
            )


def check_no_references(pieces: CutModel, where: str) -> None:
    """Raise `PlanMismatch` if a stage reaches a weight of another one by a reference of its own.

    Where stages work on copies of the weights they share, such a reference finds the original.
    """
    for index, stage in enumerate(pieces.stages):
        others = {
            name
            for other in pieces.stages
            if other is not stage
            for name, _ in other.named_parameters(remove_duplicate=False)
        }
        for name in sorted(get_references(stage) & others):
            raise PlanMismatch(
                f"stage {index} reads {name!r} of another stage through a reference that is not "
                f"registered, which would not find its copy {where}; register the module or "
                "parameter where it is used, or run the plan with stagewright.DistributedPipeline"
            )


def cut_for_plan(
    model: nn.Module,
    plan: Plan,
    sample: Any = None,
    *,
    direct: bool = False,
    device: torch.device | None = None,
    shards: ShardGroup | None = None,
    blocks: Collection[int] = (),
) -> CutModel:
    """Capture a model again at the plan's input shapes and cut it into the plan's stages.

    Args:
        model: The model the plan was made for, possibly on the meta device.
        plan: The plan.
        sample: Used instead of synthetic inputs of the recorded shapes, for models whose capture
            depends on values.
        direct: Whether values are sent directly where the plan says so; otherwise they are
            relayed, with the same results.
        device: Where the stages will run, if not on the model's device.
        shards: This rank's shard of its stages, to split the layers of stages as planned;
            otherwise they stay whole.
        blocks: See `cut`.

    Raises:
        PlanMismatch: The model's layers, shapes or direct sends are not the plan's.
        InvalidInput: The model is not a module, or the plan records no inputs.
    """
    captured = _capture(model, plan, sample)
    captured.program.fixed_mode = plan.fixed_mode or captured.program.fixed_mode
    _check_layers(plan, captured)
    _check_shapes(plan, captured)
    if device is not None:
        replace_device(captured, device, instead_of=default_device(model))
        source = default_device(model).type
        captured_for = device.type if is_on_meta(model) else source
        # Autocast has other lists of operations on each type of device, and none on meta.
        if source != device.type and torch.is_autocast_enabled(captured_for):
            apply_planned_dtypes(captured, plan)
    split = None
    if shards is not None:
        stages = [at for at, count in enumerate(plan.balance) for _ in range(count)]
        degrees = [plan.stages[at].tensor for at in stages]
        split = split_model(captured, degrees, stages, shards)
    is_direct = direct and bool(plan.direct_sends)
    spans = [span for stage in plan.stages for span in stage.checkpoints]
    made = cut(captured, plan.balance, direct=is_direct, checkpoints=spans, blocks=blocks)
    pieces = replace(made, split=split)
    if is_direct:
        check_planned(pieces.routes, plan.direct_sends)
    _follow_modes(model, pieces.stages)
    return pieces


def _capture(model: nn.Module, plan: Plan, sample: Any) -> Captured:
    """Trace the model on a sample, or on synthetic inputs of the plan's shapes."""
    check_module(model)
    if sample is None and not plan.inputs:
        raise InvalidInput("this plan records no inputs; pass a sample of one micro-batch")
    recipe = ""
    if sample is None or plan.input_structure:
        structure = CallStructure.from_json(plan.input_structure)
        recipe = structure.recipe
        if any(stage.tensor > 1 for stage in plan.stages):
            recipe = find_inside(recipe)
        if sample is None:
            sample = structure.as_sample(synthetic_inputs(plan.inputs, default_device(model)))
    if plan.model and type(model).__name__ != plan.model:
        raise PlanMismatch(
            f"the plan was made for a {plan.model}, this is {name_type(model)}; "
            "profile and plan this model"
        )
    with _precision_mismatch_named(model, plan):
        return _trace(model, sample, recipe)


def _check_layers(plan: Plan, captured: Captured) -> None:
    found, planned = tuple(captured.layers.names), plan.layer_names
    if found != planned:
        different = next(
            (pair for pair in zip(found, planned, strict=False) if pair[0] != pair[1]),
            (f"{len(found)} layers", f"{len(planned)} layers"),
        )
        raise PlanMismatch(
            f"the plan was made for another model: here {different[0]!r}, in the plan "
            f"{different[1]!r}; profile and plan this model again"
        )


@contextmanager
def _precision_mismatch_named(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Explain a failed capture if no weight has the precision of an input."""
    try:
        yield
    except Exception as error:
        planned = {
            spec.dtype for spec in plan.inputs if getattr(torch, spec.dtype).is_floating_point
        }
        held = {dtype_name(p.dtype) for p in model.parameters() if p.is_floating_point()}
        if not planned or not held or planned & held:
            raise
        wanted, found = " and ".join(sorted(planned)), " and ".join(sorted(held))
        raise PlanMismatch(
            f"the plan is for inputs of {wanted}, but this model's weights are {found} "
            f"({first_line(error)}); convert the model, or profile and plan it as it is"
        ) from None


def _trace(model: nn.Module, sample: Any, recipe: str) -> Captured:
    if not is_on_meta(model):
        return trace(model, sample, check=False, recipe=recipe)
    with buffers_on_meta(model), torch.device("meta"):
        sample = map_tensors(lambda tensor: tensor.to("meta"), sample)
        try:
            return trace(model, sample, check=False, recipe=recipe)
        except CaptureError as error:
            raise CaptureError(
                f"{error}\nThe model is on the meta device, where Python code cannot read values "
                "(.item(), or if on a tensor). If it does so, build the model with memory",
                module=error.module,
                operation=error.operation,
            ) from error


def _check_shapes(plan: Plan, captured: Captured) -> None:
    """Check that the tensors that cross the cuts have the planned shapes."""
    after = 0
    for count, planned in zip(plan.balance, plan.boundaries, strict=False):
        after += count
        found = captured.cuts[after - 1].boundary
        ours = [tensor.shape for tensor in found.tensors]
        theirs = [tensor.shape for tensor in planned.tensors]
        if ours != theirs:
            raise PlanMismatch(
                f"after {captured.layers.names[after - 1]!r} this model sends {ours}, but the "
                f"plan was made for {theirs}; profile and plan this model again"
            )


def _follow_modes(model: nn.Module, stages: Sequence[Segment]) -> None:
    """Give modules that capture added the training mode of the module they came from."""
    for stage in stages:
        if not model.training:
            stage.check_mode(False)
        stage.follow_modes(model)


def _adopt_unused(captured: Captured, stages: tuple[Segment, ...], stage_of: list[int]) -> None:
    """Assign parameters and buffers that no layer reads to the stage of their nearest relative.

    They are in the model's state, so some stage has to save, load and move them.
    """
    records = captured.graph.parameters
    owners = {
        name: stage_of[record.layers[0]]
        for record in records
        if record.layers
        for name in record.names
    }
    for record in records:
        missing = [
            name for name in record.names if not any(_holds(stage, name) for stage in stages)
        ]
        for name in missing:
            home = stage_of[record.layers[0]] if record.layers else _nearest(name, owners)
            adopt_unused(stages[home], captured.program.model, [name])


def _holds(stage: Segment, name: str) -> bool:
    value: Any = stage
    for part in name.split("."):
        value = getattr(value, part, None)
    return value is not None


def _nearest(name: str, owners: dict[str, int]) -> int:
    """Return the stage of the parameter whose path has the longest common prefix, or stage 0."""

    def shared(other: str) -> int:
        count = 0
        for ours, theirs in zip(name.split("."), other.split("."), strict=False):
            if ours != theirs:
                break
            count += 1
        return count

    best = max(owners, key=shared, default=None)
    return owners[best] if best is not None and shared(best) else 0


def _tied_groups(parameters: tuple[Parameter, ...], stage_of: list[int]) -> tuple[TiedGroup, ...]:
    groups = []
    for record in parameters:
        stages = tuple(sorted({stage_of[layer] for layer in record.layers}))
        if record.trainable and len(stages) > 1:
            groups.append(TiedGroup(record.names, stages))
    return tuple(groups)
