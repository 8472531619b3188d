"""Measurement of one layer of a rebuilt graph, which has memory only meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from ...capture.program.segment import get_constants
from ...core.requests.requests import ProfilingOptions
from ..layers.error_attribution import blamed
from ..layers.layer_run import LayerRun, bytes_of
from ..layers.memory_run import memory_run
from ..layers.precision import forward_context
from ..machine.clock import Clock
from ..measure.compile_layers import compile_layers
from ..measure.sampling import worth_repeating
from ..measure.session import MAX_PASSES, MIN_PASSES, MIN_SPLIT_PASSES, SPLIT_EVERY
from ..measure.timed_passes import Passes, Samples
from .boundary_inputs import BoundaryValues
from .random_values import materialised
from .rebuilt_capture import Rebuilt
from .saved_storages import Kept, LayerTable


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
        table = LayerTable(segment)
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
        _repeat(passes, samples, budget_s, split=not options.compile)
    return MeasuredLayer(samples, kept, output_bytes, *needs, clock.cuda)


def _repeat(passes: Passes, samples: Samples, budget_s: float, *, split: bool) -> None:
    """Repeat passes: a cold run, the minimum, then more until the median is certain enough."""
    passes.run([0], keep=False)
    started = time.perf_counter()
    for done in range(MIN_PASSES):
        passes.run([0])
        if split and done < MIN_SPLIT_PASSES:
            passes.run([0], split=True)
    for extra in range(1, MAX_PASSES - MIN_PASSES + 1):
        totals = samples.total_s()
        spent_s = time.perf_counter() - started
        if not worth_repeating([totals], [1]) or spent_s + median(totals) > budget_s:
            return
        passes.run([0], split=split and extra % SPLIT_EVERY == 0)
