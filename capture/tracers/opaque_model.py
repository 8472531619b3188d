"""Last resort of capture: the whole model as one opaque layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ...core.errors import CaptureError
from ..observation.nested_values import append_access, keep_positions
from ..observation.observe import TracingTarget
from ..program.program import OPAQUE, VALUE, WHOLE, WRITTEN, Program
from ..sample import CallStructure


def build_opaque_program(subject: TracingTarget, reason: str) -> Program:
    """Build a program with a single call of the model, which cannot be cut."""
    model, structure = subject.model, subject.structure
    recorded = subject.seen.calls.get(("", 0))
    if recorded is None or recorded.problem or not recorded.forms:
        problem = recorded.problem if recorded else "it did not run on this sample"
        problem = problem or "it returns no tensor"
        raise CaptureError(f"the model cannot be an opaque layer: {problem}")
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in structure.names]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
        values = [form.empty() for form in recorded.forms]
        for node, tensor in zip(inputs, subject.flat, strict=True):
            node.meta[VALUE] = fake_mode.from_tensor(tensor)
    call = graph.call_function(_calls(model, structure), tuple(inputs))
    call.meta = {VALUE: tuple(values), OPAQUE: reason, WHOLE: True, WRITTEN: recorded.written}
    outputs = [append_access(graph, call, recorded.output, index) for index in range(len(values))]
    for output, value in zip(outputs, values, strict=True):
        assert output is not None
        output.meta[VALUE] = value
    graph.output(outputs)
    return Program(
        model=model,
        holder=nn.Module(),
        graph=graph,
        mode="modules",
        structure=structure,
        inputs=inputs,
        out_spec=pytree.tree_flatten(keep_positions(recorded.output))[1],
        training=model.training,
        output=recorded.output,
        opaque={"": reason},
        notes=["the whole model is one opaque layer, and cannot be cut"],
    )


def _calls(model: nn.Module, structure: CallStructure) -> Callable[..., Any]:
    def whole_model(*tensors: Tensor) -> Any:  # its name is that of the operation in documents
        args, kwargs = structure.unflatten(tensors)
        return model(*args, **kwargs)

    return whole_model
