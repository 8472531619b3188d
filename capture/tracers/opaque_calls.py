"""Opaque calls: calls that tracing must not enter, as single nodes of the exported graph.

While a model is exported, one custom operator stands for every call of an opaque module or custom
autograd function; afterwards `restore_opaque_calls` turns each node back into the call itself.
"""

# torch.export inlines every module and cannot be told to skip one; torch.library operators, on the
# other hand, stay single nodes. Modules' forwards are replaced rather than the modules, so that
# parameters keep their names, and hooks are taken off, because export would trace them.

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from ...core.errors import CaptureError
from ..observation.forward_observation import ForwardObservation, RecordedCall, TracingTarget
from ..observation.interception import HOOKS, disable_checkpoints, replace_attribute
from ..observation.nested_values import (
    append_access,
    extract_tensors,
    find_positions,
    insert_tensors,
    is_representable,
    keep_positions,
)
from ..program.mutation import is_region, region_of
from ..program.program import FUNCTION, OPAQUE, PATH, VALUE, WHOLE, WRITTEN, Program, path_of


@dataclass
class OpaqueCall:
    """A call that was replaced while tracing, with a `TensorPosition` for every tensor.

    Attributes:
        empties: Creates fake outputs while tracing.
        module: Path of the module called; empty for a function.
        function: The custom autograd function called, if any.
        recorded: The eager call, for a module.
    """

    arguments: Any
    outputs: Any
    empties: Callable[[], list[Tensor]]
    module: str = ""
    function: type | None = None
    recorded: RecordedCall | None = None


@dataclass
class OpaqueCalls:
    """All calls replaced in one tracing, in order; the operator's argument is the index."""

    table: list[OpaqueCall] = field(default_factory=list)
    numbers: Counter[str] = field(default_factory=Counter)

    def stand(self, entry: OpaqueCall, tensors: list[Tensor]) -> Any:
        """Append the operator to the graph being traced, and return the call's value."""
        self.table.append(entry)
        outputs = _operation()(tensors, len(self.table) - 1)
        return insert_tensors(entry.outputs, list(outputs))


_ACTIVE: ContextVar[OpaqueCalls] = ContextVar("stand_ins")


def _operation() -> Any:
    """Return the operator, declaring it on first use."""
    # Importing this module must not register operators: plain programs would carry them, too.
    if not hasattr(torch.ops.stagewright, "as_written"):

        @torch.library.custom_op("stagewright::as_written", mutates_args=())
        def as_written(tensors: list[Tensor], entry: int) -> list[Tensor]:
            raise NotImplementedError("stands for a call while a model is traced")

        @as_written.register_fake
        def _(tensors: list[Tensor], entry: int) -> list[Tensor]:
            return _ACTIVE.get().table[entry].empties()

    return torch.ops.stagewright.as_written.default


@contextmanager
def replace_with_opaque_calls(
    model: nn.Module, seen: ForwardObservation, opaque: Collection[str], functions: list[type]
) -> Iterator[OpaqueCalls]:
    """Replace the ``forward`` of modules and of custom autograd functions."""
    active = OpaqueCalls()
    token = _ACTIVE.set(active)
    try:
        with ExitStack() as stack:
            stack.enter_context(disable_checkpoints())
            for path in opaque:
                module = model.get_submodule(path)
                stack.enter_context(_replaced_module(model, module, path, seen, active))
            for function in functions:
                stack.enter_context(_replaced_function(function, active))
            yield active
    finally:
        _ACTIVE.reset(token)


@contextmanager
def _replaced_module(
    model: nn.Module, module: nn.Module, path: str, seen: ForwardObservation, active: OpaqueCalls
) -> Iterator[None]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        number = active.numbers[path]
        active.numbers[path] += 1
        recorded = seen.calls.get((path, number), RecordedCall(problem="it was not called eagerly"))
        tensors: list[Tensor] = []
        arguments = extract_tensors((args, kwargs), tensors)
        # The outputs' shapes are those of the same call, by number, in the eager forward.
        problem = recorded.problem
        if not problem and not is_representable(arguments):
            problem = "it takes arguments other than tensors and constants"
        if not problem and len(tensors) != recorded.given:
            problem = "it is called differently when traced"
        if problem:
            raise CaptureError(f"{path!r} cannot be an opaque call: {problem}")
        entry = OpaqueCall(
            arguments=arguments,
            outputs=recorded.output,
            empties=lambda: [form.empty() for form in recorded.forms],
            module=path,
            recorded=recorded,
        )
        return active.stand(entry, tensors)

    with ExitStack() as replaced:
        if isinstance(module, torch.jit.ScriptModule):
            # Its attributes cannot be replaced, and export rejects its parameters.
            module = _exchange(model, module, replaced)
        for name in HOOKS:
            replaced.enter_context(replace_attribute(module, name, OrderedDict()))
        replaced.enter_context(replace_attribute(module, "forward", forward))
        yield


def _exchange(model: nn.Module, module: nn.Module, replaced: ExitStack) -> nn.Module:
    """Put an empty module in the place of another wherever the model holds it, until the end."""
    empty = nn.Module()
    for parent in list(model.modules()):
        children = [] if isinstance(parent, torch.jit.ScriptModule) else parent._modules.items()
        for name in [name for name, child in children if child is module]:
            replaced.callback(parent._modules.__setitem__, name, module)
            parent._modules[name] = empty
    return empty


