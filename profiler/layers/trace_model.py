"""A model traced to be measured; where it does not fit into memory, the layer to blame is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from ...capture.capture import trace
from ...capture.captured import Captured
from ...capture.sample import CallStructure
from ...core.errors import CaptureError, OutOfMemory, StagewrightError, first_line
from ..machine.memory import device_bytes, free_after, is_out_of_memory
from .error_attribution import blamed, out_of_memory
from .first_run import first_run
from .layer_run import LayerRun, layer_runs
from .precision import Context


def traced(
    model: nn.Module,
    structure: CallStructure,
    flat: Sequence[Tensor],
    context: Context,
    tracing: Context,
) -> Captured:
    """Trace and check a model in the precision it is measured in, by which its Python may branch.

    If memory runs out, ``context`` is put around each layer's forward to find the layer to name.
    """
    try:
        with tracing():
            return trace(model, structure.as_sample(flat))
    except StagewrightError as error:
        if not is_out_of_memory(error):
            raise
        failed = error
    free_after(failed)  # or the first layer of all would run out of memory
    _name_the_layer(model, structure, flat, context, tracing, failed)


def _name_the_layer(
    model: nn.Module,
    structure: CallStructure,
    flat: Sequence[Tensor],
    context: Context,
    tracing: Context,
    error: StagewrightError,
) -> NoReturn:
    """Find the layer where memory runs out in a model too large as a whole; raise `OutOfMemory`."""
    try:
        with tracing():
            # Unchecked: the check runs the whole model, which is what ran out of memory.
            captured = trace(model, structure.as_sample(flat), check=False)
    except StagewrightError as refused:
        where = (refused.module if isinstance(refused, CaptureError) else None) or "the whole model"
        raise OutOfMemory(
            f"out of memory in {where}: {first_line(error)}; use a smaller micro-batch, or a "
            "device with more memory",
            layer=refused.module if isinstance(refused, CaptureError) else None,
            available_bytes=device_bytes(error),
        ) from error
    runs = layer_runs(captured)
    make_gradients(runs)
    inputs = dict(zip(captured.program.inputs, flat, strict=True))
    # A layer too large on its own raises here; otherwise only all of them together are.
    first_run(model, runs, inputs, len(runs), context)
    raise out_of_memory(error, *runs) from error


def make_gradients(runs: Sequence[LayerRun]) -> None:
    """Give every trainable parameter a gradient of zeros, to be added to as in training."""
    for run in runs:
        with blamed(run):
            for parameter in run.parameters:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
