"""Measure one model in a process of its own: a request in, a profile out.

Reads a `core.options.MeasureRequest` from standard input and writes the `Profile` to standard
output. Progress goes to standard error as JSON lines with ``done``, ``total`` and ``layer``; on
failure the last line there is JSON with ``error`` and ``message``, and the exit code is not 0.
"""

from __future__ import annotations

import json
import sys

from pydantic import ValidationError

from ..core.document import invalid_input
from ..core.errors import InvalidInput, MeasurementError, StagewrightError
from ..core.options import MeasureRequest
from ..core.profile import Profile


def main() -> int:
    """Exit code 0 with a profile on standard output, 1 with an error on standard error."""
    try:
        profile = measure(read_request(sys.stdin.read()))
    except StagewrightError as error:
        _tell({"error": type(error).__name__, "message": str(error)})
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


def measure(request: MeasureRequest) -> Profile:
    """Build the model and the sample a request describes, and measure them.

    Raises:
        StagewrightError: See `profiler.profile.profile`.
    """
    import torch
    from torch import nn

    from .allocator import keep_freed_memory
    from .families import build_loss, build_model, make_sample
    from .profile import profile

    keep_freed_memory()
    device = request.profiling.device or "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput("no CUDA device here; leave out profiling.device, or ask a GPU node")
    torch.manual_seed(request.sample.seed)
    try:
        model = build_model(request.model).to(device)
        inputs, target = make_sample(request.sample, device)
    except (RuntimeError, MemoryError) as error:
        raise MeasurementError(
            f"the model and its sample do not fit: {str(error).splitlines()[0]}"
        ) from error
    return profile(
        model,
        tuple(inputs.values()) if isinstance(model, nn.Sequential) else inputs,
        options=request.profiling,
        loss_fn=build_loss(request.model) if target is not None else None,
        target=target,
        spec=request.model,
        progress=lambda done, total, layer: _tell({"done": done, "total": total, "layer": layer}),
    )


def _tell(message: dict[str, object]) -> None:
    sys.stderr.write(json.dumps(message) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
