"""Check whether a model is a chain of its layers' modules, as forms of lists of layers need it."""

from __future__ import annotations

from collections import Counter

from ..program.layers import Layers
from ..program.program import Program, is_inside, path_of
from .forward_observation import INPUT, ForwardObservation


def find_chain_break(program: Program, layers: Layers, seen: ForwardObservation) -> str | None:
    """Return where a model is no chain of its layers' modules; empty if it is one, `None` unknown.

    It is one if each layer is a single call whose only argument is the very tensor that the layer
    before returned. That is seen in the model's own forward, not in the graph: a default argument
    that the caller changes, or an operation on a parent's value, may leave no trace there.
    """
    if program.mode == "sequential":
        return ""
    if len(program.inputs) != 1:
        return f"the model takes {len(program.inputs)} inputs"
    if not seen.calls:  # its forward could not be run, such as one that reads data on meta
        return _name_operation(program, layers) or None
    model = program.model
    paths = {id(module): path for path, module in model.named_modules()}
    calls: Counter[str] = Counter()
    before, last = "the model's input", INPUT
    for name, path in zip(layers.names, layers.paths, strict=True):
        own = paths[id(model.get_submodule(path))]  # a module of two names is seen by the first
        call = (own, calls[own])
        if last not in seen.received.get(call, ()):
            return _name_operation(program, layers) or (
                f"module {name!r} takes more, or something else, than {before}"
            )
        calls[own] += 1
        before, last = f"the value of {name!r}", call
    if last not in seen.returned:
        return (
            _name_operation(program, layers)
            or f"the model returns more, or something else, than {before}"
        )
    made = Counter(path for path, _ in seen.calls)
    again = next((path for path in calls if made[path] != calls[path]), None)
    return "" if again is None else f"module {again!r} is called inside another layer, too"


def _name_operation(program: Program, layers: Layers) -> str:
    """Name an operation that is in no layer's module; return an empty text if there is none."""
    for node in program.graph.nodes:
        layer = layers.layer_of.get(node)
        if "alias" in str(node.target):  # the value itself
            continue
        if layer is not None and not is_inside(path_of(node), layers.paths[layer]):
            return (
                f"operation {node.name!r}, counted in layer {layers.names[layer]!r}, belongs to no "
                "layer's module"
            )
    return ""
