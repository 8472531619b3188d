"""A profile of uneven layers, long enough for several stages a device."""

from __future__ import annotations

from stagewright.core.graph.graph import Boundary, Layer
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.profile.profile import LayerProfile, Profile, Timing

HIDDEN = TensorSpec(name="hidden", shape=(8, 256), dtype="float32", requires_grad=True)


def blocks(count: int, *, uncut: tuple[int, ...] = (), name: str = "h.{}.part") -> Profile:
    """Layers of which some are slower; behind those of `uncut` no cut may be made."""
    layers = tuple(
        LayerProfile(
            layer=Layer(name=name.format(index), parameter_bytes=2**20),
            forward=Timing(median_s=1e-3 * (1 + index % 3)),
            backward=Timing(median_s=2e-3 * (1 + index % 3)),
            saved_activation_bytes=2**18,
        )
        for index in range(count)
    )
    gaps = tuple(
        Boundary(after=index, tensors=(HIDDEN,))
        if index not in uncut
        else Boundary(after=index, tensors=(HIDDEN,), legal=False, reason="they share a state")
        for index in range(count - 1)
    )
    return Profile(model=f"{count} blocks", inputs=(HIDDEN,), layers=layers, boundaries=gaps)
