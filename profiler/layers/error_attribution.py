"""Naming the layer in whatever goes wrong while it is measured, and what memory it needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import fx

from ...capture.program.program import value_of
from ...core.errors import MeasurementError, OutOfMemory, StagewrightError, first_line
from ...core.units import format_bytes
from ..machine.memory import device_bytes, is_out_of_memory
from .layer_run import LayerRun, bytes_of


@contextmanager
def blamed(*runs: LayerRun) -> Iterator[None]:
    """Name one layer, or the whole model if several, in whatever goes wrong inside."""
    try:
        yield
    except StagewrightError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(error, *runs) from error
        raise MeasurementError(
            f"{_name(*runs)} failed while being measured: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def out_of_memory(error: BaseException, *runs: LayerRun) -> OutOfMemory:
    """Build the error that memory ran out in one layer, or in the whole model if several."""
    return OutOfMemory(
        f"out of memory in {_name(*runs)}: {first_line(error)}; {need(*runs)}; use a smaller "
        "micro-batch, or a device with more memory",
        layer=runs[0].name if len(runs) == 1 else None,
        required_bytes=sum(_parts(*runs).values()),
        available_bytes=device_bytes(error),
    )


def _name(*runs: LayerRun) -> str:
    return runs[0].name if len(runs) == 1 else "the whole model"


def need(*runs: LayerRun) -> str:
    """Describe the memory layers need for forward and backward, the largest part named.

    What they keep for the backward comes from the first run; before it, it is not known.
    """
    parts, known = _parts(*runs), _is_known(*runs)
    listed = ", ".join(f"{what} {format_bytes(size)}" for what, size in parts.items())
    at_least = "" if known else "at least "
    text = f"it needs {at_least}{format_bytes(sum(parts.values()))} ({listed})"
    if len(runs) > 1:
        most = max(runs, key=_run_bytes)
        text += f", most of it {most.name} with {format_bytes(_run_bytes(most))}"
    return text


def _parts(*runs: LayerRun) -> dict[str, int]:
    parts = {
        "inputs": sum(_node_bytes(run.reads) for run in runs),
        "outputs": sum(_node_bytes(run.writes) for run in runs),
        "parameters": sum(run.parameter_bytes for run in runs),
        "gradients": sum(_gradient_bytes(run) for run in runs),
    }
    if _is_known(*runs):
        parts["kept for the backward"] = sum(run.saved_bytes or 0 for run in runs)
    return parts


def _is_known(*runs: LayerRun) -> bool:
    return all(run.saved_bytes is not None for run in runs)


def _run_bytes(run: LayerRun) -> int:
    own = _node_bytes(run.writes) + run.parameter_bytes + _gradient_bytes(run)
    return own + (run.saved_bytes or 0)


def _gradient_bytes(run: LayerRun) -> int:
    """Sum gradients of trainable parameters and differentiated inputs."""
    wanted = [node for node, needed in zip(run.reads, run.needs_grad, strict=True) if needed]
    return _node_bytes(wanted) + bytes_of(run.parameters)


def _node_bytes(nodes: Iterable[fx.Node | None]) -> int:
    return bytes_of([value_of(node) for node in nodes if node is not None])
