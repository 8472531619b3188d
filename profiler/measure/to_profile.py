"""Convert measurements to a `Profile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...capture.captured import Captured
from ...core.graph.graph import Layer
from ...core.models.families import ModelSpec
from ...core.profile.profile import (
    LayerProfile,
    LossProfile,
    Profile,
    Provenance,
    Reconciliation,
    Timing,
)
from ..layers.first_run import FirstRun
from ..layers.layer_run import LayerRun
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
    layers = tuple(
        _layer_profile(found, index, layer.model_copy(update={"cost_class": cost_class}))
        for index, (layer, cost_class) in enumerate(
            zip(graph.layers, found.cost_classes, strict=True)
        )
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
        model=graph.model,
        spec=spec,
        inputs=graph.inputs,
        input_structure=found.captured.structure.to_json(),
        layers=layers,
        boundaries=graph.boundaries,
        edges=graph.edges,
        parameters=graph.parameters,
        storages=found.first.storages,
        loss=loss,
        reconciliation=reconciliation(found),
        provenance=provenance,
        fixed_mode=graph.fixed_mode,
        notes=(*graph.notes, *found.notes),
    )


def _layer_profile(found: Measurements, index: int, layer: Layer) -> LayerProfile:
    """``recompute`` stays out: it is the same forward, with gradients, that was measured."""
    samples, run = found.samples[index], found.runs[index]
    dispatch = found.on_its_own
    return LayerProfile(
        layer=layer,
        forward=timing(samples.device_s["forward"]),
        backward=timing(samples.device_s["backward"]),
        backward_input=_if_measured(samples.device_s["backward_input"]),
        backward_weight=_if_measured(samples.device_s["backward_weight"]),
        dispatch_forward=timing(samples.dispatch_s["forward"]) if dispatch else None,
        dispatch_backward=timing(samples.dispatch_s["backward"]) if dispatch else None,
        saved_activation_bytes=run.saved_bytes or 0,
        output_bytes=found.first.output_bytes[index],
        workspace_bytes=found.first.workspace_bytes[index],
    )


def _if_measured(samples_s: list[float]) -> Timing | None:
    return timing(samples_s) if samples_s else None


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
