"""Check that traced layers stay right in another precision than they were captured in."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, fx, nn

from ...capture.capture import default_device, trace
from ...capture.captured import Captured
from ...capture.program.mutation import region_of
from ...capture.program.program import FUNCTION, VALUE, Program, find_module
from ...capture.sample import dtype_name
from ...core.errors import CaptureError, PlanMismatch
from ...core.units import list_some

CONVERSIONS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)

Precision = tuple[torch.dtype | None, tuple[torch.dtype, ...], tuple[torch.dtype, ...]]
"""Dtypes of autocast (`None` where it is off), of all weights and buffers, and of all inputs."""


class PrecisionCheck:
    """Check of a model whose precision changes after its capture, in one process.

    Traced layers keep what forward derived from a dtype: the branch it took, the limits of
    ``torch.finfo``, the dtype it converted to. So a model that is converted, or run under another
    autocast, is traced again in its new precision, and its graph has to be the one that runs.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        inputs = tuple(getattr(torch, spec.dtype) for spec in captured.graph.inputs)
        self._known = {_precision_of(captured.program.model, inputs)}

    def run(self, microbatch: Sequence[Tensor]) -> None:
        """Check the precision of a micro-batch; each is traced once.

        Raises:
            PlanMismatch: Forward does something else in it, or cannot be traced in it.
        """
        captured = self._captured
        model, structure = captured.program.model, captured.structure
        now = _precision_of(model, [tensor.dtype for tensor in microbatch])
        if now in self._known:
            return
        sample = structure.as_sample(tensor.detach().clone() for tensor in microbatch)
        try:
            again = trace(model, sample, check=False, recipe=structure.recipe)
        except CaptureError as error:
            raise PlanMismatch(f"{_describe(now)}, where it cannot be captured: {error}") from error
        difference = _find_difference(captured, again)
        if difference:
            raise PlanMismatch(
                f"{_describe(now)}, where its forward does something other than what was captured: "
                f"{difference}. Convert the model before the pipeline is built, with a sample= of "
                "its inputs' types, and build it inside of the torch.autocast that it runs under"
            )
        self._known.add(now)


def _precision_of(model: nn.Module, inputs: Sequence[torch.dtype]) -> Precision:
    kind = default_device(model).type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (
        autocast,
        tuple(each.dtype for each in (*model.parameters(), *model.buffers())),
        tuple(inputs),
    )


def _describe(now: Precision) -> str:
    autocast, weights, inputs = now
    held, given = (list_some(sorted(map(dtype_name, {*each})), 3) for each in (weights, inputs))
    under = "without autocast" if autocast is None else f"under autocast to {dtype_name(autocast)}"
    return f"the model runs with weights of {held}, inputs of {given} and {under} now"


def _find_difference(ours: Captured, theirs: Captured) -> str:
    """Return the first operation that differs between two captures of a model; empty if none."""
    pairs = [(ours, theirs)]
    if (ours.evaluation is None) != (theirs.evaluation is None):
        return "evaluation has a graph of its own in one of them alone"
    if ours.evaluation is not None and theirs.evaluation is not None:
        pairs.append((ours.evaluation, theirs.evaluation))
    for one, other in pairs:
        found = zip_longest(_operations_of(one), _operations_of(other), fillvalue=_NOTHING)
        for was, now in found:
            if not was.covers(now):
                return f"{was} was captured, now there is {now}"
    return ""


@dataclass(frozen=True)
class _Operation:
    """An operation of a graph, comparable with that of another.

    Attributes:
        words: What it does to which values.
        converts_to: The floating dtype that it converts a floating value to, if that is all it
            does.
    """

    words: str
    converts_to: torch.dtype | None = None

    def __str__(self) -> str:
        to = "" if self.converts_to is None else f" to {dtype_name(self.converts_to)}"
        return f"{self.words}{to}"

    def covers(self, now: _Operation) -> bool:
        """Return True if the graph that has this operation may run in place of the other.

        A conversion may keep more digits than the one it stands for.
        """
        if self.words != now.words or (self.converts_to is None) != (now.converts_to is None):
            return False
        if self.converts_to is None or now.converts_to is None:
            return True
        return torch.promote_types(self.converts_to, now.converts_to) == self.converts_to


_NOTHING = _Operation("nothing")


def _operations_of(captured: Captured) -> list[_Operation]:
    found: list[_Operation] = []
    _list_operations(captured.program.graph, captured.program, {}, found)
    return found


def _list_operations(
    graph: fx.Graph, program: Program, numbers: dict[fx.Node, str], found: list[_Operation]
) -> None:
    """Append the operations of a graph in order with their arguments, constants among them.

    ``numbers`` names values by the operation that made them.
    """
    for node in graph.nodes:
        if node in numbers:  # an operand of a region
            continue
        converted = _converted_by(node)
        if converted is not None:
            # What is converted to its own dtype is the same tensor, so in one of two graphs later
            # operations may read the one where in the other they read the other.
            numbers[node] = numbers[converted]
            dtype = node.meta[VALUE].dtype
            found.append(_Operation(f"conversion of {numbers[node]}", dtype))
            continue
        numbers[node] = f"%{len(found)}"
        args, kwargs = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        # Functions made anew in each trace, as those of custom derivatives, differ by address.
        target = node.meta.get(FUNCTION) or node.target
        if node.op == "get_attr":
            target = _describe_attribute(node, program)
        found.append(_Operation(f"{numbers[node]} = {target}{args}{kwargs or ''}"))
        region = region_of(node, program)
        if region is not None:
            body, operands = region
            names = [numbers.get(each, repr(each)) for each in operands]
            inside = [each for each in body.nodes if each.op == "placeholder"]
            _list_operations(body, program, dict(zip(inside, names, strict=True)), found)


def _describe_attribute(node: fx.Node, program: Program) -> str:
    """Return the name of a parameter or buffer; of any other tensor, also what it holds."""
    name = str(node.target)
    if _is_registered(name, program.model):
        return name
    # Regions hold their own constants.
    holder = node.graph.owning_module
    held = holder is not None and hasattr(holder, name)
    value = getattr(holder, name) if held else program.attribute(name)
    if not isinstance(value, Tensor):
        return "the body of a region"  # whose operations follow where it is used
    digest = zlib.crc32(
        value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )
    return f"constant {dtype_name(value.dtype)} {tuple(value.shape)} {digest:08x}"


def _is_registered(name: str, model: nn.Module) -> bool:
    path, _, attribute = name.rpartition(".")
    owner = find_module(model, path)
    return owner is not None and attribute in {**owner._parameters, **owner._buffers}


def _converted_by(node: fx.Node) -> fx.Node | None:
    """Return the node that this one only converts from a floating dtype to another, if so."""
    if node.target not in CONVERSIONS or not isinstance(node.args[0], fx.Node):
        return None
    values = (node.args[0].meta.get(VALUE), node.meta.get(VALUE))
    is_floating = all(isinstance(each, Tensor) and each.is_floating_point() for each in values)
    return node.args[0] if is_floating else None
