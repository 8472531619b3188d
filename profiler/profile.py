"""Measure a model layer by layer: times, activations, workspace."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from ..capture.capture import Captured, default_device, trace
from ..capture.sample import read_sample
from ..capture.state import preserved
from ..core.errors import InvalidInput, MeasurementError, StagewrightError
from ..core.families import ModelSpec
from ..core.options import ProfilingOptions
from ..core.profile import LayerProfile, LossProfile, Profile, Reconciliation, Timing
from .clock import Clock, timing
from .layer_runs import LayerRun, backward_pairs, layer_runs
from .memory import PeakMemory, SavedStorages
from .neighbours import busy_neighbours
from .out_of_memory import is_out_of_memory
from .provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Iterator

Progress = Callable[[int, int, str], None]

MIN_PASSES = 3
MAX_PASSES = 25
WHOLE_MODEL_REPEATS = 3


@dataclass
class Measurements:
    """Samples of one layer, a float a repeat."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    workspace_bytes: int = 0
    output_bytes: int = 0


def profile(
    model: nn.Module,
    sample: Any,
    *,
    options: ProfilingOptions | None = None,
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
    target: Tensor | None = None,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure every layer of a model at micro-batch size, on the device it is on.

    Each layer runs alone on the values it really receives: one warm-up pass over the model, then
    passes over all layers in turn until the budget is spent (at least three, at most 25), so that
    a slow moment of the machine touches every layer alike. The backward pass accumulates into
    existing gradients, as it does in training. The model, its gradients, buffers and modes, and
    the random generators are left as they were found.

    Args:
        model: Any module `capture.capture.trace` accepts.
        sample: One micro-batch: a tensor, a tuple (positional) or a dict (keywords).
        options: Device, threads, neighbours and time budget.
        loss_fn: ``loss_fn(output, target)``; if given, its cost is charged to the last stage.
        target: What the loss is taken against.
        spec: Recorded in the profile, so that a plan can build the model again.
        progress: Called with layers done, layers in all, and the layer's name.

    Raises:
        InvalidInput: The sample does not fit the model, or the model is on another device.
        CaptureError: The model cannot be traced.
        MeasurementError: A layer failed, or ran out of memory; the message names it.
    """
    options = options or ProfilingOptions()
    device = default_device(model)
    _check_device(device, options.device)
    training = None if model.training else True
    structure, flat = read_sample(model, sample)
    flat = tuple(tensor.detach().to(device) for tensor in flat)
    with _threads(options.num_threads), preserved(model, training=training):
        captured = trace(model, structure.as_sample(flat))
        session = _Session(captured, flat, device, progress or (lambda *_: None))
        with busy_neighbours(options.busy_neighbours):
            session.warm_up(loss_fn, target)
            session.measure(options.budget_s)
            whole = session.whole_model(loss_fn, target)
    return session.document(spec, options, whole)


class _Session:
    """One measurement, from warm-up to document."""

    def __init__(
        self,
        captured: Captured,
        flat: tuple[Tensor, ...],
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.captured = captured
        self.model = captured.program.model
        self.device = device
        self.clock = Clock(device)
        self.progress = progress
        self.runs = layer_runs(captured)
        self.flat = flat
        self.values: dict[fx.Node, Tensor] = dict(
            zip(captured.program.inputs, self.flat, strict=True)
        )
        self.saved = SavedStorages(self.model, self.flat)
        self.found = [Measurements() for _ in self.runs]
        self.loss: _LossRun | None = None
        self.loss_found = Measurements()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def warm_up(
        self, loss_fn: Callable[[Any, Tensor], Tensor] | None, target: Tensor | None
    ) -> None:
        """One pass that also finds values, saved storages and workspace."""
        for index, run in enumerate(self.runs):
            with _blamed(run.name):
                leaves, tensors = run.inputs(self.values)
                for copy, leaf in zip(tensors, leaves, strict=True):
                    if copy is not leaf:
                        self.saved.same_storage(copy, leaf)
                peak = PeakMemory()
                with peak, self.saved.during(index):
                    outputs = run.function(*tensors)
                forward_workspace = peak.peak_bytes - peak.live_bytes()
                self._keep(run, outputs, index)
                self.found[index].workspace_bytes = max(
                    forward_workspace, _backward_workspace(peak, run, leaves, outputs)
                )
        if loss_fn is not None:
            if target is None:
                raise InvalidInput("a loss needs a target; give target=")
            results = [
                self.values[node].detach() if isinstance(node, fx.Node) else node
                for node in self.captured.program.flat_outputs
            ]
            self.loss = _LossRun(self.captured, loss_fn, target.to(self.device), results)
            with _blamed("the loss"), self.saved.during(len(self.runs)):
                self.loss.forward()

    def _keep(self, run: LayerRun, outputs: tuple[Any, ...], index: int) -> None:
        for node, value in zip(run.writes, outputs, strict=True):
            self.values[node] = value.detach()
            self.found[index].output_bytes += value.numel() * value.element_size()

    def measure(self, budget_s: float) -> None:
        """Passes over all layers, as many as the budget allows after a first one is timed."""
        passes, done = MIN_PASSES, 0
        while done < passes:
            started = time.perf_counter()
            for index, run in enumerate(self.runs):
                self.progress(done * len(self.runs) + index, passes * len(self.runs), run.name)
                with _blamed(run.name):
                    self._time(run, self.found[index])
            if self.loss is not None:
                with _blamed("the loss"):
                    self.loss.time(self.clock, self.loss_found)
            done += 1
            if done == 1:
                affordable = int(budget_s / max(time.perf_counter() - started, 1e-6))
                passes = min(max(affordable, MIN_PASSES), MAX_PASSES)
        self.progress(passes * len(self.runs), passes * len(self.runs), "whole model")

    def _time(self, run: LayerRun, found: Measurements) -> None:
        leaves, tensors = run.inputs(self.values)
        self.clock.settle()
        start = self.clock.mark()
        outputs = run.function(*tensors)
        middle = self.clock.mark()
        roots, gradients = backward_pairs(outputs)
        targets = run.targets(leaves)
        begin = self.clock.mark()
        if roots and targets:
            torch.autograd.backward(roots, gradients, inputs=targets)
        end = self.clock.mark()
        found.forward_s.append(self.clock.seconds(start, middle))
        found.backward_s.append(self.clock.seconds(begin, end) if roots and targets else 0.0)

    def whole_model(
        self, loss_fn: Callable[[Any, Tensor], Tensor] | None, target: Tensor | None
    ) -> tuple[Timing, Timing]:
        """Forward and backward of all layers together, loss included if there is one."""
        segment = self.captured.segment(0, len(self.runs))
        found = Measurements()
        in_place = self.captured.mutates_inputs(0, len(self.runs))
        with _blamed("the whole model"):
            for _ in range(WHOLE_MODEL_REPEATS):
                flat = [tensor.clone() if in_place else tensor for tensor in self.flat]
                self.clock.settle()
                start = self.clock.mark()
                outputs = segment(*flat)
                if loss_fn is not None and target is not None:
                    output = self.captured.unflatten_output(outputs)
                    outputs = (loss_fn(output, target.to(self.device)),)
                middle = self.clock.mark()
                roots, gradients = backward_pairs(outputs)
                begin = self.clock.mark()
                torch.autograd.backward(roots, gradients)
                end = self.clock.mark()
                found.forward_s.append(self.clock.seconds(start, middle))
                found.backward_s.append(self.clock.seconds(begin, end))
        return timing(found.forward_s), timing(found.backward_s)

    def document(
        self, spec: ModelSpec | None, options: ProfilingOptions, whole: tuple[Timing, Timing]
    ) -> Profile:
        graph = self.captured.graph
        layers = tuple(
            LayerProfile(
                layer=layer,
                forward=timing(found.forward_s),
                backward=timing(found.backward_s),
                saved_activation_bytes=self.saved.bytes_of(index),
                output_bytes=found.output_bytes,
                workspace_bytes=found.workspace_bytes,
            )
            for index, (layer, found) in enumerate(zip(graph.layers, self.found, strict=True))
        )
        loss = None
        if self.loss is not None:
            loss = LossProfile(
                forward=timing(self.loss_found.forward_s),
                backward=timing(self.loss_found.backward_s),
                saved_activation_bytes=self.saved.bytes_of(len(self.runs)),
            )
        total_s = sum(part.forward.median_s + part.backward.median_s for part in layers)
        if loss is not None:
            total_s += loss.forward.median_s + loss.backward.median_s
        whole_s = whole[0].median_s + whole[1].median_s
        return Profile(
            model=graph.model,
            spec=spec,
            inputs=graph.inputs,
            input_structure=self.captured.structure.to_json(),
            layers=layers,
            boundaries=graph.boundaries,
            edges=graph.edges,
            parameters=graph.parameters,
            storages=self.saved.records(len(layers)),
            loss=loss,
            reconciliation=Reconciliation(
                whole_forward=whole[0],
                whole_backward=whole[1],
                relative_error=(total_s - whole_s) / whole_s if whole_s else 0.0,
            ),
            provenance=provenance(self.device, options),
            fixed_mode=graph.fixed_mode,
            notes=graph.notes,
        )


class _LossRun:
    """The loss function on the model's own outputs."""

    def __init__(
        self,
        captured: Captured,
        loss_fn: Callable[[Any, Tensor], Tensor],
        target: Tensor,
        outputs: list[Any],
    ) -> None:
        self._captured, self._loss_fn, self._target = captured, loss_fn, target
        self._outputs = outputs

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        """The loss and the leaves it is differentiated for."""
        leaves = [
            value.detach().requires_grad_(value.is_floating_point())
            if isinstance(value, Tensor)
            else value
            for value in self._outputs
        ]
        loss = self._loss_fn(self._captured.unflatten_output(leaves), self._target)
        return loss, [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def time(self, clock: Clock, found: Measurements) -> None:
        clock.settle()
        start = clock.mark()
        loss, leaves = self.forward()
        middle = clock.mark()
        torch.autograd.backward([loss], inputs=leaves)
        end = clock.mark()
        found.forward_s.append(clock.seconds(start, middle))
        found.backward_s.append(clock.seconds(middle, end))


def _backward_workspace(
    peak: PeakMemory, run: LayerRun, leaves: list[Tensor], outputs: tuple[Any, ...]
) -> int:
    """Most memory its backward has in use beyond what the forward left behind."""
    roots, gradients = backward_pairs(outputs)
    targets = run.targets(leaves)
    if not roots or not targets:
        return 0
    before = peak.restart_peak()
    with peak:
        torch.autograd.backward(roots, gradients, inputs=targets)
    return peak.peak_bytes - before


def _check_device(device: torch.device, wanted: str | None) -> None:
    if wanted is not None and torch.device(wanted).type != device.type:
        raise InvalidInput(
            f"the model is on {device}, but the options ask for {wanted}; "
            f"move it with model.to({wanted!r})",
            field="/profiling/device",
        )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    """Name the layer in whatever goes wrong inside."""
    try:
        yield
    except StagewrightError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        if is_out_of_memory(error):
            raise MeasurementError(
                f"out of memory in {name}: {reason}; use a smaller micro-batch, or a device with "
                "more memory"
            ) from error
        raise MeasurementError(
            f"{name} failed while being measured: {type(error).__name__}: {reason}"
        ) from error
