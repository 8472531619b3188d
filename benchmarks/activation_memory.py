"""Compare the memory that profiles predict with what the allocator handed out.

Three comparisons over six small models: what autograd keeps for random runs of consecutive layers
against the profile's storage table; the same for whole models; and the peak of stages at their
place in a schedule against the plan's. Exits 1 beyond `LIMITS`.

    benchmarks/activation_memory.py --write docs/evidence/activation-memory.md
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.allocations import Allocations  # noqa: E402
from benchmarks.memory_models import MODELS, Subject  # noqa: E402
from benchmarks.stage_runs import ModelRun, Place, StageRunner, places  # noqa: E402
from stagewright.core.cluster.cluster import Cluster  # noqa: E402
from stagewright.core.plan.plan import PlanOptions  # noqa: E402
from stagewright.core.plan.schedule import TrainingSchedule  # noqa: E402
from stagewright.core.requests.requests import ProfilingOptions  # noqa: E402
from stagewright.planner.price_split import plan_from_balance  # noqa: E402
from stagewright.planner.validation.reference_cost import saved_bytes  # noqa: E402
from stagewright.profiler.measure.profile import profile  # noqa: E402

LIMITS = {"interval": 0.03, "whole": 0.01, "median_peak": 0.05}
"""Largest relative errors: of any interval, of a whole model, and the median of peaks."""

SCHEDULES: tuple[tuple[TrainingSchedule, int, int], ...] = (
    ("gpipe", 2, 4),
    ("1f1b", 2, 4),
    ("1f1b", 3, 6),
    ("1f1b", 4, 4),
)
"""Schedule, stages and micro-batches of the peaks, with every stage recomputed in one more."""

RECOMPUTED: tuple[tuple[TrainingSchedule, int, int], ...] = (("1f1b", 2, 4),)


class _Arrived(torch.autograd.Function):
    """A received value: its gradient goes nowhere, and it is kept only if something keeps it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None


