"""Work and saved memory of every layer, found by running the model on the meta device.

Nothing is allocated: tensors there have shapes, not memory, so neither the model nor its sample
need fit anywhere. What layers keep and need in passing is found by the same runs as in a
measurement; of layers that do the same, one is looked at for its operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...capture.capture import trace
from ...capture.captured import Captured
from ...capture.program.program import tensors_of
from ...capture.sample import CallStructure, read_sample
from ...core.cluster.accelerators import Accelerator, Precision
from ...core.graph.graph import Graph
from ...core.profile.profile import SavedStorage
from ..layers.cost_classes import cost_classes, members_of
from ..layers.first_run import first_run
from ..layers.layer_run import LayerRun, Values, backward_pairs, layer_runs
from ..layers.loss_layer import Loss, LossFunction
from ..layers.tensor_shares import TensorShares, find_shares
from ..layers.trace_model import make_gradients
from .flops import Cost, cost_of
from .meta_device import DeviceKernels

Operations = tuple[Cost, ...]


@dataclass(frozen=True)
class EstimateTarget:
    """Target of an estimate: a device, a precision, and threads, which count on a CPU alone."""

    device: Accelerator
    precision: Precision
    num_threads: int = 1

    @property
    def winograd(self) -> bool:
        """See `flops.cost_of`."""
        return self.device.backend == "cuda" and self.precision == "float32"


@dataclass(frozen=True)
class LayerWork:
    """One layer (or the loss) for one micro-batch.

    ``backward`` sums gradients into existing ones; ``backward_input`` computes those of inputs
    alone. ``saved_bytes`` are of distinct storages; for ``workspace_bytes`` see `MemoryRun`.
    """

    forward: Operations = ()
    backward: Operations = ()
    backward_input: Operations = ()
    saved_bytes: int = 0
    output_bytes: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True)
class ModelWork:
    """All layers of a captured model, the loss where it has one, and the storage table.

    ``shares`` say how devices may split the layers between them.
    """

    graph: Graph
    structure: CallStructure
    classes: tuple[str, ...]
    layers: tuple[LayerWork, ...]
    loss: LayerWork | None
    storages: tuple[SavedStorage, ...]
    shares: TensorShares

    @property
    def parts(self) -> tuple[LayerWork, ...]:
        """Return the layers, followed by the loss if there is one."""
        return self.layers if self.loss is None else (*self.layers, self.loss)


@torch.enable_grad()
def capture_on_meta(
    model: nn.Module, sample: Any, loss_fn: LossFunction | None, target: Tensor | None
) -> tuple[Captured, list[Tensor], Loss | None]:
    """Capture a model on the meta device, in training mode; return it, its inputs and its loss."""
    if not model.training:
        model.train()  # as `profile` does; a frozen part of a model in training stays frozen
    structure, flat = read_sample(model, sample)
    loss = None if loss_fn is None else Loss(loss_fn, target, torch.device("meta"))
    return trace(model, structure.as_sample(flat), check=False), list(flat), loss


def model_work(
    model: nn.Module,
    sample: Any,
    wanted: EstimateTarget,
    loss_fn: LossFunction | None = None,
    target: Tensor | None = None,
) -> ModelWork:
    """Capture a model on the meta device, in training mode, and find what its layers do."""
    captured, flat, loss = capture_on_meta(model, sample, loss_fn, target)
    return captured_work(captured, flat, wanted, loss)


@torch.enable_grad()
def captured_work(
    captured: Captured,
    flat: Sequence[Tensor],
    wanted: EstimateTarget,
    loss: Loss | None = None,
    graph: Graph | None = None,
) -> ModelWork:
    """Count the work of a captured model's layers on the meta device; it is given gradients.

    ``graph`` is the one the model was rebuilt from, if it was.
    """
    model = captured.program.model
    runs = layer_runs(captured)
    classes = cost_classes(captured, runs)
    groups = members_of(classes)
    if loss is not None:
        runs.append(loss.run(captured))
        groups.append([len(runs) - 1])
    # Gradients exist before any backward runs, so that each sums into them, as all micro-batches
    # but the first do.
    make_gradients(runs)
    inputs = dict(zip(captured.program.inputs, flat, strict=True))
    first = first_run(
        model, runs, inputs, len(classes), lambda: DeviceKernels(wanted.device.backend)
    )
    parts = [LayerWork()] * len(runs)
    for group in groups:
        forward, whole, alone = _operations(runs[group[0]], first.values, wanted)
        for index in group:
            parts[index] = LayerWork(
                forward=forward,
                backward=whole,
                backward_input=alone,
                saved_bytes=runs[index].saved_bytes or 0,
                output_bytes=first.output_bytes[index],
                workspace_bytes=first.workspace_bytes[index],
            )
    return ModelWork(
        graph=graph or captured.graph,
        structure=captured.structure,
        classes=tuple(classes),
        layers=tuple(parts[: len(classes)]),
        loss=None if loss is None else parts[-1],
        storages=first.storages,
        shares=find_shares(captured),
    )


class CostRecorder(TorchDispatchMode):
    """Dispatch mode that lists the cost of every operation inside."""

    def __init__(self, winograd: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: list[Cost] = []
        self._winograd = winograd

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        cost = cost_of(func, args, kwargs, result, winograd=self._winograd)
        if cost is not None:
            self.costs.append(cost)
        return result


def _operations(
    run: LayerRun, values: Values, target: EstimateTarget
) -> tuple[Operations, Operations, Operations]:
    forward, whole, alone = (CostRecorder(target.winograd) for _ in range(3))
    leaves = run.leaves(values)
    arguments = run.arguments(leaves)
    with DeviceKernels(target.device.backend), forward:
        outputs = run.function(*arguments)
    roots, gradients = backward_pairs(outputs)
    inputs = [leaf for leaf in tensors_of(leaves) if leaf.requires_grad]
    # Inputs first, with the graph retained: the whole backward then frees it.
    if roots and inputs:
        with alone:
            torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    if roots and (inputs or run.parameters):
        with whole:
            torch.autograd.backward(roots, gradients, inputs=[*inputs, *run.parameters])
    return tuple(forward.costs), tuple(whole.costs), tuple(alone.costs)
