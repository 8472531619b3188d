"""Check of a profile's edges for what a list of modules, each called with one value, leaves out."""

from __future__ import annotations

from ..graph.graph import MODEL_INPUT
from .profile import Profile


def find_chain_break(profile: Profile) -> str | None:
    """Return where a model is no chain of its layers; see `Graph.chain_break`.

    Where capture did not find out, the edges tell: in a chain each layer reads one value, of the
    layer in front. `None` stays where they are a chain, since operations between modules leave no
    trace in them, or not known.
    """
    if profile.chain_break is not None or not profile.edges:
        return profile.chain_break
    names = [entry.layer.name for entry in profile.layers]
    read: dict[int, str] = {}
    for edge in profile.edges:
        name, value = names[edge.target], edge.tensor.name
        if edge.source != edge.target - 1:
            source = "the model's input" if edge.source == MODEL_INPUT else repr(names[edge.source])
            return f"layer {name!r} reads {value!r} of {source}, not of the layer before it alone"
        if read.setdefault(edge.target, value) != value:
            return f"layer {name!r} reads both {read[edge.target]!r} and {value!r}"
    alone = next((name for index, name in enumerate(names) if index not in read), None)
    return alone and f"layer {alone!r} reads nothing that the one before it returned"
