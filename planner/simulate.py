"""Play a schedule with given durations and see when everything happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import InvalidInput
from ..core.schedule import Schedule, Work
from ..core.timeline import Timeline, TimelineEvent


@dataclass(frozen=True)
class StageTimes:
    """Durations of one micro-batch, in seconds; S stages.

    Attributes:
        forward_s: Forward of each stage, S entries.
        backward_s: Backward of each stage, S entries.
        send_forward_s: From stage s to s + 1, S - 1 entries; empty if sending takes no time.
        send_backward_s: From stage s + 1 to s, S - 1 entries; empty if sending takes no time.
        tied_sync_s: Summing the gradients of tied weights, after everything else.
        saved_bytes: Activations a stage keeps per micro-batch; empty if not of interest.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    send_forward_s: Sequence[float] = ()
    send_backward_s: Sequence[float] = ()
    tied_sync_s: float = 0.0
    saved_bytes: Sequence[int] = ()


def simulate(schedule: Schedule, times: StageTimes, *, with_events: bool = True) -> Timeline:
    """The timeline of one step.

    An action starts when its rank is free and its inputs have arrived; what it makes is sent at
    once, beside the computation, and messages do not delay each other. When the last action is
    done every rank waits for the gradients of tied weights to be summed. The bubble counts all
    time in which a rank neither computes forward nor backward. O(actions).

    Args:
        schedule: Forwards and whole backwards (work F and B).
        times: Durations, one entry a stage.
        with_events: Leave out to learn only the step time, bubble and peak.

    Raises:
        InvalidInput: The durations do not fit the schedule, or the schedule can never finish:
            the message says what each rank waits for.
    """
    _check(schedule, times)
    starts = _start_times(schedule, times)
    durations = {Work.FORWARD: times.forward_s, Work.BACKWARD: times.backward_s}
    last_end_s = busy_s = 0.0
    for actions, rank_starts in zip(schedule.ranks, starts, strict=True):
        for action, start_s in zip(actions, rank_starts, strict=True):
            duration_s = durations[action.work][action.stage]
            last_end_s = max(last_end_s, start_s + duration_s)
            busy_s += duration_s
    step_time_s = last_end_s + times.tied_sync_s
    capacity_s = step_time_s * len(schedule.ranks)
    return Timeline(
        source="simulated",
        num_ranks=len(schedule.ranks),
        step_time_s=step_time_s,
        bubble_fraction=min(1.0, max(0.0, 1 - busy_s / capacity_s)) if capacity_s else 0.0,
        peak_activation_bytes=_peak_activation_bytes(schedule, times.saved_bytes),
        events=_events(schedule, times, starts, last_end_s) if with_events else (),
    )


def _check(schedule: Schedule, times: StageTimes) -> None:
    stages = schedule.num_stages
    for name, values, accepted in (
        ("forward_s", times.forward_s, (stages,)),
        ("backward_s", times.backward_s, (stages,)),
        ("send_forward_s", times.send_forward_s, (0, stages - 1)),
        ("send_backward_s", times.send_backward_s, (0, stages - 1)),
        ("saved_bytes", times.saved_bytes, (0, stages)),
    ):
        if len(values) not in accepted:
            raise InvalidInput(f"{name} has {len(values)} entries for {stages} stages")
    backwards = 0
    for actions in schedule.ranks:
        for action in actions:
            if action.work not in (Work.FORWARD, Work.BACKWARD):
                raise InvalidInput(
                    f"the simulator knows forwards and whole backwards, not {action}"
                )
            backwards += action.work is Work.BACKWARD
    if backwards not in (0, stages * schedule.num_microbatches):
        raise InvalidInput(
            f"{backwards} backwards for {stages} stages x {schedule.num_microbatches} "
            "micro-batches; every one must run once, or none at all"
        )


