"""From an ``nn.Module`` and a sample to layers, cuts and a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.errors import CaptureError, InvalidInput
from ..core.graph import Graph
from .cuts import Cut, find_cuts
from .document import graph_document
from .exporting import export_program
from .gate import check_forward, refuse_custom_functions
from .layers import Layers, assign_layers
from .leaves import restore_leaves
from .masks import restore_causal_attention
from .modes import follow_mode
from .program import Program
from .sample import CallStructure, read_sample
from .segment import Segment, make_segment, mutates_inputs
from .state import preserved
from .tracing import sequential_program, traced_program

Mode = Literal["auto", "export", "trace"]

WAYS_OUT = (
    "Ways out: make the module to blame a child of an nn.Sequential (children are called whole), "
    "take the data-dependent part out of forward, or give mode='trace' / mode='export' to see the "
    "other tracer's reason."
)


@dataclass(frozen=True)
class Captured:
    """A traced model: its `Graph` as data, and the means to run any interval of its layers."""

    program: Program
    layers: Layers
    cuts: list[Cut]

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
        return pytree.tree_unflatten(list(flat), self.program.out_spec)


def capture(model: nn.Module, sample: Any, *, mode: Mode = "auto") -> Graph:
    """The model as a `Graph`; see `trace`."""
    return trace(model, sample, mode=mode).graph


def trace(model: nn.Module, sample: Any, *, mode: Mode = "auto", check: bool = True) -> Captured:
    """Trace a model at one input shape, in training mode.

    An ``nn.Sequential`` becomes its children. Anything else goes through ``torch.export``, and
    where that refuses, through ``torch.fx`` symbolic tracing. A model whose root is in training
    mode is traced as it stands (frozen submodules stay frozen); one in evaluation mode is put in
    training mode meanwhile. Nothing of the model is changed.

    Args:
        model: Any module whose inputs and outputs are tensors (outputs may be nested).
        sample: One micro-batch: a tensor, a tuple (positional) or a dict (keywords).
        mode: ``auto``, or one of the tracers alone.
        check: Compare the traced model's output with the model's own, once each.

    Raises:
        InvalidInput: The model does not take this sample, or fails on it by itself.
        CaptureError: It cannot be traced, or would be traced wrongly; the message names the
            module, the operation and the ways out.
    """
    structure, flat = read_sample(model, sample)
    training = None if model.training else True
    with preserved(model, training=training):
        expected = _run_eagerly(model, structure, flat) if check else None
        program = _trace(model, structure, flat, mode)
        layers = assign_layers(program)
        captured = Captured(program, layers, find_cuts(program, layers))
        if expected is not None:
            check_forward(captured, flat, expected, WAYS_OUT)
    return captured


def _run_eagerly(model: nn.Module, structure: CallStructure, flat: tuple[Tensor, ...]) -> list[Any]:
    """The model's own flat output; also a look at what autograd recorded."""
    args, kwargs = structure.unflatten(flat)
    with preserved(model):
        try:
            output = model(*args, **kwargs)
        except Exception as error:
            raise InvalidInput(
                f"{type(model).__name__} itself fails on this sample: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        leaves = pytree.tree_flatten(output)[0]
        if type(model) is not nn.Sequential:
            refuse_custom_functions(leaves, WAYS_OUT)
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _trace(
    model: nn.Module, structure: CallStructure, flat: tuple[Tensor, ...], mode: Mode
) -> Program:
    sequential = type(model) is nn.Sequential and len(model) > 0 and len(flat) == 1
    if sequential and mode == "auto":
        return sequential_program(model, structure, flat)  # type: ignore[arg-type]
    refusals: list[CaptureError] = []
    if mode in ("auto", "export"):
        try:
            program = export_program(model, structure, flat)
            restore_leaves(program)
            restore_causal_attention(program)
            follow_mode(program)
            program.graph.lint()
            return program
        except CaptureError as refusal:
            refusals.append(refusal)
    if mode in ("auto", "trace"):
        try:
            return traced_program(model, structure, flat)
        except CaptureError as refusal:
            refusals.append(refusal)
    first = refusals[0]
    reasons = "\n  ".join(str(refusal) for refusal in refusals)
    blame = next((refusal.module for refusal in refusals if refusal.module), None)
    operation = next((refusal.operation for refusal in refusals if refusal.operation), None)
    raise CaptureError(
        f"{type(model).__name__} could not be captured"
        + (f"; the module to blame is {blame!r}" if blame else "")
        + (f" at {operation}" if operation else "")
        + f":\n  {reasons}\n{WAYS_OUT}",
        module=blame,
        operation=operation,
    ) from first


def default_device(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lives; the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
