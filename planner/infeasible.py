"""Why nothing fits, with both numbers, and which changes would make it fit."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.cluster import Cluster
from ..core.errors import Infeasible, InvalidInput
from ..core.plan import PlanOptions
from ..core.profile import Profile
from ..core.units import format_bytes
from .cost import StageCosts, stage_costs
from .intervals import Path
from .pipeline import PipelineSearch
from .schedules import in_flight, too_many_stages
from .splits import describe_stage

Change = tuple[str, Cluster, PlanOptions]
"""A change in words, and what would be asked for then."""


def out_of_memory(search: PipelineSearch) -> Infeasible:
    """The error for a search in which no split fits, about the split that misses by least."""
    costs, options = search.costs, search.costs.options
    cuts = _closest(search).cuts
    num_stages = len(cuts) - 1
    excess = {}
    for stage, limit in enumerate(costs.limits_bytes[:num_stages]):
        held = in_flight(options.schedule, stage, num_stages, options.num_microbatches)
        needed = costs.memory(cuts[stage], cuts[stage + 1], held).total_bytes
        if limit is not None:
            excess[stage] = (needed - limit, needed, limit)
    stage = max(excess, key=lambda index: excess[index][0])
    _, needed, limit = excess[stage]
    ways_out = _ways_out(costs)
    advice = (
        f"it would fit with {', or '.join(ways_out)}"
        if ways_out
        else "fewer micro-batches, an optimizer without state or more such devices do not "
        "suffice; use devices with more memory"
    )
    return Infeasible(
        f"no split fits the devices' memory. In the one that misses by least "
        f"({num_stages} stage{'s' if num_stages > 1 else ''}), "
        f"{describe_stage(costs, cuts, stage)} needs {format_bytes(needed)} ({needed} bytes) and "
        f"device {costs.cluster.devices[stage].name!r} allows {format_bytes(limit)} "
        f"({limit} bytes); {advice}",
        constraint="memory",
        required=needed,
        available=limit,
    )


def _closest(search: PipelineSearch) -> Path:
    """The split, of any allowed number of stages, whose worst stage has least bytes too many."""
    paths = [search.smallest_excess(num_stages) for num_stages in search.stage_counts()]
    found = [path for path in paths if path is not None]
    assert found, "legal cuts were counted, so there is a split"
    return min(found, key=lambda path: path.value)


def _ways_out(costs: StageCosts) -> list[str]:
    """Of each kind of change the smallest one that makes some split fit, in words."""
    cluster, options = costs.cluster, costs.options
    kinds = [_fewer_microbatches(cluster, options), _less_state(cluster, options)]
    if options.num_stages is None:
        kinds.append(_more_microbatches(costs))
        kinds.append(_more_devices(cluster, options, len(costs.legal_cuts) + 1))
    else:
        kinds.append(iter([("any number of stages", cluster, _with(options, num_stages=None))]))
    ways_out = []
    for changes in kinds:
        for text, other_cluster, other_options in changes:
            if _fits(costs.profile, other_cluster, other_options):
                ways_out.append(text)
                break
    return ways_out


def _fits(profile: Profile, cluster: Cluster, options: PlanOptions) -> bool:
    """Whether some split fits; none does where the request itself would be refused."""
    try:
        return _closest(PipelineSearch(stage_costs(profile, cluster, options))).value <= 0
    except InvalidInput:  # more stages than the schedule takes, or numbers too large to add up
        return False


def _fewer_microbatches(cluster: Cluster, options: PlanOptions) -> Iterator[Change]:
    count = options.num_microbatches // 2
    while count:
        yield f"num_microbatches={count}", cluster, _with(options, num_microbatches=count)
        count //= 2


def _more_microbatches(costs: StageCosts) -> Iterator[Change]:
    """1F1B takes as many stages as micro-batches, so more of these can mean smaller stages."""
    cluster, options = costs.cluster, costs.options
    most = min(len(cluster.devices), len(costs.legal_cuts) + 1)
    count = options.num_microbatches
    while options.schedule == "1f1b" and count < most:
        count = min(2 * count, most)
        yield f"num_microbatches={count}", cluster, _with(options, num_microbatches=count)


def _less_state(cluster: Cluster, options: PlanOptions) -> Iterator[Change]:
    if options.schedule == "gpipe":
        yield "schedule='1f1b'", cluster, _with(options, schedule="1f1b")
    if options.optimizer in ("adam", "momentum"):
        yield "optimizer='sgd'", cluster, _with(options, optimizer="sgd")


def _more_devices(cluster: Cluster, options: PlanOptions, most: int) -> Iterator[Change]:
    """Copies of the last device; links do not matter to what fits.

    Devices beyond 1F1B's micro-batches would stay idle, so those are raised along with them.
    """
    count, last = len(cluster.devices), cluster.devices[-1]
    while count < most:
        count = min(2 * count, most)
        more = tuple(
            last.model_copy(update={"name": f"{last.name}+{index}"})
            for index in range(count - len(cluster.devices))
        )
        levels = Cluster.uniform(count).levels
        text, other_options = f"{count} devices", options
        if too_many_stages(options.schedule, count, options.num_microbatches):
            text += f" and num_microbatches={count}"
            other_options = _with(options, num_microbatches=count)
        yield text, Cluster(devices=(*cluster.devices, *more), levels=levels), other_options


def _with(options: PlanOptions, **changes: object) -> PlanOptions:
    return PlanOptions.model_validate({**options.model_dump(), **changes})
