"""Reference computation of the tensors that bypass stages, from a profile's edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...core.errors import InvalidInput
from ...core.graph.graph import MODEL_INPUT
from ...core.graph.tensors import TensorSpec
from ...core.profile.profile import Profile
from ..dag.reorder import TensorUses


@dataclass(frozen=True)
class PassingTensors:
    """Tensors sent from one stage past others to a later one, per micro-batch."""

    source: int
    target: int
    tensors: tuple[TensorSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def forward_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def backward_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors if tensor.requires_grad)

    def crosses(self, stage: int) -> bool:
        """Return True if the tensors are live after a stage."""
        return self.source <= stage < self.target

    def goes_by(self, stage: int) -> bool:
        """Return True if the tensors are live at a stage that does not read them."""
        return self.source < stage < self.target


def find_passing_tensors(profile: Profile, counts: Sequence[int]) -> tuple[PassingTensors, ...]:
    """Return the tensors that bypass stages when the layers are cut into these counts.

    There are none if the profile's edges do not account for its boundaries.
    """
    uses = TensorUses(profile)
    try:
        uses.check_own_order()
    except InvalidInput:
        return ()
    if not profile.edges:
        return ()
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    found: dict[tuple[int, int], list[TensorSpec]] = {}
    for name, tensor in uses.tensors.items():
        made = uses.made[name]
        stages = {0 if made == MODEL_INPUT else stage_of[made]}
        stages |= {stage_of[layer] for layer in uses.read.get(name, ())}
        if name in uses.handed_out:
            stages.add(len(counts) - 1)
        for pair in pairwise(sorted(stages)):
            if pair[1] - pair[0] > 1:
                found.setdefault(pair, []).append(tensor)
    return tuple(PassingTensors(*pair, tuple(found[pair])) for pair in sorted(found))
