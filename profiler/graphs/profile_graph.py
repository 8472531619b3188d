"""Measure a graph without its model's code, one layer at a time, larger than memory or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from ...capture.observation.autocast_cache import keep_conversions
from ...capture.observation.preserve import preserve_random_state
from ...capture.program.program import value_of
from ...capture.program.segment import get_constants
from ...core.errors import MeasurementError
from ...core.graph.graph import Graph
from ...core.profile.profile import Profile, Provenance
from ...core.progress import Progress
from ...core.requests.requests import ProfilingOptions
from ...core.units import format_bytes
from ..layers.cost_classes import cost_classes, members_of
from ..layers.error_attribution import blamed, need
from ..layers.first_run import waiting_gradients
from ..layers.layer_run import LayerRun, bytes_of, layer_runs
from ..layers.memory_run import memory_run
from ..layers.precision import as_in_training, forward_context
from ..layers.tensor_shares import find_shares, list_splits
from ..machine.clock import Clock
from ..machine.conditions import busy_neighbours, threads, watched
from ..machine.memory import ON_CUDA, free_memory_bytes
from ..machine.provenance import check_device, provenance
from ..measure.compile_layers import compile_layers
from ..measure.session import Measuring, WholeModel
from ..measure.timed_passes import Passes, Samples
from ..measure.to_profile import graph_fields, layer_profile
from .boundary_inputs import MAX_HELD_BYTES, BoundaryValues
from .memory_needed import fixed_bytes, least_bytes
from .random_values import materialised
from .rebuilt_capture import Rebuilt, rebuild_captured
from .saved_storages import Kept, LayerTable, kept_bytes, sharing, storage_table


@dataclass(frozen=True)
class MeasuredLayer:
    """Measurements of one layer; ``on_its_own`` if the device works while the host issues more.

    Bytes are those of `MemoryRun`, without gradients that wait for layers in front.
    """

    samples: Samples
    kept: Sequence[Kept]
    output_bytes: int
    forward_bytes: int
    backward_bytes: int
    on_its_own: bool


def measure_layer(
    rebuilt: Rebuilt,
    run: LayerRun,
    inputs: BoundaryValues,
    options: ProfilingOptions,
    budget_s: float,
    generator: torch.Generator,
) -> MeasuredLayer:
    """Give a layer weights and inputs, run it for memory, then for time.

    The budget is for repeats beyond the least number; the generator's device is where it runs.
    """
    device, segment = generator.device, run.segment
    assert segment is not None, "the loss is no layer"
    context = forward_context(options, device)
    clock = Clock(device, shared=options.busy_neighbours > 0)
    with blamed(run), materialised(segment, rebuilt.state, device, generator):
        trainable: list[Tensor] = [p for p in segment.parameters() if p.requires_grad]
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        # The run's own parameters are on the meta device.
        live = replace(run, parameters=trainable)
        values = inputs.of(run.reads)
        table = LayerTable(segment, ())
        found = memory_run(live, values, table, device, context)
        given = [values[node] for node in run.reads]
        kept = table.places(found.kept, given, found.produced, get_constants(segment).values())
        output_bytes = bytes_of(found.produced)
        needs = found.forward_bytes, found.backward_bytes
        # The outputs would stay in memory beside those of the timed passes.
        del found, given
        if options.compile:
            compile_layers([live], values, context)
        samples = Samples()
        passes = Passes([live], values, clock, context, [samples])
        whole = WholeModel(None, [live], (), clock, context)
        session = Measuring(passes, whole, [[0]], [samples], [run.name])
        session.run(budget_s, split=not options.compile)
    return MeasuredLayer(samples, kept, output_bytes, *needs, clock.cuda)


SEED = 0
"""Of made-up weights and inputs."""

NOTE = (
    "measured without the model's code, one layer at a time on made-up values; "
    "no run of the whole model to compare with"
)


def profile_graph(
    graph: Graph, *, options: ProfilingOptions | None = None, progress: Progress | None = None
) -> Profile:
    """Measure every layer of a graph, with random weights, holding one layer at a time.

    Each layer gets memory, made-up weights and inputs of the shapes and strides of the real ones,
    is measured forwards and backwards, and is let go, so that a model needs no more memory than
    its largest layer. One layer of each cost class is measured. The storages saved for the backward
    add up to the storage table that measuring the whole model gives. torch's random generators are
    seeded, and restored afterwards.

    Only torch's code is run. Operators are not safe against every argument, though, so untrusted
    graphs are measured in a separate process (`profiler.measure_worker`).

    Args:
        graph: Captured with ``rebuildable`` set.
        options: Device (the CPU if none is named), threads, neighbours, precision, and budget.
        progress: Called with layers done, layers in all, and the layer's name.

    Raises:
        InvalidInput: The graph cannot be rebuilt, or contradicts itself, or the caller is in
            inference mode.
        MeasurementError: A layer failed, or does not fit in memory; the message names it, and what
            it needs.
    """
    options = options or ProfilingOptions()
    progress = progress or (lambda *_: None)
    device = torch.device(check_device(options.device or "cpu"))
    with as_in_training(device), threads(options.num_threads), preserve_random_state():
        torch.manual_seed(SEED)
        rebuilt = rebuild_captured(graph, device)
        runs = layer_runs(rebuilt.captured)
        classes = cost_classes(rebuilt.captured, runs)
        generator = torch.Generator(device).manual_seed(SEED)
        groups = _groups(classes, runs, deduplicate=options.deduplicate)
        chosen = [runs[members[len(members) // 2]] for members in groups]
        held = rebuilt.captured.program.inputs
        # All layers are checked before the first is measured; what the tightest leaves may hold
        # values throughout.
        left_bytes = min(_check_fits(run, device, held) for run in chosen)
        inputs = BoundaryValues(rebuilt, runs, device, generator, left_bytes)
        found: dict[int, MeasuredLayer] = {}
        with busy_neighbours(options.busy_neighbours), watched(device) as clocks:
            for done, (run, members) in enumerate(zip(chosen, groups, strict=True)):
                progress(done, len(groups), run.name)
                # Again, without the inputs, which are there by now: free memory changes.
                _check_fits(run, device)
                budget_s = options.budget_s / len(groups)
                with keep_conversions():
                    measured = measure_layer(rebuilt, run, inputs, options, budget_s, generator)
                found |= dict.fromkeys(members, measured)
        progress(len(groups), len(groups), "all layers")
    layers = [found[index] for index in range(len(runs))]
    where, notes = provenance(device, options, clocks.clocks()), (NOTE, *clocks.notes)
    return _document(rebuilt, runs, classes, layers, where, notes)


def _groups(
    classes: Sequence[str], runs: Sequence[LayerRun], *, deduplicate: bool
) -> list[list[int]]:
    """Layers measured as one: of one cost class, with the same values sharing memory."""
    if not deduplicate:
        return [[index] for index in range(len(runs))]
    return members_of([f"{name} {sharing(run)}" for name, run in zip(classes, runs, strict=True)])


def _check_fits(run: LayerRun, device: torch.device, held: Sequence[fx.Node] = ()) -> int:
    """Return the bytes a layer leaves; refuse one before the system ends the process over it.

    Values ``held`` have yet to be made and are there beside it.
    """
    if device.type in ON_CUDA:
        torch.cuda.empty_cache()  # what earlier layers left in it is free
        available: int | None = torch.cuda.mem_get_info(device)[0]
    else:
        available = free_memory_bytes()
    if available is None:
        return MAX_HELD_BYTES
    least = least_bytes(run, held)
    if least > available:
        raise MeasurementError(
            f"{run.name} does not fit: {need(run)}, buffers and constants "
            f"{format_bytes(fixed_bytes(run))}, with all inputs of the model "
            f"{format_bytes(least)}, and {format_bytes(available)} are free on "
            f"{device}; use a smaller micro-batch, or a device with more memory"
        )
    return available - least


def _document(
    rebuilt: Rebuilt,
    runs: Sequence[LayerRun],
    classes: Sequence[str],
    found: Sequence[MeasuredLayer],
    provenance: Provenance,
    notes: tuple[str, ...],
) -> Profile:
    graph, resident = rebuilt.graph, rebuilt.resident
    values = {n: value_of(n) for run in runs for n in run.writes if n is not None}
    # A layer measured alone never sees the gradients of skips that wait for layers in front.
    waiting = waiting_gradients(runs, values)
    layers = tuple(
        layer_profile(
            layer.model_copy(update={"cost_class": name}),
            measured.samples,
            measured.on_its_own,
            saved_activation_bytes=kept_bytes(run, measured.kept, resident),
            output_bytes=measured.output_bytes,
            workspace_bytes=max(measured.forward_bytes, measured.backward_bytes + passing),
        )
        for layer, name, run, measured, passing in zip(
            graph.layers, classes, runs, found, waiting, strict=True
        )
    )
    return Profile(
        **graph_fields(graph),
        input_structure=graph.input_structure,
        layers=layers,
        storages=storage_table(runs, [entry.kept for entry in found], resident),
        splits=list_splits(find_shares(rebuilt.captured), layers),
        provenance=provenance,
        notes=(*graph.notes, *notes),
    )
