"""Costs of layers that keep only their inputs and run again in the backward.

A layer here is what lies between two neighbouring places at which a stage may be cut. It is a
checkpoint where that at least halves what is kept of it; others, such as an embedding or a head,
are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ...core.errors import InvalidInput
from ...core.graph.tensors import TensorSpec
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import LayerProfile, Profile, SavedStorage
from ...schedules.traits import SPLIT_BACKWARD
from ..cost.chain import legal_positions

Span = tuple[int, int]
"""The first layer of a checkpoint, and the one behind its last."""


def check_checkpoints(options: PlanOptions) -> None:
    """Raise `InvalidInput` for options that checkpoints of layers do not go with."""
    if options.schedule in SPLIT_BACKWARD and "schedule" not in options.auto:
        raise InvalidInput(
            f"recompute='layers' runs a layer's whole backward at once, and {options.schedule} "
            "divides it; choose schedule 1f1b or interleaved_1f1b, or recompute='auto'",
            field="/options/recompute",
        )
    if options.layer_order == "any":
        raise InvalidInput(
            "recompute='layers' needs the layers in the profile's order; leave out "
            "layer_order='any', or choose recompute='auto'",
            field="/options/recompute",
        )


def may_checkpoint(options: PlanOptions) -> bool:
    """Return True if checkpoints of layers are something else than asked for, and possible."""
    divides = options.schedule in SPLIT_BACKWARD or options.layer_order == "any"
    return not divides and options.recompute != "layers" and options.objective != "latency"


def list_checkpoints(profile: Profile) -> tuple[Span, ...]:
    """Return the layers to be checkpointed; those that keep state from call to call never are."""
    found = []
    for first, last in pairwise(legal_positions(profile)):
        layers = range(first, last)
        is_stateful = any(profile.layers[layer].layer.stateful for layer in layers)
        inputs = sum(tensor.size_bytes for tensor in list_inputs(profile, first))
        if not is_stateful and 0 < 2 * inputs <= count_saved(profile, layers):
            found.append((first, last))
    return tuple(found)


def list_inputs(profile: Profile, first: int) -> Sequence[TensorSpec]:
    """Return what a stage that begins at a layer reads or passes on."""
    return profile.boundaries[first - 1].tensors if first else profile.inputs


def count_saved(profile: Profile, layers: range) -> int:
    """Return the bytes that autograd saves for some layers, each storage once."""
    if not profile.storages:
        return sum(profile.layers[layer].saved_activation_bytes for layer in layers)
    held = set(layers)
    return sum(each.size_bytes for each in profile.storages if not held.isdisjoint(each.layers))


def checkpoint_costs(profile: Profile, checkpoints: Sequence[Span]) -> Profile:
    """Return the profile with these layers checkpointed.

    Their backward includes the forward, what they saved becomes workspace, and their inputs are
    kept: a tensor that crosses several boundaries once, if the profile knows who reads what, as
    names then stand for tensors.
    """
    again = {layer: span for span in checkpoints for layer in range(*span)}
    layers = tuple(
        _checkpoint(profile, entry, again[at]) if at in again else entry
        for at, entry in enumerate(profile.layers)
    )
    kept: dict[object, tuple[int, list[int]]] = {}
    for first, _ in checkpoints:
        for tensor in list_inputs(profile, first):
            key = tensor.name if profile.edges else (tensor.name, first)
            kept.setdefault(key, (tensor.size_bytes, []))[1].append(first)
    storages = [SavedStorage(size_bytes=size, layers=tuple(at)) for size, at in kept.values()]
    for each in profile.storages or _list_own(profile):
        others = tuple(layer for layer in each.layers if layer not in again)
        if others:
            storages.append(each.model_copy(update={"layers": others}))
    return profile.model_copy(update={"layers": layers, "storages": tuple(storages)})


def _list_own(profile: Profile) -> list[SavedStorage]:
    """Return what every layer saves as a storage of its own."""
    return [
        SavedStorage(size_bytes=entry.saved_activation_bytes, layers=(at,))
        for at, entry in enumerate(profile.layers)
    ]


def _checkpoint(profile: Profile, entry: LayerProfile, span: Span) -> LayerProfile:
    whole_s = entry.backward.median_s + entry.forward.median_s
    saved = count_saved(profile, range(*span))
    return entry.model_copy(
        update={
            "backward": entry.backward.model_copy(update={"median_s": whole_s}),
            "backward_input": None,
            "backward_weight": None,
            "saved_activation_bytes": 0,
            "workspace_bytes": entry.workspace_bytes + saved,
        }
    )
