"""Plans that are fastest in steady state: with many micro-batches often the fastest step too."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.errors import DeadlineExceeded
from ..cost.assignment import Assignment, from_hops
from ..problem.constraints import parts
from ..problem.problem import Request
from ..search.branch_and_bound import BoxSearch, Effort

MAX_ATOMS = 12
"""Positions of the search."""

MAX_DEVICES = 32
"""Beyond, the search takes long beside the one it is meant to help."""

MAX_SEARCHES = 1
"""Label searches of each part."""

MAX_PLANS = 5
"""The best plans of each part."""


def steady(request: Request) -> Iterator[Assignment]:
    """The plans of least time per micro-batch that a search of some ten milliseconds finds.

    The closed form of a step adds up every stage's share of warm-up and drain; where stages have
    different numbers of replicas it can prefer plans that the simulator does not.
    """
    if len(request.cluster.devices) > MAX_DEVICES or request.is_over:
        return
    table = request.coarse(MAX_ATOMS).stages
    effort = Effort(request.deadline, gap=3e-2)
    for part in parts(table, request.devices, request.options, with_ties=False):
        search = BoxSearch(part.space, "throughput", effort)
        try:
            search.run(max_searches=MAX_SEARCHES)
        except DeadlineExceeded:
            return
        classes = search.moves.config_class.tolist()
        recompute = search.moves.config_recompute.tolist()
        for path in sorted(search.paths, key=lambda path: path.value)[:MAX_PLANS]:
            yield from_hops(path.hops, table, classes, recompute, request.devices)
