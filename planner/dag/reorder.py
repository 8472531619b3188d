"""Reordering of a profile's layers, derived from its edges alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...core.errors import InvalidInput
from ...core.graph.graph import MODEL_INPUT, Boundary
from ...core.graph.tensors import TensorSpec
from ...core.profile.profile import Profile


def reorder_profile(profile: Profile, order: Sequence[int]) -> Profile:
    """Return the profile as if its layers had been captured in this order.

    What crosses each gap follows from the edges: everything made in front of it and read behind
    it, or handed out by the model. Layers with no legal cut between them stay neighbours.

    Raises:
        InvalidInput: The edges do not account for the profile's own boundaries, or a layer comes
            before one it reads from, or layers that may not be cut apart are not neighbours.
    """
    uses = TensorUses(profile)
    uses.check_own_order()
    position = {layer: place for place, layer in enumerate(order)}
    for edge in profile.edges:
        if edge.source != MODEL_INPUT and position[edge.source] >= position[edge.target]:
            names = [profile.layers[layer].layer.name for layer in (edge.target, edge.source)]
            raise InvalidInput(f"layer {names[0]!r} comes before {names[1]!r}, from which it reads")
    for gap in profile.boundaries:
        if not gap.legal and position[gap.after + 1] != position[gap.after] + 1:
            raise InvalidInput(
                f"layers {gap.after} and {gap.after + 1} are taken apart, which is not legal: "
                f"{gap.reason}"
            )
    fields = {
        "layers": tuple(profile.layers[layer] for layer in order),
        "boundaries": tuple(uses.boundaries(order)),
        "edges": (),
        "parameters": tuple(
            entry.model_copy(update={"layers": _moved(entry.layers, position)})
            for entry in profile.parameters
        ),
        "splits": tuple(
            split.model_copy(update={"layers": tuple(split.layers[layer] for layer in order)})
            for split in profile.splits
        ),
        "storages": tuple(
            entry.model_copy(update={"layers": _moved(entry.layers, position)})
            for entry in profile.storages
        ),
    }
    return Profile.model_validate({**dict(profile), **fields})


def _moved(layers: tuple[int, ...], position: dict[int, int]) -> tuple[int, ...]:
    return tuple(sorted(position[layer] for layer in layers))


class TensorUses:
    """The producer and the consumers of every tensor of a profile.

    By name: the layer that makes a tensor, or `MODEL_INPUT`, the layers that read it, and those the
    model hands out, which have to reach the last stage.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.tensors: dict[str, TensorSpec] = {}
        self.made: dict[str, int] = {}
        self.read: dict[str, set[int]] = {}
        for edge in profile.edges:
            name = edge.tensor.name
            self.tensors.setdefault(name, edge.tensor)
            self.made.setdefault(name, edge.source)
            self.read.setdefault(name, set()).add(edge.target)
        self.handed_out: set[str] = set()
        for gap in profile.boundaries:
            for tensor in gap.tensors:
                self.tensors.setdefault(tensor.name, tensor)
                self.made.setdefault(tensor.name, gap.after)
                if max(self.read.get(tensor.name, {-1})) <= gap.after:
                    self.handed_out.add(tensor.name)

    def check_own_order(self) -> None:
        """Raise unless the edges reproduce the profile's own boundaries."""
        own = self.boundaries(range(len(self.profile.layers)))
        for found, given in zip(own, self.profile.boundaries, strict=True):
            if given.legal and by_name(found).tensors != by_name(given).tensors:
                raise InvalidInput(
                    f"the profile's edges do not account for what crosses its boundary after "
                    f"layer {given.after}, so its layers cannot be reordered"
                )

    def boundaries(self, order: Sequence[int]) -> Iterator[Boundary]:
        """Yield the boundary at each gap of an order."""
        last = len(order) - 1
        behind = set(order)
        for place in range(last):
            behind.discard(order[place])
            tensors = [
                tensor
                for name, tensor in self.tensors.items()
                if self.made[name] not in behind
                and (name in self.handed_out or self.read.get(name, set()) & behind)
            ]
            here, then = order[place], order[place + 1]
            gap = self.profile.boundaries[here] if here < last else None
            legal = gap is None or gap.legal or then != here + 1
            yield Boundary(
                after=place,
                tensors=tuple(tensors),
                legal=legal,
                reason="" if legal or gap is None else gap.reason,
            )


def by_name(boundary: Boundary) -> Boundary:
    """Return the boundary with its tensors sorted by name."""
    tensors = sorted(boundary.tensors, key=lambda tensor: tensor.name)
    return boundary.model_copy(update={"tensors": tuple(tensors)})
