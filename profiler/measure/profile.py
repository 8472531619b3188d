"""Measure a model layer by layer: times, activations, workspace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...capture.capture import default_device
from ...capture.captured import Captured
from ...capture.observation.autocast_cache import keep_conversions
from ...capture.observation.generation_cache import switch_off_caches
from ...capture.observation.preserve import preserve_model
from ...capture.sample import read_sample
from ...core.errors import InvalidInput
from ...core.models.families import ModelSpec
from ...core.models.training_memory import RECIPES, Recipe
from ...core.profile.profile import Profile
from ...core.progress import Progress
from ...core.requests.requests import ProfilingOptions
from ..layers.cost_classes import cost_classes, members_of
from ..layers.first_run import first_run
from ..layers.layer_run import layer_runs
from ..layers.loss_layer import Loss, LossFunction, notes_on_numbers
from ..layers.memory_run import PeakMemory
from ..layers.precision import Context, as_in_training, forward_context
from ..layers.trace_model import make_gradients, traced
from ..machine.clock import Clock
from ..machine.conditions import busy_neighbours, threads, watched
from ..machine.memory import ON_CUDA
from ..machine.provenance import provenance
from .compile_layers import NOTE, compile_layers
from .session import Measuring, WholeModel, eager_call
from .timed_passes import Passes, Samples
from .to_profile import Measurements, build_profile


def profile(
    model: nn.Module,
    sample: Any,
    *,
    options: ProfilingOptions | None = None,
    loss_fn: LossFunction | None = None,
    target: Tensor | None = None,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure every layer of a model at micro-batch size, on the device it is on.

    Gradients are on and autocast is as the options say, whatever the caller has around this call.
    Layers are timed inside forward and backward passes over the model, on the values they really
    receive, and gradients accumulate into existing ones, as they do in training. A first run of
    every layer finds what it keeps for its backward; one cold pass does not count. Then passes and
    runs of the whole model take turns, at least three each, and go on until the total is certain to
    half a percent or the budget is spent, over the layers whose spread matters most. Of layers
    that cost the same one is measured in each pass, another one every time. The difference between
    the sum of the layers and the whole model is the profile's own error; nothing is rescaled.
    Layers that are compiled one by one have no whole model to be held against.

    The model, its parameters, gradients, buffers, hooks and modes, and the random generators are
    left as they were found, whatever happens.

    Args:
        model: Any module `capture.capture.trace` accepts.
        sample: One micro-batch: an argument, a tuple (positional) or a dict of them (keywords).
        options: Device, threads, neighbours, precision, and time budget.
        loss_fn: ``loss_fn(output, target)``; if given, its cost is charged to the last stage.
        target: What the loss is taken against.
        spec: Recorded in the profile, so that a plan can build the model again.
        progress: Called with layers done, layers in all, and the layer's name.

    Raises:
        InvalidInput: The model is no ``nn.Module``, the sample does not fit it, it is on another
            device, the loss is not one number, or the caller is in inference mode.
        CaptureError: The model cannot be traced.
        MeasurementError: A layer failed, or ran out of memory; the message names it, and what it
            needed.
    """
    options = options or ProfilingOptions()
    return measure_profile(model, sample, options, loss_fn, target, spec, progress)[0]


