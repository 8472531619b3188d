"""Convert measurements to a `Profile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...capture.captured import Captured
from ...core.graph.graph import Graph, Layer
from ...core.models.families import ModelSpec, list_left_out
from ...core.profile.profile import LayerProfile, LossProfile, Profile, Provenance, Reconciliation
from ..layers.first_run import FirstRun
from ..layers.layer_run import LayerRun
from ..layers.tensor_shares import find_shares, list_splits
from ..machine.clock import timing
from .session import WholeModel
from .timed_passes import Phase, Samples


@dataclass(frozen=True)
class Measurements:
    """Everything a profile is made of; sequences have an entry a layer, the loss last if any.

    ``on_its_own``: the device works while the host issues more, as CUDA does.
    """

    captured: Captured
    runs: Sequence[LayerRun]
    first: FirstRun
    samples: Sequence[Samples]
    cost_classes: Sequence[str]
    whole: WholeModel
    notes: tuple[str, ...]
    on_its_own: bool


def build_profile(found: Measurements, spec: ModelSpec | None, provenance: Provenance) -> Profile:
    """Assemble the profile; times are medians and none is rescaled."""
    graph = found.captured.graph
    first = found.first
    # Only of the layers: the loss has samples and a run behind theirs, but no class.
    num_layers = len(graph.layers)
    rows = zip(
        graph.layers, found.cost_classes, found.samples[:num_layers], found.runs[:num_layers],
        first.output_bytes[:num_layers], first.workspace_bytes[:num_layers], strict=True,
    )  # fmt: skip
    layers = tuple(
        layer_profile(
            layer.model_copy(update={"cost_class": cost_class}),
            samples,
            found.on_its_own,
            saved_activation_bytes=run.saved_bytes or 0,
            output_bytes=output_bytes,
            workspace_bytes=workspace_bytes,
        )
        for layer, cost_class, samples, run, output_bytes, workspace_bytes in rows
    )
    loss = None
    if len(found.runs) > len(layers):
        times = found.samples[-1].device_s
        loss = LossProfile(
            forward=timing(times["forward"]),
            backward=timing(times["backward"]),
            saved_activation_bytes=found.runs[-1].saved_bytes or 0,
        )
    return Profile(
        **graph_fields(graph),
        spec=spec,
        input_structure=found.captured.structure.to_json(),
        layers=layers,
        storages=first.storages,
        splits=list_splits(find_shares(found.captured), layers),
        loss=loss,
        reconciliation=reconciliation(found),
        provenance=provenance,
        notes=(*list_left_out(spec), *graph.notes, *found.notes),
    )


def graph_fields(graph: Graph) -> dict[str, Any]:
    """Return the fields that a profile takes over from the graph of its model."""
    names = ("model", "inputs", "boundaries", "edges", "parameters", "fixed_mode", "chain_break")
    return {name: getattr(graph, name) for name in names}


def layer_profile(
    layer: Layer, samples: Samples, on_its_own: bool, **sizes_bytes: int
) -> LayerProfile:
    """Describe a layer by its times and sizes.

    ``recompute`` stays out: it is the same forward, with gradients, that was measured.
    """
    times, dispatch = samples.device_s, samples.dispatch_s
    parts: tuple[Phase, ...] = ("backward_input", "backward_weight")
    issued: tuple[Phase, ...] = ("forward", "backward") if on_its_own else ()
    return LayerProfile(
        layer=layer,
        forward=timing(times["forward"]),
        backward=timing(times["backward"]),
        **{phase: timing(times[phase]) for phase in parts if times[phase]},
        **{f"dispatch_{phase}": timing(dispatch[phase]) for phase in issued},
        **sizes_bytes,
    )


def reconciliation(found: Measurements) -> Reconciliation | None:
    """Compare the sum of the layers with the whole model, if that was run.

    Of a device that works on its own what takes longer counts, its work or the issuing of it.
    """
    whole = found.whole
    if not whole.forward_s:
        return None
    total_s = _total_s([layer.device_s for layer in found.samples])
    if found.on_its_own:
        total_s = max(total_s, _total_s([layer.dispatch_s for layer in found.samples]))
    forward, backward = timing(whole.forward_s), timing(whole.backward_s)
    whole_s = forward.median_s + backward.median_s
    return Reconciliation(
        whole_forward=forward,
        whole_backward=backward,
        relative_error=(total_s - whole_s) / whole_s if whole_s else 0.0,
    )


def _total_s(layers: Sequence[Mapping[Phase, list[float]]]) -> float:
    return sum(
        timing(times["forward"]).median_s + timing(times["backward"]).median_s for times in layers
    )