def _start_times(schedule: Schedule, times: StageTimes) -> list[list[float]]:
    """When each action of each rank starts, in the schedule's own order.

    A rank is played until it waits for an input nobody has made yet; it is taken up again when
    that input is made. Each action is played once and waited for at most twice.
    """
    ends: dict[tuple[bool, int, int], float] = {}  # by (is backward, stage, micro-batch)
    waiting: dict[tuple[bool, int, int], int] = {}  # the rank that waits for it
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    free_s = [0.0] * len(schedule.ranks)
    ready = list(range(len(schedule.ranks)))[::-1]
    while ready:
        rank = ready.pop()
        actions = schedule.ranks[rank]
        while len(starts[rank]) < len(actions):
            action = actions[len(starts[rank])]
            key = (action.work is Work.BACKWARD, action.stage, action.microbatch)
            start_s = free_s[rank]
            missing = None
            for needed, delay_s in _inputs(*key, times):
                if needed not in ends:
                    missing = needed
                    break
                start_s = max(start_s, ends[needed] + delay_s)
            if missing is not None:
                waiting[missing] = rank
                break
            duration_s = (times.backward_s if key[0] else times.forward_s)[action.stage]
            ends[key] = free_s[rank] = start_s + duration_s
            starts[rank].append(start_s)
            if key in waiting:
                ready.append(waiting.pop(key))
    if waiting:
        stuck = "; ".join(
            f"rank {rank} waits for {stage}{'B' if backward else 'F'}{microbatch}"
            for (backward, stage, microbatch), rank in sorted(waiting.items())
        )
        raise InvalidInput(f"the schedule never finishes: {stuck}")
    return starts


def _inputs(
    backward: bool, stage: int, microbatch: int, times: StageTimes
) -> list[tuple[tuple[bool, int, int], float]]:
    """The actions an action reads from, and how long their results travel."""
    if not backward:
        if stage == 0:
            return []
        delay_s = times.send_forward_s[stage - 1] if times.send_forward_s else 0.0
        return [((False, stage - 1, microbatch), delay_s)]
    inputs = [((False, stage, microbatch), 0.0)]
    if stage + 1 < len(times.forward_s):
        delay_s = times.send_backward_s[stage] if times.send_backward_s else 0.0
        inputs.append(((True, stage + 1, microbatch), delay_s))
    return inputs


def _peak_activation_bytes(schedule: Schedule, saved_bytes: Sequence[int]) -> tuple[int, ...]:
    """Highest sum of saved activations per rank; a forward-only schedule saves nothing."""
    if not saved_bytes:
        return ()
    trains = any(action.work is Work.BACKWARD for action in schedule.ranks[0])
    peaks = []
    for actions in schedule.ranks:
        held = peak = 0
        for action in actions:
            if action.work is Work.FORWARD:
                held += saved_bytes[action.stage] if trains else 0
                peak = max(peak, held)
            else:
                held -= saved_bytes[action.stage]
        peaks.append(peak)
    return tuple(peaks)


def _events(
    schedule: Schedule, times: StageTimes, starts: list[list[float]], last_end_s: float
) -> tuple[TimelineEvent, ...]:
    """Every action, every message that takes time, and the final sum, by rank and start."""
    events = []
    for rank, actions in enumerate(schedule.ranks):
        for action, start_s in zip(actions, starts[rank], strict=True):
            stage, microbatch = action.stage, action.microbatch
            forward = action.work is Work.FORWARD
            end_s = start_s + (times.forward_s if forward else times.backward_s)[stage]
            events.append(
                TimelineEvent(
                    rank=rank, stage=stage, kind=action.work, microbatch=microbatch,
                    start_s=start_s, end_s=end_s,
                )
            )  # fmt: skip
            sends = times.send_forward_s if forward else times.send_backward_s
            boundary = stage if forward else stage - 1
            if sends and 0 <= boundary < len(sends) and sends[boundary] > 0:
                events.append(
                    TimelineEvent(
                        rank=rank, stage=stage, microbatch=microbatch,
                        kind="send_forward" if forward else "send_backward",
                        start_s=end_s, end_s=end_s + sends[boundary],
                    )
                )  # fmt: skip
        if times.tied_sync_s > 0:
            events.append(
                TimelineEvent(
                    rank=rank, stage=schedule.stage_rank.index(rank), kind="reduce", microbatch=0,
                    start_s=last_end_s, end_s=last_end_s + times.tied_sync_s,
                )
            )  # fmt: skip
    return tuple(events)
