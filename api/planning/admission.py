"""Admission control: refuse requests that would run beyond their deadline.

Searches check their deadline, so layers and devices need no limits: 2,000 layers over 64 devices,
or over 4,096, took 9 s of processor time. The limits here are on what was measured to go on after
the deadline. The library itself has none of them.
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
"""Kinds of devices, by name, memory or speed. Stages of any kind may follow those of any other:
with 200 layers and a deadline of 20 s, 3 kinds of 16 devices took 12 s of processor time, 4 of 16
took 30 s, and 8 of 8 had not ended after 45 s."""

SEARCHED = ("1f1b", "gpipe")
"""Schedules with a closed form for the step time; only the best plans are simulated."""

MAX_SIMULATION = 2**22
"""Stages times micro-batches. The simulator stops comparing plans at the deadline but always
completes one: with 64 stages of 65,536 micro-batches, that and the search took 7 s of processor
time and 0.7 GB."""

MAX_SIMULATION_PLAIN = 2**18
"""Limit without numba: 64 stages of 4,096 micro-batches kept a deadline of 20 s, four times as
many exceeded it by 16 s."""

MAX_ORDERED = 2**18
"""Limit for other schedules, whose order of actions is generated once per stage: 64 stages of
4,096 micro-batches kept the deadline, sixteen times as many exceeded it by over 35 s."""

MAX_ORDERED_PLAIN = 2**14
"""Limit for those without numba: 64 stages of 256 micro-batches took 26 s, of 4,096 over 55 s."""


def check_effort(profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions) -> None:
    """Refuse a request that would keep the server busy beyond its deadline.

    Raises:
        InvalidInput: It is too large; the message names the number to reduce.
    """
    _check_kinds(cluster)
    _check_simulation(profiles, cluster, options)


def _check_kinds(cluster: Cluster) -> None:
    kinds = {(device.kind, device.memory_bytes, device.speed) for device in cluster.devices}
    if len(kinds) > MAX_KINDS:
        raise InvalidInput(
            f"{len(kinds)} kinds of devices (by name, memory and speed) exceed this server's limit "
            f"of {MAX_KINDS}; use fewer, or plan with the library",
            field="/cluster",
        )


def _check_simulation(profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions) -> None:
    num_microbatches = options.num_microbatches
    is_size_asked = "num_microbatches" in options.model_fields_set
    if options.batch_size is not None and not is_size_asked:  # every size is tried
        sizes = sizes_to_try(options.batch_size, tuple(map(get_microbatch_size, profiles)))
        num_microbatches = options.batch_size // min(sizes)
    num_stages = _most_stages(profiles[0], cluster, options, num_microbatches)
    limit, way_out = _limit(options)
    if num_stages * num_microbatches > limit:
        raise InvalidInput(
            f"{num_microbatches} micro-batches over up to {num_stages} stages exceed this server's "
            f"limit; use at most {limit // num_stages} micro-batches, or fewer stages by "
            f"'max_stages'{way_out}",
            field="/options/num_microbatches"
            if options.batch_size is None
            else "/options/batch_size",
        )


def _most_stages(
    profile: Profile, cluster: Cluster, options: PlanOptions, num_microbatches: int
) -> int:
    """Return an upper bound of the number of stages."""
    num_layers = len(profile.layers)
    places = len(cluster.devices) * (1 if options.schedule in SEARCHED else options.chunks)
    most = [num_layers, places, options.num_stages or num_layers, options.max_stages or num_layers]
    if options.schedule == "1f1b":
        most.append(num_microbatches)
    return min(most)


def _limit(options: PlanOptions) -> tuple[int, str]:
    """Return the limit on stages times micro-batches, and a way out to suggest."""
    is_searched, is_compiled = options.schedule in SEARCHED, is_available()
    way_out = "" if is_searched else ", or the 1f1b schedule"
    if not is_compiled:
        way_out += "; with numba installed (stagewright[fast]) the limit is higher"
    if is_searched:
        return MAX_SIMULATION if is_compiled else MAX_SIMULATION_PLAIN, way_out
    return MAX_ORDERED if is_compiled else MAX_ORDERED_PLAIN, way_out
