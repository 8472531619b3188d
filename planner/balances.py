"""Plans that even out one number a stage, as torchgpipe does, and PipeDream's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.errors import Infeasible, InvalidInput
from ..core.units import format_bytes
from .assignment import Assignment, Cuts, cuts_of, in_device_order, placed
from .balance import balance
from .cost import Tables
from .pipedream import pipedream_chain
from .price import Priced
from .request import Request


def balanced(request: Request) -> Priced:
    """The plan of ``balance_time``, ``balance_size`` or ``pipedream``.

    Raises:
        InvalidInput: PipeDream's optimizer does not take this cluster.
        Infeasible: The plan does not fit; these objectives know nothing of memory.
    """
    if request.options.objective == "pipedream":
        found = _pipedream(request)
    else:
        found = in_device_order(_even_cuts(request), request.devices)
    if found is None:
        raise Infeasible(
            "there are fewer devices than stages; ask for fewer stages",
            constraint="devices",
            required=request.options.num_stages or 0,
            available=len(request.cluster.devices),
        )
    pricer = request.pricer
    stages = pricer.stages(found)
    for number, stage in enumerate(stages):
        needed = stage.memory.total_bytes
        if stage.limit_bytes is not None and needed > stage.limit_bytes:
            raise Infeasible(
                f"the objective {request.options.objective!r} knows nothing of memory: its stage "
                f"{number} needs {format_bytes(needed)} ({needed} bytes), its device allows "
                f"{format_bytes(stage.limit_bytes)} ({stage.limit_bytes} bytes); plan for "
                "'step_time' instead",
                constraint="memory",
                required=needed,
                available=stage.limit_bytes,
            )
    return pricer.price(found)


def _even_cuts(request: Request) -> Cuts:
    """As many stages as asked for, or as devices, cuts and the schedule allow."""
    costs, options = request.costs, request.options
    most = min(costs.num_atoms, len(request.cluster.devices))
    if options.max_stages is not None:
        most = min(most, options.max_stages)
    if options.schedule == "1f1b":
        most = min(most, options.num_microbatches)
    count = options.num_stages or most
    if options.objective == "balance_size":
        return _positions(costs, even_sizes(costs, count))
    work = costs.forward_s + costs.backward_s
    atoms = [float(work[index, index + 1]) for index in range(costs.num_atoms)]
    return _positions(costs, cuts_of(balance(atoms, count)))


def even_sizes(costs: Tables, num_stages: int) -> Cuts:
    """Positions of the stages whose largest weights and activations are least.

    A stage never shrinks by taking more layers, so stages taken as long as a limit allows are
    fewest; bisection over the sizes that occur. O(S log N log N^2).
    """
    sizes = costs.weights_bytes + costs.saved_bytes
    n = costs.num_atoms
    values = np.unique(sizes[np.triu_indices(n + 1, k=1)])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(sizes, int(values[middle]), num_stages)) <= num_stages + 1:
            high = middle
        else:
            low = middle + 1
    cuts = _greedy(sizes, int(values[low]), num_stages)
    while len(cuts) <= num_stages:  # stages of several atoms can be split without harm
        widest = max(range(len(cuts) - 1), key=lambda index: cuts[index + 1] - cuts[index])
        cuts.insert(widest + 1, (cuts[widest] + cuts[widest + 1]) // 2)
    return tuple(cuts)


def _greedy(
    sizes: np.ndarray[tuple[int, ...], np.dtype[np.int64]], limit: int, most: int
) -> list[int]:
    """Stages as long as the limit allows; gives up after ``most`` of them, or at too large ones."""
    n = sizes.shape[0] - 1
    cuts = [0]
    while cuts[-1] < n:
        first = cuts[-1]
        last = int(np.searchsorted(sizes[first, first + 1 :], limit, side="right")) + first
        if last == first or len(cuts) > most:
            return [0] * (n + 2)
        cuts.append(last)
    return cuts


def _positions(costs: Tables, blocks: Sequence[int]) -> Cuts:
    return tuple(costs.positions[block] for block in blocks)


def _pipedream(request: Request) -> Assignment | None:
    """PipeDream's optimum for the outermost link level, on all devices of one class.

    Raises:
        InvalidInput: Devices differ, or are more than its search is made for.
    """
    costs, devices = request.costs, request.devices
    if len(devices.classes) > 1:
        raise InvalidInput(
            "PipeDream's objective knows equal devices only; plan for 'step_time'",
            field="/options/objective",
        )
    work = costs.forward_s + costs.backward_s
    count = costs.num_atoms
    found = pipedream_chain(
        [float(work[index, index + 1]) for index in range(count)],
        [float(costs.weights_bytes[index, index + 1]) for index in range(count)],
        [float(size) for size in costs.arriving_bytes[1:-1]],
        [len(request.cluster.devices)],
        [devices.levels[-1].bandwidth_bytes_per_s],
    )
    blocks = [0]
    for stage in found.stages:
        blocks.append(blocks[-1] + len(stage.node_ids))
    replicas = [stage.replicas for stage in found.stages]
    return placed(_positions(costs, blocks), replicas, devices)