@contextmanager
def _replaced_function(function: Any, active: OpaqueCalls) -> Iterator[None]:
    original = function.forward
    with_context = torch.autograd.function._is_setup_context_defined(function.setup_context)

    def forward(*received: Any) -> Any:
        context, args = ((), received) if with_context else (received[:1], received[1:])
        # Run the real forward for its outputs' shapes, without recording its operations.
        with disable_proxy_modes_tracing():
            shown = original(*context, *args)
        made: list[Tensor] = []
        outputs = extract_tensors(shown, made)
        tensors: list[Tensor] = []
        arguments = extract_tensors(args, tensors)
        if not is_representable(arguments):
            raise CaptureError(
                f"the custom autograd function {function.__name__!r} takes arguments other than "
                "tensors and constants"
            )
        entry = OpaqueCall(
            arguments=(arguments, {}),
            outputs=outputs,
            empties=lambda: [torch.empty_like(tensor) for tensor in made],
            function=function,
        )
        return active.stand(entry, tensors)

    with replace_attribute(function, "forward", staticmethod(forward)):
        yield


def find_recurrent_modules(model: nn.Module, seen: ForwardObservation) -> set[str]:
    """Return torch's recurrent modules whose calls can be opaque."""
    # As single calls their dropout follows the mode, which export would freeze.
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.RNNBase)
        and (path, 0) in seen.calls
        and all(
            call.plain and not call.problem
            for (name, _), call in seen.calls.items()
            if name == path
        )
    }


def restore_opaque_calls(
    program: Program, active: OpaqueCalls, opaque: Mapping[str, str], seen: ForwardObservation
) -> None:
    """Turn every node of the operator back into the call that it stands for.

    Raises:
        CaptureError: One lies inside a region (``no_grad``, autocast), where it cannot be
            restored; the error names the enclosing module.
    """
    operation = _operation()
    for node in list(program.graph.nodes):
        if is_region(node):
            _refuse_inside(node, program, operation)
        if node.target is operation:
            entry = active.table[node.args[1]]
            _replace(program, node, entry, opaque, seen)
    program.graph.lint()


def _refuse_inside(node: fx.Node, program: Program, operation: Any) -> None:
    region = region_of(node, program)
    for inner in region[0].nodes if region else ():
        if inner.target is operation:
            raise CaptureError(
                "an opaque call lies in a no_grad or autocast region", module=path_of(node) or None
            )
        _refuse_inside(inner, program, operation)


def _replace(
    program: Program,
    node: fx.Node,
    entry: OpaqueCall,
    opaque: Mapping[str, str],
    seen: ForwardObservation,
) -> None:
    graph = program.graph
    tensors: list[Any] = list(node.args[0])  # type: ignore[arg-type]
    args, kwargs = insert_tensors(entry.arguments, tensors)
    values = list(node.meta[VALUE])
    with graph.inserting_before(node):
        if entry.function is not None:
            call = graph.call_function(_applies(entry.function), args, kwargs)
        elif entry.module in seen.checkpointed:
            module = graph.get_attr(entry.module)
            module.meta[PATH] = entry.module
            options = seen.checkpointed[entry.module]
            call = graph.call_function(checkpoint_call(options), (module, *args), kwargs)
        else:
            call = graph.call_module(entry.module, args, kwargs)
        made = tuple(values[place.index] for place in find_positions(entry.outputs))
        call.meta = {**node.meta, VALUE: made[0] if len(made) == 1 else made}
        if entry.function is not None:
            call.meta[FUNCTION] = entry.function.__name__
        if entry.recorded is not None:
            call.meta[PATH] = entry.module
            if entry.module in opaque:
                call.meta[OPAQUE] = opaque[entry.module]
            call.meta[WRITTEN] = entry.recorded.written
            _share_memory(entry.recorded, tensors, values)
    elements: dict[Any, fx.Node] = {user.args[1]: user for user in node.users}
    for index, user in elements.items():
        with graph.inserting_before(user):
            found = append_access(graph, call, entry.outputs, index)
        assert found is not None
        _describe(found, call, values[index])
        if found is call:
            call.meta[VALUE] = values[index]
        user.replace_all_uses_with(found)
        graph.erase_node(user)
    graph.erase_node(node)


def _describe(found: fx.Node, call: fx.Node, value: Any) -> None:
    """Annotate a chain of element accesses with the call's layer, and its end with the value."""
    own = (FUNCTION, OPAQUE, WRITTEN)
    meta = {key: item for key, item in call.meta.items() if key not in own}
    node = found
    while node is not call:
        node.meta = {**meta, VALUE: value if node is found else None}
        node = node.all_input_nodes[0]


def _share_memory(recorded: RecordedCall, tensors: list[Any], values: list[Any]) -> None:
    """Make outputs that were views of an argument views of its fake value."""
    # The operator returns fresh tensors. Mutation analysis must see the aliasing of the real call.
    for index, position in enumerate(recorded.returned):
        if position is not None and isinstance(tensors[position], fx.Node):
            source = tensors[position].meta[VALUE]
            form = recorded.forms[index]
            if source.untyped_storage().nbytes() >= values[index].untyped_storage().nbytes():
                with source.fake_mode:
                    values[index] = source.detach().as_strided(form.shape, form.stride)


def _applies(function: Any) -> Callable[..., Any]:
    """Wrap a function's ``apply`` in a Python function of its name, which a graph can call."""

    def apply(*args: Any) -> Any:
        return function.apply(*args)

    apply.__name__ = apply.__qualname__ = function.__name__
    return apply


def checkpoint_call(options: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that calls a module under ``torch.utils.checkpoint``."""

    def checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(module, *args, **options, **kwargs)

    return checkpointed


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

    def whole_model(*tensors: Tensor) -> Any:  # its name is that of the operation in documents
        args, kwargs = structure.unflatten(tensors)
        return model(*args, **kwargs)

    call = graph.call_function(whole_model, tuple(inputs))
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
