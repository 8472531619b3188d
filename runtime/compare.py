"""Comparison of a plan's predictions with a recorded step, and correction of its profile."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ..core.errors import InvalidInput
from ..core.plan.plan import Plan
from ..core.plan.schedule import Work
from ..core.plan.timeline import Timeline, TimelineEvent
from ..core.profile.profile import LayerProfile, Profile, Timing
from ..core.text_table import format_table
from ..core.units import format_time

BACKWARD_PARTS = (Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT, Work.RECOMPUTE)


@dataclass(frozen=True)
class ComparedDuration:
    """One predicted and measured duration.

    Attributes:
        what: What took this time, for example ``stage 1 forward``.
        predicted_s: Prediction for one micro-batch.
        measured_s: Median over micro-batches; `None` if the step does not show it.
    """

    what: str
    predicted_s: float
    measured_s: float | None

    @property
    def excess_s(self) -> float:
        """Return the measured minus the predicted time; 0 if it was not measured."""
        return 0.0 if self.measured_s is None else self.measured_s - self.predicted_s


@dataclass(frozen=True)
class RunComparison:
    """Comparison of a plan with a recorded step.

    Attributes:
        step: From the first action to the end of the last. A recorded step does not include the
            gradient synchronisation that follows.
        stages: Forward and backward of each stage, two entries per stage.
        links: Messages across each boundary, first of activations and then of gradients.
    """

    step: ComparedDuration
    stages: tuple[ComparedDuration, ...]
    links: tuple[ComparedDuration, ...]

    @property
    def worst(self) -> ComparedDuration:
        """Return the duration with the largest error in seconds."""
        return max((*self.stages, *self.links), key=lambda each: abs(each.excess_s))

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "predicted", "measured", "off by")]
        rows += [
            (
                each.what,
                format_time(each.predicted_s),
                "not seen" if each.measured_s is None else format_time(each.measured_s),
                "" if each.measured_s is None else _percent(each),
            )
            for each in (self.step, *self.stages, *self.links)
        ]
        table = format_table(rows)
        worst = self.worst
        way = "longer" if worst.excess_s > 0 else "shorter"
        excess = f"{format_time(abs(worst.excess_s))} {way} than planned, per micro-batch"
        return f"{table}\nlargest difference: {worst.what}, {excess}"


def compare(plan: Plan, timeline: Timeline) -> RunComparison:
    """Compare a plan with a recorded step of it.

    A message's time is visible only where its receiver waited for it: from the end of the action
    that sends it to the start of the action that reads it, the least over micro-batches.

    Args:
        plan: The plan that was run.
        timeline: A step recorded by `trace.record`.

    Raises:
        InvalidInput: The step has other stages or micro-batches.
    """
    seen = {(event.stage, event.microbatch) for event in timeline.events}
    wanted = {(s, k) for s in range(plan.num_stages) for k in range(plan.num_microbatches)}
    if seen != wanted:
        stages = len({stage for stage, _ in seen})
        microbatches = len({microbatch for _, microbatch in seen})
        raise InvalidInput(
            f"the recorded step has {stages} stages and {microbatches} micro-batches, the plan "
            f"{plan.num_stages} and {plan.num_microbatches}; record a step of this plan"
        )
    # Medians resist the first micro-batch, which warms up caches and allocators.
    stages_found = []
    for index, stage in enumerate(plan.stages):
        mine = [event for event in timeline.events if event.stage == index]
        forwards = _by_microbatch(event for event in mine if event.kind == Work.FORWARD)
        backwards = _by_microbatch(event for event in mine if event.kind in BACKWARD_PARTS)
        stages_found += [
            ComparedDuration(f"stage {index} forward", stage.forward_time_s, _median(forwards)),
            ComparedDuration(f"stage {index} backward", stage.backward_time_s, _median(backwards)),
        ]
    links = [
        ComparedDuration(
            f"stage {index} to {index + 1}",
            plan.stages[index].send_forward_time_s,
            _message_s(timeline, index, index + 1, (Work.FORWARD,)),
        )
        for index in range(plan.num_stages - 1)
    ] + [
        ComparedDuration(
            f"stage {index + 1} back to {index}",
            plan.stages[index + 1].send_backward_time_s,
            _message_s(timeline, index + 1, index, (Work.BACKWARD, Work.BACKWARD_INPUT)),
        )
        for index in range(plan.num_stages - 1)
    ]
    step = ComparedDuration("step", plan.step_time_s, timeline.step_time_s)
    return RunComparison(step, tuple(stages_found), tuple(links))


def corrected(profile: Profile, plan: Plan, comparison: RunComparison) -> Profile:
    """Return the profile with each stage's layers scaled to the stage's measured time.

    A step shows stages, not layers, so layers of a stage keep their proportions. Time that a plan
    adds to a stage's layers (recomputation, the loss) is scaled with them.

    Raises:
        InvalidInput: The plan has other layers than the profile.
    """
    names = tuple(entry.layer.name for entry in profile.layers)
    if names != plan.layer_names:
        raise InvalidInput(
            f"the plan's {len(plan.layer_names)} layers are not the profile's {len(names)}; pass "
            "the profile that was planned from"
        )
    layers: list[LayerProfile] = []
    for index, stage in enumerate(plan.stages):
        forward, backward = comparison.stages[2 * index : 2 * index + 2]
        for entry in profile.layers[stage.first_layer : stage.first_layer + stage.num_layers]:
            layers.append(_scale_layer(entry, _factor(forward), _factor(backward)))
    note = (
        "times of layers corrected by a recorded step of a plan; the whole model was not measured"
    )
    changes = {
        "layers": tuple(layers),
        "notes": (*profile.notes, note),
        "reconciliation": None,  # it was about the uncorrected times
    }
    return profile.model_copy(update=changes)


def _scale_layer(entry: LayerProfile, forward: float, backward: float) -> LayerProfile:
    changes: dict[str, Timing | None] = {"forward": _scale_timing(entry.forward, forward)}
    for name in ("backward", "backward_input", "backward_weight"):
        timing = getattr(entry, name)
        changes[name] = None if timing is None else _scale_timing(timing, backward)
    return entry.model_copy(update=changes)


def _scale_timing(timing: Timing, factor: float) -> Timing:
    return timing.model_copy(
        update={"median_s": timing.median_s * factor, "spread_s": timing.spread_s * factor}
    )


def _factor(each: ComparedDuration) -> float:
    if not each.predicted_s or each.measured_s is None:
        return 1.0
    return each.measured_s / each.predicted_s


def _message_s(
    timeline: Timeline, sender: int, receiver: int, works: tuple[Work, ...]
) -> float | None:
    """Return the shortest time from sending a message to its use, where the receiver was idle."""
    made = {e.microbatch: e for e in timeline.events if e.stage == sender and e.kind in works}
    found = []
    for rank in range(timeline.num_ranks):
        free_s = 0.0
        for event in timeline.events:
            if event.rank != rank:
                continue
            source = made.get(event.microbatch)
            reads = event.stage == receiver and event.kind in works
            # Only a rank that was idle before the message was sent started because it arrived.
            if reads and source is not None and source.rank != rank and free_s <= source.end_s:
                found.append(max(event.start_s - source.end_s, 0.0))
            free_s = event.end_s
    return min(found, default=None)


def _by_microbatch(events: Iterable[TimelineEvent]) -> list[float]:
    """Return the total duration of each micro-batch's events."""
    found: dict[int, float] = {}
    for event in events:
        length_s = event.end_s - event.start_s
        found[event.microbatch] = found.get(event.microbatch, 0.0) + length_s
    return list(found.values())


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _percent(each: ComparedDuration) -> str:
    if not each.predicted_s:
        return ""
    return f"{each.excess_s / each.predicted_s:+.0%}"
