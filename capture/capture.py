"""From an ``nn.Module`` and a sample to layers, cuts and a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.errors import CaptureError, StagewrightError
from ..core.graph import Graph
from .cuts import Cut, find_cuts
from .dataless import erase_copies_behind_attention
from .document import graph_document
from .exporting import export_program
from .frontier import outermost, trace_around
from .gate import (
    Expected,
    compare_pieces,
    eager_steps,
    follows_mode,
    observe,
)
from .layers import Layers, assign_layers
from .leaves import restore_leaves
from .masks import restore_causal_attention
from .modes import follow_mode
from .nested import put
from .observe import Observation, function_owners
from .program import Program
from .sample import CallStructure, read_sample, sample_ranges
from .segment import Segment, make_segment, mutates_inputs
from .state import preserved
from .tracing import sequential_program, traced_program

Mode = Literal["auto", "export", "trace"]

WAYS_OUT = (
    "Ways out: make the module to blame a child of an nn.Sequential (children are called whole, "
    "whatever their Python does), or take the part to blame out of forward."
)


@dataclass
class Captured:
    """A traced model: its `Graph` as data, and the means to run any interval of its layers."""

    program: Program
    layers: Layers
    cuts: list[Cut]
    attempts: list[tuple[str, CaptureError]] = field(default_factory=list)
    checked: str = "not compared with the model"

    @functools.cached_property
    def graph(self) -> Graph:
        return graph_document(self.program, self.layers, self.cuts)

    @property
    def structure(self) -> CallStructure:
        """Names of the model's inputs, in flat order."""
        return self.program.structure

    def segment(
        self,
        first: int,
        last: int,
        *,
        enter: Callable[[Any], Any] | None = None,
        leave: Callable[[Any], Any] | None = None,
    ) -> Segment:
        """Layers ``first`` up to, not including, ``last`` with exactly the previous cut as inputs.

        The first segment takes the model's flat inputs; each returns what is live behind it, the
        last one the model's flat outputs. ``enter`` is applied to what comes over a cut, ``leave``
        to what goes over one.
        """
        inputs: Sequence[Any] = self.program.inputs if first == 0 else self.cuts[first - 1].nodes
        end = last == len(self.layers)
        outputs = self.program.flat_outputs if end else self.cuts[last - 1].nodes
        return make_segment(
            self.program,
            self.layers,
            first,
            last,
            inputs,
            outputs,
            enter=enter if first else None,
            leave=None if end else leave,
        )

    def mutates_inputs(self, first: int, last: int) -> bool:
        """Whether operations of these layers work in place."""
        return mutates_inputs(self.program, self.layers, first, last)

    def unflatten_output(self, flat: Sequence[Any]) -> Any:
        """The model's own output structure."""
        if self.program.output is not None:
            return put(self.program.output, list(flat))
        return pytree.tree_unflatten(list(flat), self.program.out_spec)


def capture(model: nn.Module, sample: Any, *, mode: Mode = "auto") -> Graph:
    """The model as a `Graph`; see `trace`."""
    return trace(model, sample, mode=mode).graph


def trace(model: nn.Module, sample: Any, *, mode: Mode = "auto", check: bool = True) -> Captured:
    """Trace a model at one input shape, in training mode.

    An ``nn.Sequential`` becomes its children. Anything else goes through ``torch.export``, and
    where that refuses or would be wrong, through ``torch.fx`` symbolic tracing. A model whose root
    is in training mode is traced as it stands (frozen submodules stay frozen); one in evaluation
    mode is put in training mode meanwhile. Nothing of the model is changed.

    Args:
        model: Any module whose inputs and outputs are tensors (outputs may be nested).
        sample: One micro-batch: a tensor, a tuple (positional) or a dict (keywords).
        mode: ``auto``, or one of the tracers alone.
        check: Run the model and the traced model, cut wherever it may be, once each, forwards and
            backwards, and compare outputs, gradients and buffers; and their outputs in evaluation
            mode.

    Raises:
        InvalidInput: The model does not take this sample, or fails on it by itself.
        CaptureError: It cannot be traced, or would be traced wrongly; the message names the
            module, the operation and the ways out.
    """
    structure, flat = read_sample(model, sample)
    attempts: list[tuple[str, CaptureError]] = []
    with preserved(model, training=None if model.training else True):
        try:
            expected = eager_steps(model, structure, flat) if check else None
            seen = expected.seen if expected else observe(model, structure, flat)
        except CaptureError as error:
            raise _could_not(model, [error]) from error
        for name, tracer in _tracers(model, flat, mode):
            try:
                with _as_capture_error(), preserved(model):
                    captured = _finish(
                        trace_around(model, seen, partial(tracer, model, structure, flat, seen))
                    )
                if expected is not None:
                    _check(captured, expected)
            except CaptureError as refusal:
                attempts.append((name, refusal))
            else:
                captured.program.sample_ranges = sample_ranges(flat)
                captured.program.notes += seen.remarks
                captured.attempts += attempts
                captured.checked = checked_how(expected)
                return captured
    raise _could_not(model, [refusal for _, refusal in attempts]) from attempts[0][1]


