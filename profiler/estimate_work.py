"""What every layer of a model computes and keeps, found by running it on the meta device.

Nothing is allocated: tensors there have shapes, not memory, so neither the model nor its sample
need fit anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture.capture import Captured, trace
from ..capture.program import tensors_of
from ..capture.sample import read_sample
from ..core.accelerators import Backend
from ..core.errors import InvalidInput
from ..core.profile import SavedStorage
from .estimate_kernels import DeviceKernels
from .flops import Cost, cost_of
from .layer_runs import backward_pairs, detached, layer_runs
from .memory import PeakMemory, SavedStorages

LossFunction = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class LayerWork:
    """One layer (or the loss) for one micro-batch.

    Attributes:
        forward: Operations of its forward.
        backward: Operations of its whole backward, gradients summed into existing ones.
        backward_input: Those of a backward that computes gradients of inputs alone.
        saved_bytes: Distinct storages kept for the backward.
        output_bytes: What later layers read.
        workspace_bytes: Most memory in use beyond inputs, outputs, parameters and saved storages.
    """

    forward: tuple[Cost, ...] = ()
    backward: tuple[Cost, ...] = ()
    backward_input: tuple[Cost, ...] = ()
    saved_bytes: int = 0
    output_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of products, forward and backward."""
        return sum(cost.flops for cost in (*self.forward, *self.backward))


@dataclass(frozen=True)
class ModelWork:
    """All layers of a captured model, the loss where it has one, and the storage table."""

    captured: Captured
    layers: tuple[LayerWork, ...]
    loss: LayerWork | None
    storages: tuple[SavedStorage, ...]

    @property
    def parts(self) -> tuple[LayerWork, ...]:
        """The layers, and the loss behind them."""
        return self.layers if self.loss is None else (*self.layers, self.loss)


def model_work(
    model: nn.Module,
    sample: Any,
    *,
    backend: Backend,
    loss_fn: LossFunction | None = None,
    target: Tensor | None = None,
) -> ModelWork:
    """Capture a model on the meta device and find what its layers do.

    Args:
        model: All its parameters and buffers on the meta device; gradients are put on it.
        sample: One micro-batch, likewise.
        backend: Whose kernels the operations are.
        loss_fn: ``loss_fn(output, target)``, if its cost is wanted.
        target: What the loss is taken against, on the meta device.

    Raises:
        CaptureError: The model cannot be traced.
        InvalidInput: The sample does not fit, or there is a loss without a target.
    """
    if loss_fn is not None and target is None:
        raise InvalidInput("a loss needs a target; give target=")
    model.train()
    structure, flat = read_sample(model, sample)
    captured = trace(model, structure.as_sample(flat), check=False)
    with torch.device("meta"), DeviceKernels(backend):
        run = _MetaRun(captured, flat)
        layers = tuple(run.layer(index) for index in range(len(run.runs)))
        loss = None if loss_fn is None or target is None else run.loss(loss_fn, target)
    return ModelWork(captured, layers, loss, run.saved.records(len(layers)))


class _Recorder(TorchDispatchMode):
    """Lists what every operation inside costs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: list[Cost] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        cost = cost_of(func, args, kwargs, result)
        if cost is not None:
            self.costs.append(cost)
        return result


class _MetaRun:
    """One pass over the layers, forwards and backwards."""

    def __init__(self, captured: Captured, flat: tuple[Tensor, ...]) -> None:
        self.captured = captured
        self.runs = layer_runs(captured)
        model = captured.program.model
        self.saved = SavedStorages(model, flat)
        self.values: dict[fx.Node, Any] = dict(zip(captured.program.inputs, flat, strict=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def layer(self, index: int) -> LayerWork:
        run = self.runs[index]
        leaves = run.leaves(self.values)
        given = run.arguments(leaves)
        for copy, leaf in zip(tensors_of(given), tensors_of(leaves), strict=True):
            if copy is not leaf:
                self.saved.same_storage(copy, leaf)
        peak, forward = PeakMemory(), _Recorder()
        with peak, forward, self.saved.during(index):
            outputs = run.function(*given)
        workspace = peak.peak_bytes - peak.live_bytes()
        output_bytes = 0
        for node, value in zip(run.writes, outputs, strict=True):
            output_bytes += sum(t.numel() * t.element_size() for t in tensors_of(value))
            if node is not None:
                self.values[node] = detached(value)
        inputs = [leaf for leaf in tensors_of(leaves) if leaf.requires_grad]
        inputs_alone, whole, backward_peak = _backward(peak, inputs, run.parameters, outputs)
        return LayerWork(
            forward=tuple(forward.costs),
            backward=whole,
            backward_input=inputs_alone,
            saved_bytes=self.saved.bytes_of(index),
            output_bytes=output_bytes,
            workspace_bytes=max(workspace, backward_peak),
        )

    def loss(self, loss_fn: LossFunction, target: Tensor) -> LayerWork:
        leaves = [
            detached(self.values[node], True) if isinstance(node, fx.Node) else node
            for node in self.captured.program.flat_outputs
        ]
        number = len(self.runs)
        forward, backward = _Recorder(), _Recorder()
        with forward, self.saved.during(number):
            loss = loss_fn(self.captured.unflatten_output(leaves), target)
        inputs = [leaf for leaf in tensors_of(leaves) if leaf.requires_grad]
        with backward:
            torch.autograd.backward([loss], inputs=inputs)
        return LayerWork(
            forward=tuple(forward.costs),
            backward=tuple(backward.costs),
            backward_input=tuple(backward.costs),
            saved_bytes=self.saved.bytes_of(number),
        )


def _backward(
    peak: PeakMemory, inputs: list[Tensor], parameters: list[Tensor], outputs: tuple[Any, ...]
) -> tuple[tuple[Cost, ...], tuple[Cost, ...], int]:
    """Operations for the inputs' gradients alone, for all gradients, and the memory beyond."""
    roots, gradients = backward_pairs(outputs)
    alone, whole = _Recorder(), _Recorder()
    if not roots or not (inputs or parameters):
        return (), (), 0
    if inputs:
        with alone:
            torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    before = peak.restart_peak()
    with peak, whole:
        torch.autograd.backward(roots, gradients, inputs=[*inputs, *parameters])
    return tuple(alone.costs), tuple(whole.costs), peak.peak_bytes - before
