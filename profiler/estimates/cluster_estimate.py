"""Result of an estimate for a cluster; imports no torch, so that a stored one is read quickly."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.cluster.accelerators import Accelerator
from ...core.cluster.cluster import Cluster
from ...core.profile.profile import Profile


@dataclass(frozen=True)
class ClusterEstimate:
    """A profile for a cluster's first kind of device, and the others' speeds beside it.

    Attributes:
        profile: Estimated for the first device's kind.
        cluster: The cluster; devices of other kinds carry their speed.
        taken: What each kind was taken for.
        guessed: Kinds told by their memory alone, with what else they might be.
    """

    profile: Profile
    cluster: Cluster
    taken: dict[str, Accelerator]
    guessed: dict[str, tuple[Accelerator, ...]]
