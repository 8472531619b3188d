"""Devices of an imported cut's stages in a cluster, and why its step may have no price."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from ..core.cluster.cluster import Cluster
from ..core.cluster.places import list_nodes
from ..core.errors import InvalidInput
from ..core.plan.plan import PlanOptions
from ..core.units import list_some
from ..planner.problem.input_checks import count_chunks
from ..schedules.traits import FOLDED
from .gpu_numbers import find_devices
from .target import MOST_NAMED, ImportedCut


@dataclass(frozen=True)
class PlacedCut:
    """The stages of a cut that hold layers, on devices of a cluster.

    Attributes:
        balance: Layers of each stage.
        devices: Indices in the cluster of the devices of each stage; empty if there are too few.
        unpriced: Why its step cannot be priced; empty if it can.
        notes: What its price leaves out.
    """

    balance: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...] = ()
    unpriced: str = ""
    notes: tuple[str, ...] = ()


def fill_devices(cut: ImportedCut, cluster: Cluster) -> ImportedCut:
    """Return the cut with its replicas, if its runtime deals all devices to the stages."""
    places = len(cut.stages) // cut.chunks * cut.tensor * cut.ranks_per_device
    replicas, rest = divmod(len(find_devices(cut.visible, cluster)), places)
    if not cut.fills_devices or rest or replicas < 2:
        return cut
    return replace(cut, replicas=(replicas,) * len(cut.stages))


def place_cut(cut: ImportedCut, cluster: Cluster, options: PlanOptions) -> PlacedCut:
    """Return the stages of a cut that hold layers, on their devices.

    Raises:
        InvalidInput: The cut names a GPU that the cluster does not have.
    """
    ranks, size = find_devices(cut.visible, cluster), cut.tensor * cut.ranks_per_device
    if cut.one_machine:
        machine = next((node for node in list_nodes(cluster) if ranks[0] in node), ())
        ranks = [rank for rank in ranks if rank in machine]
    groups = [ranks[at : at + cut.tensor] for at in range(0, len(ranks) - size + 1, size)]
    chunks = count_chunks(options)
    numbers = _number_gpus(cut, chunks, folds=options.schedule in FOLDED)
    highest = max(chain(*numbers), default=0)
    if highest >= len(groups):
        if cut.gpus or cut.visible:
            raise InvalidInput(
                f"a stage is on GPU {highest}, but there are {len(ranks)}; give all devices of "
                "the machine, in the order of their numbers"
            )
        return PlacedCut(cut.balance)
    kept = [index for index, layers in enumerate(cut.stages) if layers]
    empty = [index for index, layers in enumerate(cut.stages) if not layers]
    devices = tuple(tuple(chain(*(groups[at] for at in numbers[index]))) for index in kept)
    balance = tuple(len(cut.stages[index]) for index in kept)
    notes = (f"{_name(empty)} without layers of the profile: passing values on is left out",)
    unpriced = _explain_unpriced(devices, kept, cluster, chunks)
    if chunks > 1 and empty:
        unpriced = f"{_name(empty)} without layers, of {chunks} on each device"
    return PlacedCut(balance, devices, unpriced, notes * bool(empty))


def _number_gpus(cut: ImportedCut, chunks: int, *, folds: bool) -> list[tuple[int, ...]]:
    """Return the numbers of each stage's GPUs, or of groups of them that split its layers."""
    if cut.gpus and chunks == 1:
        return [*cut.gpus]
    places = len(cut.stages) // chunks
    ends = accumulate(cut.replicas[:places] or (1,) * places, initial=0)
    first = [*cut.gpus] or [tuple(range(*span)) for span in pairwise(ends)]
    return [*chain(*(first[:: -1 if folds and turn % 2 else 1] for turn in range(chunks)))]


def _explain_unpriced(
    devices: tuple[tuple[int, ...], ...], kept: list[int], cluster: Cluster, chunks: int
) -> str:
    """Return why stages on these devices have no price; empty if they may have one."""
    stages_of: dict[int, list[int]] = {}
    for stage, held in zip(kept, devices, strict=True):
        for device in held:
            stages_of.setdefault(device, []).append(stage)
    if offloaded := [stage for stage, held in zip(kept, devices, strict=True) if not held]:
        return f"{_name(offloaded)} on no GPU"
    for device, stages in stages_of.items():
        if len(stages) > chunks:
            return f"{_name(stages)} on one device, {cluster.devices[device].name}"
    return ""


def _name(stages: list[int]) -> str:
    several = len(stages) > 1
    listed = list_some(list(map(str, stages)), MOST_NAMED)
    return f"stage{'s' * several} {listed} {'are' if several else 'is'}"
