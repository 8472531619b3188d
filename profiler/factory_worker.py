"""Measure what a registered factory makes, in a process of its own that the caller confines.

Reads and writes as `worker_protocol` says. What is imported is said on the command line, which
whoever starts the process writes, and never in the request:
``--factory NAME=package.module:callable``, with ``--path FOLDER`` for where to find it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.errors import InvalidInput, MeasurementError, OutOfMemory, first_line
from ..core.profile.profile import Profile
from ..core.requests.requests import MeasureRequest
from ..core.units import name_type
from .machine.memory import is_out_of_memory
from .worker_protocol import serve, tell_progress

if TYPE_CHECKING:
    from torch import nn

    from ..core.progress import Progress


def main() -> int:
    """Measure the request on standard input; return the exit code."""
    allowed = _arguments()
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # what the model prints is no part of the answer
        return serve(
            MeasureRequest,
            "measure request",
            lambda asked: measure_factory(asked, allowed, tell_progress).to_json(),
            output,
        )


def measure_factory(
    request: MeasureRequest, allowed: argparse.Namespace, progress: Progress | None = None
) -> Profile:
    import torch

    from .machine.provenance import check_device
    from .measure.profile import profile
    from .models.families import make_sample

    sample = request.sample
    if sample is None:
        raise InvalidInput("a model is measured with a sample", field="/sample")
    if sample.target is not None:
        raise InvalidInput(
            "the loss of this model is not known, so it takes no target; leave it out",
            field="/sample/target",
        )
    device = check_device(request.profiling.device or "cpu")
    torch.manual_seed(sample.seed)
    model = _made(request, allowed).to(device)
    inputs, _ = make_sample(sample, device)
    try:
        return profile(model, inputs, options=request.profiling, progress=progress)
    except InvalidInput as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"{error}; use a smaller micro-batch") from error
        raise InvalidInput(str(error), field="/sample/inputs") from error


def _made(request: MeasureRequest, allowed: argparse.Namespace) -> nn.Module:
    from torch import nn

    call = request.factory
    if call is None or call.name not in allowed.factory:
        raise InvalidInput("this process was not allowed to run such a model")
    what, arguments = f"the factory {call.name!r}", call.arguments
    sys.path.extend(allowed.path)
    module, _, name = allowed.factory[call.name].partition(":")
    make = _run(what, lambda: getattr(importlib.import_module(module), name))
    made = _run(what, lambda: make(**arguments))
    if not isinstance(made, nn.Module):
        raise InvalidInput(f"{what} returned {name_type(made)}, not an nn.Module")
    return made


def _run(what: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except (Exception, SystemExit) as error:  # it may raise anything
        if is_out_of_memory(error):
            raise OutOfMemory(f"{what} needs more memory than there is") from error
        raise MeasurementError(
            f"{what} raised {type(error).__name__}: {first_line(error)}"
        ) from error


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stagewright.profiler.factory_worker")
    parser.add_argument("--factory", action="append", default=[])
    parser.add_argument("--path", action="append", default=[])
    arguments = parser.parse_args()
    arguments.factory = dict(entry.split("=", 1) for entry in arguments.factory)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
