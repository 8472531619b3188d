"""How much planning one request may ask for.

Planning runs in the server's own process and cannot be interrupted, so it is refused beforehand
if it would take longer than about half a minute. The library itself has no such limits.
"""

from __future__ import annotations

from ..core.cluster import Cluster
from ..core.errors import InvalidInput
from ..core.plan import PlanOptions
from ..core.profile import Profile
from ..planner.microbatches import sizes_to_try
from ..planner.scaled import size_of

MAX_SEARCH = 64_000_000
"""Layers squared times stages: 2,000 layers over 16 devices took 10 s, 1,000 over 64 took 29 s."""

MAX_SIMULATION = 2**18
"""Stages times micro-batches: 64 times 4,096 took 35 s."""


def check_effort(profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
    """Refuse a request that would keep the server busy.

    Raises:
        InvalidInput: It is too large; the message says which number to lower.
    """
    num_microbatches, num_sizes = options.num_microbatches, 1
    if options.batch_size is not None:  # every size is planned
        sizes = sizes_to_try(options.batch_size, (size_of(profile),))
        num_microbatches, num_sizes = options.batch_size // min(sizes), len(sizes)
    num_layers = len(profile.layers)
    num_stages = min(num_layers, len(cluster.devices), options.num_stages or num_layers)
    if num_layers**2 * num_stages * num_sizes > MAX_SEARCH:
        raise InvalidInput(
            f"{num_layers} layers over {num_stages} stages are more than this server plans; "
            "profile coarser layers, allow fewer devices, or plan with the library",
            field="/cluster",
        )
    if num_stages * num_microbatches > MAX_SIMULATION:
        raise InvalidInput(
            f"{num_microbatches} micro-batches over {num_stages} stages are more than "
            f"this server simulates; ask for at most {MAX_SIMULATION // num_stages}",
            field="/options/num_microbatches"
            if options.batch_size is None
            else "/options/batch_size",
        )
