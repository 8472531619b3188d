"""Numbers of GPUs in exports and imported cuts, as runtimes count them.

A rank counts the cluster's GPUs machine by machine from 0; each machine numbers its own from 0,
in the order of ``CUDA_VISIBLE_DEVICES`` where that is set.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, groupby

from ..core.cluster.cluster import Cluster
from ..core.cluster.places import list_nodes
from ..core.errors import InvalidInput
from ..core.plan.plan import Plan

Gpu = tuple[int, int]
"""A machine, and the number of a GPU in it."""

Visible = tuple[tuple[int | None, tuple[int, ...]], ...]
"""GPUs of the ranks of each machine, in the order of ranks; `None` stands for every machine."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

_OF_NODE = re.compile(rf"\bnode (\d{{1,6}}): {VISIBLE}=(\d[\d,]*)")


def list_ranks(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each stage's devices, counted machine by machine."""
    names = dict.fromkeys(name for stage in plan.stages for name in stage.devices)
    numbers = dict(zip(names, plan.ranks or range(len(names)), strict=True))
    return tuple(tuple(numbers[name] for name in stage.devices) for stage in plan.stages)


def find_gpu(plan: Plan, rank: int) -> Gpu:
    """Return the machine of a rank, and its GPU there."""
    starts = list(accumulate(plan.nodes[:-1], initial=0))
    node = bisect_right(starts, rank) - 1
    return node, rank - starts[node]


def list_gpus(plan: Plan) -> list[Gpu]:
    """Return the GPUs of the pipeline in its order, those of a stage's replicas one by one."""
    places = list_ranks(plan)[: plan.num_stages // plan.chunks]
    return [find_gpu(plan, rank) for rank in chain(*places)]


def number_gpus(plan: Plan) -> tuple[list[int], list[Gpu]]:
    """Return the number of each stage's GPU on its machine, and the GPUs to make visible there.

    The latter are empty for the first machine, where all are visible.
    """
    gpus = list_gpus(plan)
    node, numbers = gpus[0][0], [number for _, number in gpus]
    return numbers, [(node, number) for number in range(max(numbers) + 1)] * bool(node)


def describe_devices(plan: Plan) -> str:
    """Return a line that says which devices run which stage, and their numbers if not in order."""

    def name_gpu(rank: int) -> str:
        node, number = find_gpu(plan, rank)
        return f" (GPU {number}{f' of node {node}' * bool(plan.nodes)})" * bool(plan.ranks)

    held = zip(plan.stages, list_ranks(plan), strict=True)
    return "; ".join(
        f"stage {index} on " + ", ".join(map("{}{}".format, stage.devices, map(name_gpu, ranks)))
        for index, (stage, ranks) in enumerate(held)
    )


def list_visible(gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yield the lines of a header that put the ranks of each machine on these GPUs."""
    yield "On these GPUs, in this order:"
    for node, run in groupby(gpus, key=lambda gpu: gpu[0]):
        yield f"node {node}: {VISIBLE}={','.join(str(number) for _, number in run)}"


def read_visible(text: str, setting: str) -> Visible:
    """Return the GPUs that comments of `list_visible`, or else a setting, make visible."""
    listed: list[tuple[int | None, str]]
    listed = [(int(node), numbers) for node, numbers in _OF_NODE.findall(text)]
    listed = listed or [(None, setting)] * bool(setting)
    return tuple((node, tuple(map(int, re.findall(r"\d+", numbers)))) for node, numbers in listed)


def find_devices(visible: Visible, cluster: Cluster) -> list[int]:
    """Return the devices of a runtime's ranks, as indices in the cluster.

    Raises:
        InvalidInput: A machine does not have such a GPU.
    """
    nodes = list_nodes(cluster)
    if not visible:
        return [*chain(*nodes)]
    found = []
    for given, numbers in visible:
        for node in range(len(nodes)) if given is None else (given,):
            count = len(nodes[node]) if node < len(nodes) else 0
            if missing := [number for number in numbers if number >= count]:
                if given is None and node:
                    continue  # set for the first machine alone
                raise InvalidInput(
                    f"{VISIBLE} has GPU {missing[0]} of node {node}, which has {count} "
                    "in the cluster; give all devices of the machine"
                )
            found += [nodes[node][number] for number in numbers]
    return found
