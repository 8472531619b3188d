"""Reduction of a training profile to forward passes, for planning inference."""

from __future__ import annotations

from ..cluster.accelerators import find_by_driver_name
from ..graph.graph import Boundary
from .profile import LayerProfile, Profile, Provenance, TensorSplit, Timing, list_parameters

PREFILL = (
    "prefill: times are of forwards over all {tokens} tokens of a sample; decoding, which reads "
    "every weight and the cache of keys and values for one token, is not priced"
)
LAST_POSITION = "{head} is priced at the last position alone, as servers compute it"

NOTE = "forward only: backwards, gradients and kept activations were left out, for inference"


def for_inference(profile: Profile) -> Profile:
    """Return a copy of a profile without the costs of training.

    Backwards take no time, no activations are kept, no gradients are sent or summed, and no weight
    has a gradient or optimizer state. Use the objective ``throughput`` for a stream of requests,
    ``latency`` for one request at a time. A profile that is reduced already is returned as it is.
    """
    if NOTE in profile.notes:
        return profile
    forward = {
        "backward": Timing(median_s=0.0),
        "backward_input": None,
        "backward_weight": None,
        "recompute": None,
        "dispatch_backward": None,
        "saved_activation_bytes": 0,
    }
    return profile.model_copy(
        update={
            "layers": tuple(entry.model_copy(update=forward) for entry in profile.layers),
            "boundaries": tuple(_without_gradients(each) for each in profile.boundaries),
            "parameters": tuple(
                each.model_copy(update={"trainable": False}) for each in list_parameters(profile)
            ),
            "storages": (),
            "splits": tuple(map(_only_forward, profile.splits)),
            "loss": None,
            "reconciliation": None,
            "notes": (*profile.notes, NOTE),
        }
    )


def _only_forward(split: TensorSplit) -> TensorSplit:
    nothing = dict.fromkeys(
        (
            "saved_activation_bytes",
            "backward_reduced_bytes",
            "backward_reductions",
            "backward_gathered_bytes",
        ),
        0,
    )
    layers = tuple(
        entry.model_copy(
            update={**nothing, "gathers": entry.gathers // 2}
            if entry.backward_gathered_bytes and entry.forward_gathered_bytes
            else {**nothing, "gathers": entry.gathers * (entry.forward_gathered_bytes > 0)}
        )
        for entry in split.layers
    )
    return split.model_copy(update={"layers": layers})


def for_serving(profile: Profile, *, last_position: bool) -> Profile:
    """Return a copy of a profile for a runtime of inference, with the phase it is of in a note.

    Where only the ``last_position`` of a prompt is turned into logits, the head of a language model
    takes the time of that position: its share, but at least that of reading its weights.
    """
    reduced = for_inference(profile)
    tokens = _count_tokens(reduced)
    note = PREFILL.format(tokens=tokens)
    if tokens < 2 or note in reduced.notes:
        return reduced
    notes, layers = [note], list(reduced.layers)
    if last_position and layers[-1].layer.module_type == "Linear":
        layers[-1] = _price_last_position(layers[-1], tokens, reduced.provenance)
        notes.append(LAST_POSITION.format(head=layers[-1].layer.name))
    return reduced.model_copy(update={"layers": tuple(layers), "notes": (*reduced.notes, *notes)})


def _count_tokens(profile: Profile) -> int:
    """Return the tokens of a sample; 0 if samples are no sequences of them."""
    first = profile.inputs[0] if profile.inputs else None
    is_ids = first is not None and first.dtype.startswith("int") and len(first.shape) == 2
    return first.shape[1] if first is not None and is_ids else 0


def _price_last_position(head: LayerProfile, tokens: int, provenance: Provenance) -> LayerProfile:
    whole_s, device = head.forward.median_s, find_by_driver_name(provenance.device_name)
    read_s = head.layer.parameter_bytes / device.bandwidth_bytes_per_s if device else 0.0
    return head.model_copy(
        update={
            "forward": Timing(median_s=min(whole_s, max(whole_s / tokens, read_s))),
            "output_bytes": head.output_bytes // tokens,
            "workspace_bytes": head.workspace_bytes // tokens,
        }
    )


def _without_gradients(boundary: Boundary) -> Boundary:
    tensors = tuple(
        tensor.model_copy(update={"requires_grad": False}) for tensor in boundary.tensors
    )
    return boundary.model_copy(update={"tensors": tensors})


def match_profile(profile: Profile, profile_id: str) -> Profile:
    """Return the profile that a plan names: this one, or this one reduced for inference."""
    reduced = (
        for_inference(profile),
        for_serving(profile, last_position=True),
        for_serving(profile, last_position=False),
    )
    return next((each for each in reduced if each.content_id() == profile_id), profile)
