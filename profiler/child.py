"""Measure one model in a process of its own: a request in, a profile out.

Reads a `core.options.MeasureRequest` from standard input and writes the `Profile` to standard
output. Progress goes to standard error as JSON lines with ``done``, ``total`` and ``layer``; on
failure the last line there is JSON with ``error``, ``message`` and, where one field of the request
is at fault, its JSON pointer as ``field``; the exit code is not 0.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..core.document import invalid_input
from ..core.errors import InvalidInput, MeasurementError, StagewrightError
from ..core.options import MeasureRequest
from ..core.profile import Profile
from .expected_sample import expected_inputs, expected_target
from .out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core.families import ModelSpec
    from .families import LossFunction
    from .profile import Progress

INPUTS = "/sample/inputs"
"""Where a request names its inputs, as a JSON pointer."""


def main() -> int:
    """Exit code 0 with a profile on standard output, 1 with an error on standard error."""
    try:
        profile = measure(
            read_request(sys.stdin.read()),
            lambda done, total, layer: _tell({"done": done, "total": total, "layer": layer}),
        )
    except StagewrightError as error:
        field = error.field if isinstance(error, InvalidInput) else None
        announced: dict[str, object] = {"error": type(error).__name__, "message": str(error)}
        _tell(announced if field is None else {**announced, "field": field})
        return 1
    sys.stdout.write(profile.to_json())
    return 0


def read_request(text: str) -> MeasureRequest:
    """The request on standard input.

    Raises:
        InvalidInput: It is not a `MeasureRequest`.
    """
    try:
        return MeasureRequest.model_validate_json(text)
    except ValidationError as error:
        raise invalid_input(error, "measure request") from None


def measure(request: MeasureRequest, progress: Progress | None = None) -> Profile:
    """Build the model and the sample a request describes, and measure them.

    Seeds torch's random generator, and sets the allocator of the process.

    Args:
        request: What to measure, on the CPU unless it names a device.
        progress: Called with layers done, layers in all, and the layer's name.

    Raises:
        InvalidInput: The device is not here, or the model does not take the sample; ``field``
            points at what to change.
        StagewrightError: See `profiler.profile.profile`.
    """
    import torch

    from .allocator import keep_freed_memory
    from .devices import check_device
    from .families import build_loss
    from .profile import profile

    spec = request.model
    device = check_device(request.profiling.device or "cpu")
    keep_freed_memory()
    torch.manual_seed(request.sample.seed)
    model, inputs, target = _build(request, device)
    _check_names(model, inputs, spec)
    loss_fn = None if target is None else _blaming_target(build_loss(spec), spec)
    try:
        return profile(
            model,
            inputs,
            options=request.profiling,
            loss_fn=loss_fn,
            target=target,
            spec=spec,
            progress=progress,
        )
    except InvalidInput as error:
        if error.field not in (None, INPUTS):
            raise
        if is_out_of_memory(error):
            raise MeasurementError(f"{error}; use a smaller micro-batch") from error
        raise InvalidInput(f"{error}; {expected_inputs(spec)}", field=INPUTS) from error


def _build(
    request: MeasureRequest, device: str
) -> tuple[nn.Module, dict[str, Tensor], Tensor | None]:
    """Model, inputs and target, on the device."""
    from .families import build_model, make_sample

    try:
        model = build_model(request.model).to(device)
        try:
            return model, *make_sample(request.sample, device)
        except (ValueError, OverflowError) as error:
            raise InvalidInput(
                f"the sample cannot be made up: {error}; low and high are 64-bit numbers",
                field="/sample",
            ) from error
    except (RuntimeError, MemoryError) as error:
        raise MeasurementError(
            f"the model and its sample do not fit: {str(error).splitlines()[0]}; "
            "configure a smaller model, or use a smaller micro-batch"
        ) from error


def _check_names(model: nn.Module, inputs: dict[str, Tensor], spec: ModelSpec) -> None:
    """Refuse names that ``forward`` does not list, also where its ``**kwargs`` would take them.

    Raises:
        InvalidInput: There is one.
    """
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
    """The loss; that it fails is the target's fault, since the model is one of ours."""

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


def _tell(message: dict[str, object]) -> None:
    sys.stderr.write(json.dumps(message) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