def measure_profile(
    model: nn.Module,
    sample: Any,
    options: ProfilingOptions,
    loss_fn: LossFunction | None = None,
    target: Tensor | None = None,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> tuple[Profile, float]:
    """Measure as `profile` does; return also the seconds of the passes over layers."""
    device = default_device(model)
    with as_in_training(device):
        _check_device(model, device, options.device)
        _check_precision(model, options.precision)
        structure, flat = read_sample(model, sample)
        flat = tuple(tensor.detach().to(device) for tensor in flat)
        loss = None if loss_fn is None else Loss(loss_fn, target, device)
        training = None if model.training else True
        context = forward_context(options, device)
        with threads(options.num_threads), preserve_model(model, training=training):
            tracing = forward_context(options, device, cached=False)
            captured = traced(model, structure, flat, context, tracing)
            with (
                _sum_gradients_as(model, options.precision),
                switch_off_caches(model),
                busy_neighbours(options.busy_neighbours),
                watched(device) as clocks,
                keep_conversions(),
            ):
                found, layers_s = _measure(captured, flat, loss, options, context, progress)
        where = provenance(device, options, clocks.clocks())
        found = replace(found, notes=(*found.notes, *clocks.notes))
        return build_profile(found, spec, where), layers_s


def _measure(
    captured: Captured,
    flat: tuple[Tensor, ...],
    loss: Loss | None,
    options: ProfilingOptions,
    context: Context,
    progress: Progress | None,
) -> tuple[Measurements, float]:
    model, clock = captured.program.model, Clock(flat[0].device, shared=options.busy_neighbours > 0)
    runs = layer_runs(captured)
    classes = cost_classes(captured, runs)
    groups = members_of(classes) if options.deduplicate else [[i] for i in range(len(runs))]
    if loss is not None:
        runs.append(loss.run(captured))
        groups.append([len(runs) - 1])
    # Before anything is timed: in training gradients exist from the second step on, and the
    # backward adds to them instead of allocating.
    make_gradients(runs)
    inputs = dict(zip(captured.program.inputs, flat, strict=True))
    first = first_run(model, runs, inputs, len(classes), context)
    notes = notes_on_numbers(captured, first.values, runs[len(classes) :], context)
    if options.compile:
        compile_layers(runs, first.values, context)
    samples = [Samples() for _ in runs]
    # Layers of a class share one list of samples, whichever of them a pass measures.
    for group in groups:
        for index in group:
            samples[index] = samples[group[0]]
    passes = Passes(runs, first.values, clock, context, samples)
    call = None if options.compile else eager_call(captured, loss)
    whole = WholeModel(call, runs, flat, clock, context)
    measuring = Measuring(passes, whole, groups, samples, [run.name for run in runs], progress)
    peak = PeakMemory(flat[0].device)
    measuring.run(options.budget_s, split=not options.compile)
    notes += (*peak.notes(), *([NOTE] if options.compile else []))
    found = Measurements(
        captured, runs, first, samples, classes, whole, notes, on_its_own=clock.cuda
    )
    return found, measuring.layers_s


def _check_precision(model: nn.Module, precision: Recipe | None) -> None:
    if precision is None:
        return
    recipe = RECIPES[precision]
    types = {p.dtype for p in model.parameters() if p.requires_grad}
    if types and types != {wanted := getattr(torch, recipe.weights)}:
        found = " and ".join(sorted(str(each).removeprefix("torch.") for each in types))
        raise InvalidInput(
            f"precision {precision!r} means {recipe.text}, but the model's weights are {found}; "
            f"convert it with model.to({wanted})",
            field="/profiling/precision",
        )


@contextmanager
def _sum_gradients_as(model: nn.Module, precision: Recipe | None) -> Iterator[None]:
    """Have gradients summed in a recipe's type, to which each layer's are converted first."""
    recipe = RECIPES[precision] if precision is not None else None
    if recipe is None or recipe.gradients == recipe.weights:
        yield
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None  # of another type; the caller's are put back in the end
        parameter.grad_dtype = getattr(torch, recipe.gradients)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype


def _check_device(model: nn.Module, device: torch.device, wanted: str | None) -> None:
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(gpus := sorted(str(place) for place in places if place.type in ON_CUDA)) > 1:
        raise InvalidInput(f"the model is on {' and '.join(gpus)}; move it to one of them")
    asked = device if wanted is None else torch.device(wanted)
    if asked.type != device.type or asked.index not in (None, device.index):
        raise InvalidInput(
            f"the model is on {device}, but the options ask for {wanted}; "
            f"move it with model.to({wanted!r})",
            field="/profiling/device",
        )
