"""Compile layers one by one with ``torch.compile``.

A compiled backward computes all gradients in one piece, so it is not taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...core.errors import MeasurementError, first_line
from ..layers.error_attribution import blamed
from ..layers.layer_run import LayerRun, Values, backward_pairs
from ..layers.precision import Context
from ..machine.memory import causes

NOTE = "compiled layer by layer; no run of the whole model, compiled likewise, to compare with"

WAY_OUT = (
    "torch.compile needs a C++ compiler for the CPU (g++ or clang++ on PATH, or named by CXX) and "
    "Triton for CUDA; install it, or profile without compiling"
)

MISSING = ("InvalidCxxCompiler", "TritonMissing", "No working C++ compiler found")
"""How inductor tells that it has nothing to compile with."""


def compile_layers(runs: Sequence[LayerRun], values: Values, context: Context) -> None:
    """Replace each layer's function by its compiled one, already compiled in both directions."""
    for run in runs:
        if run.segment is None:
            continue
        # The generated function, not the module: all segments share one `forward`, and dynamo
        # gives up on a function after a few versions of it.
        assert run.segment._code is not None
        compiled: Callable[..., tuple[Any, ...]] = torch.compile(run.segment._code)
        run.function = partial(compiled, run.segment)
        with blamed(run), _compiler_needed():
            with context():
                outputs = run.function(*run.arguments(run.leaves(values)))
            # inductor compiles the backward on its first call, which must not be timed either
            roots, gradients = backward_pairs(outputs)
            if roots:
                torch.autograd.backward(roots, gradients)


@contextmanager
def _compiler_needed() -> Iterator[None]:
    """Turn inductor's error for a missing compiler into one that says what to install."""
    try:
        yield
    except Exception as error:
        told = [f"{type(cause).__name__}: {cause}" for cause in causes(error)]
        if any(name in text for name in MISSING for text in told):
            raise MeasurementError(f"{first_line(error)}; {WAY_OUT}") from error
        raise
