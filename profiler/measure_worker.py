"""Measure one model in a process of its own: a `MeasureRequest` in, a `Profile` out.

`worker_protocol` says how it is asked and answers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.errors import InvalidInput, MeasurementError, OutOfMemory, first_line
from ..core.models.training_memory import RECIPES
from ..core.profile.profile import Profile
from ..core.requests.requests import MeasureRequest
from .machine.memory import device_bytes, is_out_of_memory
from .models.families import expected_inputs, expected_target
from .worker_protocol import measure_apart, serve, tell_progress

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core.graph.graph import Graph
    from ..core.graph.tensors import Sample
    from ..core.models.families import ModelSpec
    from ..core.progress import Progress
    from ..core.requests.requests import ProfilingOptions
    from .models.families import LossFunction

DEVICE = "/profiling/device"
INPUTS = "/sample/inputs"
"""Where a request names its inputs, as a JSON pointer."""


def main() -> int:
    """Measure the request on standard input; return the exit code."""
    return serve(
        MeasureRequest,
        "measure request",
        lambda asked: measure_here(asked, tell_progress).to_json(),
    )


def measure(request: MeasureRequest, progress: Progress | None = None) -> Profile:
    """Measure the graph of a request, or build its model and sample and measure them.

    Models are measured here: that seeds torch's random generator, and sets the allocator of the
    process. Graphs are measured in a process of their own, see `measure_apart`.

    Raises:
        InvalidInput: The device is not here, the model does not take the sample, or the graph
            cannot be run; ``field`` points at what to change.
        StagewrightError: See `profile` and `profile_graph`.
    """
    if request.graph is not None:
        return measure_apart(request, progress)
    return measure_here(request, progress)


def measure_here(request: MeasureRequest, progress: Progress | None = None) -> Profile:
    """Measure in this process; an operator of a graph may crash it."""
    if request.graph is not None:
        return _measure_graph(request.graph, request.profiling, progress)
    if request.model is None:
        raise InvalidInput(
            "a factory is measured by a service that registers it, not here", field="/factory"
        )
    assert request.sample is not None, "a request checks that"
    return _measure_model(request.model, request.sample, request.profiling, progress)


def _measure_graph(graph: Graph, options: ProfilingOptions, progress: Progress | None) -> Profile:
    from .graphs.profile_graph import profile_graph
    from .machine.memory import keep_freed_memory

    keep_freed_memory()
    try:
        return profile_graph(graph, options=options, progress=progress)
    except InvalidInput as error:
        field = error.field if error.field == DEVICE else f"/graph{error.field or ''}"
        raise InvalidInput(str(error), field=field) from error


def _measure_model(
    spec: ModelSpec, sample: Sample, options: ProfilingOptions, progress: Progress | None
) -> Profile:
    import torch

    from .machine.memory import keep_freed_memory
    from .machine.provenance import check_device
    from .measure.profile import profile
    from .models.families import build_loss

    device = check_device(options.device or "cpu")
    keep_freed_memory()
    torch.manual_seed(sample.seed)
    model, inputs, target = _build(spec, sample, device)
    if options.precision is not None:
        weights = getattr(torch, RECIPES[options.precision].weights)
        model = model.to(weights)
        inputs = {
            name: value.to(weights) if value.is_floating_point() else value
            for name, value in inputs.items()
        }
    _check_names(model, inputs, spec)
    loss_fn = None if target is None else _blaming_target(build_loss(spec), spec)
    try:
        return profile(
            model,
            inputs,
            options=options,
            loss_fn=loss_fn,
            target=target,
            spec=spec,
            progress=progress,
        )
    except InvalidInput as error:
        if error.field not in (None, INPUTS):
            raise
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"{error}; use a smaller micro-batch", available_bytes=device_bytes(error)
            ) from error
        raise InvalidInput(f"{error}; {expected_inputs(spec)}", field=INPUTS) from error


def _build(
    spec: ModelSpec, sample: Sample, device: str
) -> tuple[nn.Module, dict[str, Tensor], Tensor | None]:
    from .models.families import build_model, make_sample

    try:
        model = build_model(spec).to(device)
        try:
            return model, *make_sample(sample, device)
        except (ValueError, OverflowError) as error:
            raise InvalidInput(
                f"the sample cannot be made up: {error}; low and high are 64-bit numbers",
                field="/sample",
            ) from error
    except (RuntimeError, MemoryError) as error:
        message = (
            f"the model and its sample do not fit: {first_line(error)}; "
            "configure a smaller model, or use a smaller micro-batch"
        )
        if is_out_of_memory(error):
            raise OutOfMemory(message, available_bytes=device_bytes(error)) from error
        raise MeasurementError(message) from error


def _check_names(model: nn.Module, inputs: dict[str, Tensor], spec: ModelSpec) -> None:
    """Refuse names that ``forward`` does not list, also where its ``**kwargs`` would take them."""
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind not in open_ended]
    unknown = [name for name in inputs if name not in known]
    if unknown:
        raise InvalidInput(
            f"{type(model).__name__}.forward takes {', '.join(known)}, "
            f"not {unknown[0]!r}; {expected_inputs(spec)}",
            field=INPUTS,
        )


def _blaming_target(loss_fn: LossFunction, spec: ModelSpec) -> Callable[[Any, Tensor], Tensor]:
    """Wrap a loss so that its failures name the target: the model is one of ours."""

    def loss(output: Any, target: Tensor) -> Tensor:
        try:
            return loss_fn(output, target)
        except (RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            reason = str(error).rstrip(".")
            raise InvalidInput(
                f"the loss does not take this target: {reason}; {expected_target(spec)}",
                field="/sample/target",
            ) from error

    return loss


if __name__ == "__main__":
    sys.exit(main())