@contextmanager
def _as_capture_error() -> Iterator[None]:
    """Whatever a tracer stumbles over is a refusal, not a bug of the caller's."""
    try:
        yield
    except StagewrightError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise CaptureError(
            f"tracing failed: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error


Tracer = Callable[
    [nn.Module, CallStructure, tuple[Tensor, ...], Observation, Mapping[str, str]], Program
]


def _tracers(model: nn.Module, flat: tuple[Tensor, ...], mode: Mode) -> list[tuple[str, Tracer]]:
    if type(model) is nn.Sequential and len(model) and len(flat) == 1 and mode == "auto":
        return [("sequential", _sequential)]
    tracers: dict[Mode, list[tuple[str, Tracer]]] = {
        "auto": [("export", _export), ("trace", _trace)],
        "export": [("export", _export)],
        "trace": [("trace", _trace)],
    }
    return tracers[mode]


def _sequential(
    model: nn.Module,
    structure: CallStructure,
    flat: tuple[Tensor, ...],
    seen: Observation,
    opaque: Mapping[str, str],
) -> Program:
    return sequential_program(model, structure, flat, {**function_owners(seen), **opaque})


def _trace(
    model: nn.Module,
    structure: CallStructure,
    flat: tuple[Tensor, ...],
    seen: Observation,
    opaque: Mapping[str, str],
) -> Program:
    owners = function_owners(seen)
    if "" in owners:
        raise CaptureError(f"torch.fx: forward of the model itself {owners['']}")
    return traced_program(model, structure, flat, outermost({**owners, **opaque}))


def _export(
    model: nn.Module,
    structure: CallStructure,
    flat: tuple[Tensor, ...],
    seen: Observation,
    opaque: Mapping[str, str],
) -> Program:
    program = export_program(model, structure, flat, seen, opaque)
    restore_leaves(program)
    restore_causal_attention(program)
    erase_copies_behind_attention(program)
    follow_mode(program)
    return program


def _finish(program: Program) -> Captured:
    program.graph.lint()
    layers = assign_layers(program)
    return Captured(program, layers, find_cuts(program, layers))


def _check(captured: Captured, expected: Expected) -> None:
    """The gate: the traced model, in as many pieces as it can be cut into, is the model."""
    program = captured.program
    legal = [cut.boundary.after + 1 for cut in captured.cuts if cut.boundary.legal]
    edges = [0, *legal, len(captured.layers)]
    pieces = [captured.segment(first, last) for first, last in pairwise(edges)]
    boundaries = [captured.cuts[position - 1].boundary for position in legal]
    compare_pieces(program.model, pieces, boundaries, captured.unflatten_output, expected)
    if not program.fixed_mode:
        whole = captured.segment(0, len(captured.layers))
        if not follows_mode(
            program.model,
            captured.structure,
            whole,
            captured.unflatten_output,
            expected.inputs[0],
        ):
            program.fixed_mode = ("Python code that looks at self.training",)


def _could_not(model: nn.Module, refusals: list[CaptureError]) -> CaptureError:
    reasons = "\n  ".join(str(refusal) for refusal in refusals)
    blame = next((refusal.module for refusal in refusals if refusal.module), None)
    operation = next((refusal.operation for refusal in refusals if refusal.operation), None)
    return CaptureError(
        f"{type(model).__name__} could not be captured"
        + (f"; the module to blame is {blame!r}" if blame else "")
        + (f" at {operation}" if operation else "")
        + f":\n  {reasons}\n{WAYS_OUT}",
        module=blame,
        operation=operation,
    )


def checked_how(expected: Expected | None) -> str:
    if expected is None:
        return "not compared with the model"
    inputs = "different inputs" if expected.varied else "the same inputs"
    return f"equal to the model in two steps of training on {inputs}, and in evaluation"


def default_device(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lives; the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
