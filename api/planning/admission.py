"""What of a request is refused beforehand, because its deadline would not hold.

Planning runs in the server's own process. The search looks at its deadline, so numbers of layers
and of devices need no limits of their own: 2,000 layers over 64 devices, or over 4,096, took 9 s
of processor time. What is limited here was measured to go on after the deadline. The library
itself has no such limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.cluster.cluster import Cluster
from ...core.errors import InvalidInput
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile
from ...core.profile.scale import get_microbatch_size
from ...planner.microbatch_size import sizes_to_try
from ...schedules.numba_jit import is_available

MAX_KINDS = 4
"""Devices of different kind, memory or speed. Stages of every kind may follow those of every
other: with 200 layers and a deadline of 20 s, 3 kinds of 16 devices took 12 s of processor time,
4 of 16 took 30 s, and 8 of 8 were not done after 45 s."""

SEARCHED = ("1f1b", "gpipe")
"""Schedules whose plans are searched by a formula; only the best are simulated."""

MAX_SIMULATION = 2**22
"""Stages times micro-batches. Plans stop competing in the simulator at the deadline, but one of
them is always simulated in whole: with 64 stages of 65,536 micro-batches that and the search took
7 s of processor time and 0.7 GB."""

MAX_SIMULATION_PLAIN = 2**18
"""The same without numba: 64 stages of 4,096 micro-batches kept a deadline of 20 s, four times as
many went on for 16 s."""

MAX_ORDERED = 2**18
"""The same for the other schedules, whose order of work is written out once for each stage: 64
stages of 4,096 micro-batches kept the deadline, sixteen times as many went on for over 35 s."""

MAX_ORDERED_PLAIN = 2**14
"""And these without numba: 64 stages of 256 micro-batches took 26 s, of 4,096 over 55 s."""


def check_effort(profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions) -> None:
    """Refuse a request that would keep the server busy beyond its deadline.

    Raises:
        InvalidInput: It is too large; the message says which number to lower.
    """
    _check_kinds(cluster)
    _check_simulation(profiles, cluster, options)


def _check_kinds(cluster: Cluster) -> None:
    kinds = {(device.kind, device.memory_bytes, device.speed) for device in cluster.devices}
    if len(kinds) > MAX_KINDS:
        raise InvalidInput(
            f"{len(kinds)} kinds of devices (by kind, memory and speed) are more than this server "
            f"plans for; give at most {MAX_KINDS}, or plan with the library",
            field="/cluster",
        )


def _check_simulation(profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions) -> None:
    num_microbatches = options.num_microbatches
    is_size_asked = "num_microbatches" in options.model_fields_set
    if options.batch_size is not None and not is_size_asked:  # every size is planned
        sizes = sizes_to_try(options.batch_size, tuple(map(get_microbatch_size, profiles)))
        num_microbatches = options.batch_size // min(sizes)
    num_stages = _most_stages(profiles[0], cluster, options, num_microbatches)
    limit, way_out = _limit(options)
    if num_stages * num_microbatches > limit:
        raise InvalidInput(
            f"{num_microbatches} micro-batches over up to {num_stages} stages are more than this "
            f"server simulates; ask for at most {limit // num_stages} micro-batches, or for fewer "
            f"stages by 'max_stages'{way_out}",
            field="/options/num_microbatches"
            if options.batch_size is None
            else "/options/batch_size",
        )


def _most_stages(
    profile: Profile, cluster: Cluster, options: PlanOptions, num_microbatches: int
) -> int:
    """No plan has more stages."""
    num_layers = len(profile.layers)
    places = len(cluster.devices) * (1 if options.schedule in SEARCHED else options.chunks)
    most = [num_layers, places, options.num_stages or num_layers, options.max_stages or num_layers]
    if options.schedule == "1f1b":
        most.append(num_microbatches)
    return min(most)


def _limit(options: PlanOptions) -> tuple[int, str]:
    """Most stages times micro-batches, and what else would help."""
    is_searched, is_compiled = options.schedule in SEARCHED, is_available()
    way_out = "" if is_searched else ", or for the 1f1b schedule"
    if not is_compiled:
        way_out += "; with numba installed (stagewright[fast]) it simulates more"
    if is_searched:
        return MAX_SIMULATION if is_compiled else MAX_SIMULATION_PLAIN, way_out
    return MAX_ORDERED if is_compiled else MAX_ORDERED_PLAIN, way_out
