"""Reduction of a training profile to forward passes, for planning inference."""

from __future__ import annotations

from ..document import is_same_id
from ..graph.graph import Boundary
from .profile import Profile, Timing

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
                each.model_copy(update={"trainable": False}) for each in profile.parameters
            ),
            "storages": (),
            "loss": None,
            "reconciliation": None,
            "notes": (*profile.notes, NOTE),
        }
    )


def _without_gradients(boundary: Boundary) -> Boundary:
    tensors = tuple(
        tensor.model_copy(update={"requires_grad": False}) for tensor in boundary.tensors
    )
    return boundary.model_copy(update={"tensors": tensors})


def match_profile(profile: Profile, profile_id: str) -> Profile:
    """Return the profile that a plan names: this one, or this one reduced for inference."""
    reduced = for_inference(profile)
    return reduced if is_same_id(reduced.content_id(), profile_id) else profile
