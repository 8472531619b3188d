"""Plans for schedules whose step has no closed form: chosen by simulation alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..core.errors import Infeasible
from .assignment import Assignment, placed
from .candidates import equal_layers, even_times, neighbours, with_recompute
from .price import Priced
from .race import Race
from .request import Request

SEVERAL_STAGES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv")
"""Schedules with several stages a device."""

MAX_RANKS = 64
"""Pipelines of more devices are not tried; more replicas are."""


def chunks_of(request: Request) -> int:
    """Stages a device."""
    if request.options.schedule == "zbv":
        return 2
    return request.options.chunks if request.options.schedule in SEVERAL_STAGES else 1


def best_of_schedule(request: Request) -> tuple[Priced, float]:
    """The fastest plan found, and a time no plan is below.

    Even times and equal layer counts for every number of devices a pipeline may have, then cuts
    moved one by one while that helps. The bound is that of work: all of it on all devices, or
    one micro-batch through the whole model.

    Raises:
        Infeasible: None of them fits.
    """
    race = Race(request)
    race.enter(_candidates(request))
    for _ in range(8):
        before = race.best
        if before is None or not request.costs.has(before.assignment.cuts):
            break
        race.enter(neighbours(before.assignment, request.costs))
        if race.best is before:
            break
    if race.best is None:
        options = request.options
        raise Infeasible(
            f"no plan of the {options.schedule} schedule was found that fits the devices' memory "
            f"and takes {options.num_microbatches} micro-batches; try the 1f1b schedule, "
            "recompute='auto', or a number of micro-batches that the stages divide",
            constraint="schedule",
            required=1,
            available=0,
        )
    return race.best, min(_bound_s(request), race.best.step_time_s)


def _candidates(request: Request) -> Iterator[Assignment]:
    costs, options = request.costs, request.options
    chunks, total = chunks_of(request), len(request.cluster.devices)
    most = min(total, costs.num_atoms // chunks, MAX_RANKS)
    for ranks in range(1, most + 1):
        num_stages = ranks * chunks
        if options.num_stages not in (None, num_stages):
            continue
        if options.max_stages is not None and num_stages > options.max_stages:
            continue
        limit = min(options.max_replicas or total, options.num_microbatches, total // ranks)
        for replicas in sorted({1, limit}):
            for cuts in {
                equal_layers(len(costs.profile.layers), num_stages),
                even_times(costs, num_stages) or (),
            }:
                if cuts and costs.has(cuts):
                    for number in range(len(request.devices.classes)):
                        found = placed(
                            cuts[:ranks] + cuts[-1:], [replicas] * ranks, request.devices,
                            class_index=number,
                        )  # fmt: skip
                        if found is not None:
                            yield with_recompute(
                                request.pricer,
                                _repeated(found, cuts, chunks, options.schedule == "zbv"),
                            )


def _repeated(one: Assignment, cuts: tuple[int, ...], chunks: int, folds: bool) -> Assignment:
    """Every device takes one stage of each round; the second round runs back where it folds."""
    ends: tuple[int, ...] = ()
    for lap in range(chunks):
        ends += one.ends[::-1] if folds and lap % 2 else one.ends
    return replace(
        one,
        cuts=cuts,
        replicas=one.replicas * chunks,
        classes=one.classes * chunks,
        ends=ends,
        recompute=one.recompute * chunks,
        chunks=chunks,
    )


def _bound_s(request: Request) -> float:
    costs, devices = request.costs, request.devices
    work_s = float(costs.forward_s[0, -1] + costs.backward_s[0, -1])
    speeds = sum(device.speed for device in request.cluster.devices)
    shared_s = request.options.num_microbatches * work_s / speeds
    return max(shared_s, work_s / devices.fastest) * (1 - 1e-12)