class Study:
    """One model: captured, profiled, and ready to be measured."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, torch.device(device)
        subject = _moved(MODELS[name](), self.device)
        options = ProfilingOptions(budget_s=0.01, num_threads=1)
        self.profile = profile(
            subject.model,
            subject.sample,
            options=options,
            loss_fn=subject.loss_fn,
            target=subject.target,
        )
        self.run = ModelRun.of(
            self.profile, subject.model, subject.sample, subject.target, subject.loss_fn
        )
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        for parameter in subject.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        gc.freeze()  # so that collecting, many times from here on, looks at what is new alone

    def random_intervals(self, count: int) -> list[tuple[int, int]]:
        """Pairs of legal cuts, the whole model not among them."""
        draw = random.Random(self.name)
        whole = (0, self.run.num_layers)
        intervals: list[tuple[int, int]] = []
        while len(intervals) < count:
            first, last = sorted(draw.sample(self.run.cuts, 2))
            if (first, last) != whole:
                intervals.append((first, last))
        return intervals

    def predicted_bytes(self, first: int, last: int) -> int:
        """By the table, without the loss."""
        model = self.profile.model_copy(update={"loss": None})
        return saved_bytes(model, range(first, last))

    def held_bytes(
        self, first: int, last: int, *, received: bool = True, sent: bool = False
    ) -> int:
        """Return what stays allocated of a forward when only its graph is left.

        Args:
            first: The interval's first layer.
            last: One past its last.
            received: Count what it received, where it is kept.
            sent: Hold on to what it hands out.
        """
        module = self.run.segment(first, last)
        self.run.values(first)  # computed once, and not while allocations are counted
        outside = None if received else self._inputs(first)
        with Allocations(self.device) as allocations:
            inputs = self._inputs(first) if outside is None else outside
            outputs = module(*inputs)
            graph = [value.grad_fn for value in outputs if isinstance(value, Tensor)]
            del inputs
            if not sent:
                outputs = ()
        del graph, outputs, outside
        return allocations.kept_bytes

    def _inputs(self, first: int) -> list[Tensor]:
        """Make what arrives, in copies that live only as long as something keeps them."""
        inputs = []
        for value, wanted in zip(self.run.values(first), self.run.needs_grad(first), strict=True):
            copy = value.clone() if first else value
            if wanted:
                copy = _Arrived.apply(self.anchor, copy)  # type: ignore[no-untyped-call]
            inputs.append(copy)
        return inputs

    def intervals(self, count: int) -> list[dict[str, Any]]:
        """Predicted and held, the whole model first."""
        rows = []
        for first, last in [(0, self.run.num_layers), *self.random_intervals(count)]:
            predicted, held = self.predicted_bytes(first, last), self.held_bytes(first, last)
            rows.append(
                {
                    "model": self.name,
                    "first": first,
                    "last": last,
                    "predicted_bytes": predicted,
                    "held_bytes": held,
                    "relative_error": _relative(predicted, held),
                }
            )
        return rows

    def peaks(
        self,
        schedules: Iterable[tuple[TrainingSchedule, int, int]],
        recompute: Literal["never", "always"] = "never",
    ) -> list[dict[str, Any]]:
        """Peaks of every stage of some plans, predicted and measured."""
        rows = []
        for schedule, num_stages, microbatches in schedules:
            balance = self._balance(num_stages)
            options = PlanOptions(
                schedule=schedule,
                num_microbatches=microbatches,
                optimizer="adam",
                recompute=recompute,
            )
            plan = plan_from_balance(self.profile, Cluster.uniform(num_stages), options, balance)
            for index, (place, stage) in enumerate(zip(places(plan), plan.stages, strict=True)):
                measured = measured_peak(
                    StageRunner(self.run, place, contextlib.nullcontext), self.device
                )
                predicted = stage.memory.total_bytes
                rows.append(
                    {
                        "model": self.name,
                        "schedule": schedule,
                        "stages": num_stages,
                        "stage": index,
                        "in_flight": stage.in_flight,
                        "recompute": recompute,
                        "predicted_bytes": predicted,
                        "measured_bytes": measured,
                        "relative_error": _relative(predicted, measured),
                        **self.edges(place),
                        "parts": stage.memory.model_dump(),
                    }
                )
        return rows

    def edges(self, place: Place) -> dict[str, int]:
        """Return what the plan's total counts twice at a stage's front, and leaves out at its end.

        Both for all micro-batches in flight. The last stage's outputs are part of its workspace.
        """
        first, last = place.first, place.last
        made = self.held_bytes(first, last, received=False)
        handed_out = self.held_bytes(first, last, received=False, sent=True) - made
        return {
            "counted_twice_bytes": place.in_flight * (self.held_bytes(first, last) - made),
            "left_out_bytes": place.in_flight * handed_out if last < self.run.num_layers else 0,
        }

    def _balance(self, num_stages: int) -> list[int]:
        """About equal numbers of layers, cut where that is legal."""
        count = self.run.num_layers
        edges = [0]
        for stage in range(1, num_stages):
            wanted = round(stage * count / num_stages)
            after = [cut for cut in self.run.cuts if edges[-1] < cut < count]
            edges.append(min(after, key=lambda cut: abs(cut - wanted)))
        return [b - a for a, b in zip(edges, [*edges[1:], count], strict=True)]


def measured_peak(stage: StageRunner, device: torch.device, *, optimizer: bool = True) -> int:
    """Most a stage's rank holds in a step, gradients and Adam's state in place.

    The optimizer's update, which comes after, is not counted.
    """
    learned = [p for p in stage.module.parameters() if p.requires_grad]
    for parameter in learned:
        parameter.grad = None
    with Allocations(device) as before:
        for parameter in learned:
            parameter.grad = torch.zeros_like(parameter)
        adam = torch.optim.Adam(learned) if learned and optimizer else None
        if adam is not None:
            adam.step()
    with Allocations(device) as during:
        stage.step()
    del adam
    return stage.weights_bytes + before.kept_bytes + during.peak_bytes


def measure(names: list[str], count: int, device: str) -> dict[str, Any]:
    """All comparisons; ``count`` intervals over all models."""
    intervals: list[dict[str, Any]] = []
    peaks: list[dict[str, Any]] = []
    recomputed: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        share = count // len(names) + (index < count % len(names))
        study = Study(name, device)
        sys.stderr.write(f"{name}: {study.run.num_layers} layers, {share} intervals\n")
        intervals += study.intervals(share)
        peaks += study.peaks(SCHEDULES)
        recomputed += study.peaks(RECOMPUTED, "always")
    wholes = [row for row in intervals if row["first"] == 0 and _is_whole(row, intervals)]
    runs = [row for row in intervals if row not in wholes]
    return {
        "device": device,
        "torch": torch.__version__,
        "limits": LIMITS,
        "worst_interval": max(abs(row["relative_error"]) for row in runs),
        "worst_whole": max(abs(row["relative_error"]) for row in wholes),
        "median_peak": statistics.median(abs(row["relative_error"]) for row in peaks),
        "worst_peak": max((row["relative_error"] for row in peaks), key=abs),
        "wholes": wholes,
        "intervals": runs,
        "peaks": peaks,
        "recomputed_peaks": recomputed,
    }


def _is_whole(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    last = max(other["last"] for other in rows if other["model"] == row["model"])
    return bool(row["last"] == last)


def _moved(subject: Subject, device: torch.device) -> Subject:
    sample = subject.sample
    if isinstance(sample, dict):
        sample = {name: value.to(device) for name, value in sample.items()}
    else:
        sample = sample.to(device)
    return Subject(subject.model.to(device), sample, subject.target.to(device), subject.loss_fn)


def _relative(predicted: int, measured: int) -> float:
    if predicted == measured:
        return 0.0
    return (predicted - measured) / measured if measured else float("inf")


def failures(result: dict[str, Any]) -> list[str]:
    """Return the limits that were missed."""
    found = {
        "interval": result["worst_interval"],
        "whole": result["worst_whole"],
        "median_peak": result["median_peak"],
    }
    return [
        f"{name}: {value:.2%} is above {LIMITS[name]:.0%}"
        for name, value in found.items()
        if value > LIMITS[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--intervals", type=int, default=200, help="over all models")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--write", type=Path, help="a Markdown file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(given.models.split(","), given.intervals, given.device)
    if given.write:
        from benchmarks.activation_memory_page import page

        given.write.write_text(page(result), encoding="utf-8")
    if given.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write(summary(result) + "\n")
    missed = failures(result)
    sys.stderr.write("".join(f"{line}\n" for line in missed))
    return 1 if missed else 0


def summary(result: dict[str, Any]) -> str:
    """Return a line for each claim."""
    return (
        f"{len(result['intervals'])} intervals: worst error {result['worst_interval']:.3%}\n"
        f"{len(result['wholes'])} whole models: worst error {result['worst_whole']:.3%}\n"
        f"{len(result['peaks'])} stage peaks: median error {result['median_peak']:.2%}, "
        f"worst {result['worst_peak']:+.2%}"
    )


if __name__ == "__main__":
    sys.exit(main())
