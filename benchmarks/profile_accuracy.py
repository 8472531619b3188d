"""Measure the accuracy of profiles: their error, the balances made of them, and deduplication.

Profiles GPT-2 small and ResNet-50 several times on the CPU. Exits 1 when the sum of the layers is
more than 5 % off the whole model (median over profiles), a balance is more than 3 % worse than the
best on the medians of all profiles, or measuring equal layers once is less than 10 times faster
than measuring all 48 blocks of a GPT-2, or more than 5 % off in total. torchgpipe's
balance_by_time is measured beside it, where it is installed. Needs a quiet machine: whatever else
runs is measured too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tables import markdown_table, write_between_marks
from torch import Tensor, nn

from stagewright.balance import balance_profile
from stagewright.capture.capture import trace
from stagewright.core.models.families import (
    GPT2Config,
    GPT2Spec,
    ModelSpec,
    ResNetConfig,
    ResNetSpec,
)
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.core.units import format_time
from stagewright.planner.heuristics.chain_partition import balance
from stagewright.profiler.layers.layer_run import layer_runs
from stagewright.profiler.machine.memory import keep_freed_memory
from stagewright.profiler.measure.profile import measure_profile
from stagewright.profiler.models.families import build_loss, build_model

ERROR_LIMIT = 0.05
BALANCE_LIMIT = 0.03
SPEEDUP_LIMIT = 10.0
TOTAL_LIMIT = 0.05

STAGES = (2, 3, 4)
DEDUPLICATED_PAIRS = 3

DEEP = GPT2Config(n_layer=48, n_embd=256, n_head=4, vocab_size=4096, n_positions=256, dropout=0.0)
"""48 blocks and a head that does not outweigh them: it is measured however the blocks are."""


class TimedProfile(NamedTuple):
    """A profile, and how long the passes over layers took that it is made of."""

    profile: Profile
    layers_s: float


@dataclass(frozen=True)
class Subject:
    """A model with one micro-batch and a target."""

    name: str
    spec: ModelSpec
    sample: dict[str, Tensor]
    target: Tensor

    @classmethod
    def gpt2(cls) -> Subject:
        """GPT-2 small, 1 x 128 tokens."""
        tokens = torch.randint(0, 50257, (1, 128))
        spec = GPT2Spec(family="gpt2", config=GPT2Config())
        return cls("GPT-2 small, 1 x 128 tokens", spec, {"input_ids": tokens}, tokens)

    @classmethod
    def resnet50(cls) -> Subject:
        """ResNet-50, 4 images of 112 x 112."""
        spec = ResNetSpec(family="resnet", config=ResNetConfig())
        images, labels = torch.randn(4, 3, 112, 112), torch.randint(0, 1000, (4,))
        return cls("ResNet-50, 4 x 112 x 112", spec, {"x": images}, labels)

    @classmethod
    def deep(cls) -> Subject:
        """Return a GPT-2 of 48 blocks, 2 x 128 tokens."""
        tokens = torch.randint(0, DEEP.vocab_size, (2, 128))
        name = f"GPT-2 of 48 blocks {DEEP.n_embd} wide"
        return cls(name, GPT2Spec(family="gpt2", config=DEEP), {"input_ids": tokens}, tokens)

    def profile(self, model: nn.Module, options: ProfilingOptions) -> TimedProfile:
        loss_fn = build_loss(self.spec)
        return TimedProfile(*measure_profile(model, self.sample, options, loss_fn, self.target))


SUBJECTS: dict[str, Callable[[], Subject]] = {"gpt2": Subject.gpt2, "resnet50": Subject.resnet50}


@dataclass(frozen=True)
class Balances:
    """Results of several tries at balancing for one number of stages.

    Attributes:
        worst: Largest excess over the best balance, judged by the pooled medians.
        different: Number of different answers.
    """

    stages: int
    worst: float
    different: int


@dataclass(frozen=True)
class Accuracy:
    """Of one model.

    Attributes:
        errors: (sum of layers - whole) / whole, a number a profile.
        median_error: Median size of the first of them, as many as were asked for.
        repeats: Least and most repeats of a layer.
        ours: Balances made of the profiles.
        torchgpipe: Of its balance_by_time as often; empty where it is not installed.
    """

    model: str
    whole_s: float
    errors: list[float]
    median_error: float
    repeats: tuple[int, int]
    ours: list[Balances]
    torchgpipe: list[Balances]

    @property
    def within(self) -> bool:
        return self.median_error <= ERROR_LIMIT and all(
            found.worst <= BALANCE_LIMIT for found in self.ours
        )


@dataclass(frozen=True)
class Deduplication:
    """Measuring equal layers once against measuring each.

    Attributes:
        speedup: Of the passes over layers.
        total_difference: Of the sum over all layers, relative.
    """

    model: str
    classes: int
    layers: int
    every_s: float
    once_s: float
    speedup: float
    total_difference: float

    @property
    def within(self) -> bool:
        return self.speedup >= SPEEDUP_LIMIT and abs(self.total_difference) <= TOTAL_LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(SUBJECTS), help="of " + ", ".join(SUBJECTS))
    parser.add_argument("--runs", type=int, default=5, help="profiles the error is judged by")
    parser.add_argument("--profiles", type=int, default=8, help="profiles balances are made of")
    parser.add_argument("--dedup", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=1, help="as a stage on one core has")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of repeats a profile")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="put the tables between the marks of this file")
    given = parser.parse_args()
    names = [name for name in given.models.split(",") if name]
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    if min(given.runs, given.profiles) < 1:
        parser.error("--runs and --profiles must be at least 1")
    keep_freed_memory()
    options = ProfilingOptions(num_threads=given.threads, budget_s=given.budget)
    accuracies = [accuracy(SUBJECTS[name](), options, given.runs, given.profiles) for name in names]
    deduplication = deduplicated(options) if given.dedup else None
    text = tables(accuracies, deduplication, given.threads)
    if given.write:
        write_between_marks(given.write, "profile_accuracy.py", text)
    print(as_json(accuracies, deduplication) if given.json else text)
    parts = [*accuracies, *([deduplication] if deduplication else [])]
    return int(not all(part.within for part in parts))


def accuracy(subject: Subject, options: ProfilingOptions, runs: int, profiles: int) -> Accuracy:
    """Profile a model again and again, and balance it as often."""
    torch.manual_seed(0)
    model = build_model(subject.spec)
    found = []
    for number in range(max(runs, profiles)):
        found.append(subject.profile(model, options).profile)
        say(f"{subject.name}: profile {number + 1}, error {error_of(found[-1]):+.1%}")
    errors = [error_of(profile) for profile in found]
    repeats = [layer.forward.repeats for profile in found for layer in profile.layers]
    pooled = pooled_costs(found)
    return Accuracy(
        model=subject.name,
        whole_s=statistics.median(whole_of(profile) for profile in found),
        errors=errors,
        median_error=statistics.median(abs(error) for error in errors[:runs]),
        repeats=(min(repeats), max(repeats)),
        ours=[
            judged(stages, pooled, [balance_profile(profile, stages) for profile in found])
            for stages in STAGES
        ],
        torchgpipe=torchgpipe_balances(subject, model, options, pooled, len(found)),
    )


def error_of(profile: Profile) -> float:
    assert profile.reconciliation is not None
    return profile.reconciliation.relative_error


def whole_of(profile: Profile) -> float:
    assert profile.reconciliation is not None
    whole = profile.reconciliation
    return whole.whole_forward.median_s + whole.whole_backward.median_s


def pooled_costs(profiles: Sequence[Profile]) -> list[float]:
    """Median over all profiles of each layer's forward and backward."""
    by_profile = [
        [layer.forward.median_s + layer.backward.median_s for layer in profile.layers]
        for profile in profiles
    ]
    return [statistics.median(costs) for costs in zip(*by_profile, strict=True)]


def judged(stages: int, pooled: Sequence[float], answers: Sequence[list[int]]) -> Balances:
    """Each answer's slowest stage against the least there is, by the pooled costs."""
    least = slowest(pooled, balance(pooled, stages))
    return Balances(
        stages=stages,
        worst=max(slowest(pooled, answer) / least - 1 for answer in answers),
        different=len({tuple(answer) for answer in answers}),
    )


def slowest(costs: Sequence[float], counts: Sequence[int]) -> float:
    cuts = [0]
    for count in counts:
        cuts.append(cuts[-1] + count)
    return max(sum(costs[first:last]) for first, last in pairwise(cuts))


def torchgpipe_balances(
    subject: Subject,
    model: nn.Module,
    options: ProfilingOptions,
    pooled: Sequence[float],
    tries: int,
) -> list[Balances]:
    """Its balance_by_time with its own defaults, given our layers as its modules."""
    try:
        from torchgpipe.balance import balance_cost
        from torchgpipe.balance.profile import profile_times
    except ImportError:
        return []
    captured = trace(model, subject.sample)
    changed = [any(run.changed) for run in layer_runs(captured)]
    layers = nn.Sequential(
        *(Piece(captured.segment(i, i + 1), copies) for i, copies in enumerate(changed))
    )
    sample = next(iter(subject.sample.values()))
    threads = torch.get_num_threads()
    torch.set_num_threads(options.num_threads or threads)
    try:
        costs = [profile_times(layers, sample, 1.0, torch.device("cpu")) for _ in range(tries)]
    finally:
        torch.set_num_threads(threads)
    return [
        judged(stages, pooled, [balance_cost(cost, stages) for cost in costs]) for stages in STAGES
    ]


class Piece(nn.Module):
    """A layer as torchgpipe calls it: a tensor or a tuple in, a tensor or a tuple out.

    torchgpipe fails on a layer that changes its input in place; that one gets a copy.
    """

    def __init__(self, segment: nn.Module, copies: bool) -> None:
        super().__init__()
        self.segment, self.copies = segment, copies

    def forward(self, given: Any) -> Any:
        tensors = given if isinstance(given, tuple) else (given,)
        made = self.segment(*(t.clone() if self.copies else t for t in tensors))
        return made[0] if len(made) == 1 else made


def deduplicated(options: ProfilingOptions) -> Deduplication:
    """Return a deep model with and without measuring equal layers once, in turns; medians."""
    torch.manual_seed(0)
    subject = Subject.deep()
    model = build_model(subject.spec)
    once, every = [], []
    for number in range(DEDUPLICATED_PAIRS):
        once.append(subject.profile(model, options))
        every.append(subject.profile(model, options.model_copy(update={"deduplicate": False})))
        say(
            f"{subject.name}: pair {number + 1}, one of each class {once[-1].layers_s:.2f} s, "
            f"every layer {every[-1].layers_s:.2f} s"
        )
    once_s = statistics.median(found.layers_s for found in once)
    every_s = statistics.median(found.layers_s for found in every)
    totals_s = [
        statistics.median(sum(pooled_costs([found.profile])) for found in way)
        for way in (once, every)
    ]
    layers = [entry.layer for entry in once[0].profile.layers]
    return Deduplication(
        model=subject.name,
        classes=len({layer.cost_class for layer in layers}),
        layers=len(layers),
        every_s=every_s,
        once_s=once_s,
        speedup=every_s / once_s,
        total_difference=totals_s[0] / totals_s[1] - 1,
    )


def tables(
    accuracies: Sequence[Accuracy], deduplication: Deduplication | None, threads: int
) -> str:
    """Markdown."""
    parts = [
        f"CPU, {threads} thread{'s' * (threads > 1)}; torch {torch.__version__.partition('+')[0]}."
    ]
    if accuracies:
        parts += [
            markdown_table(ERRORS, map(_error_row, accuracies), left=len(ERRORS)),
            markdown_table(
                BALANCES,
                (row for found in accuracies for row in _balance_rows(found)),
                left=len(BALANCES),
            ),
        ]
    if deduplication:
        row = (
            deduplication.model,
            deduplication.layers,
            deduplication.classes,
            format_time(deduplication.every_s),
            format_time(deduplication.once_s),
            f"{deduplication.speedup:.1f} times",
            f"{deduplication.total_difference:+.1%}",
        )
        parts.append(markdown_table(DEDUPLICATIONS, [row], left=len(DEDUPLICATIONS)))
    return "\n\n".join(parts)


ERRORS = (
    "model", "whole model", "profiles", "error, median", "error, range", "repeats a layer",
)  # fmt: skip
BALANCES = (
    "model", "stages", "ours: worst excess", "different answers", "torchgpipe: worst excess",
    "different answers",
)  # fmt: skip
DEDUPLICATIONS = (
    "model", "layers", "classes", "every layer", "one of each class", "faster", "total",
)  # fmt: skip


def _error_row(found: Accuracy) -> tuple[object, ...]:
    return (
        found.model,
        format_time(found.whole_s),
        len(found.errors),
        f"{found.median_error:.1%}",
        f"{min(found.errors):+.1%} to {max(found.errors):+.1%}",
        f"{found.repeats[0]} to {found.repeats[1]}",
    )


def _balance_rows(found: Accuracy) -> Iterator[tuple[object, ...]]:
    theirs = {entry.stages: entry for entry in found.torchgpipe}
    for ours in found.ours:
        other = theirs.get(ours.stages)
        beside = (f"{other.worst:.1%}", other.different) if other else ("not installed", "")
        yield (found.model, ours.stages, f"{ours.worst:.1%}", ours.different, *beside)


def as_json(accuracies: Sequence[Accuracy], deduplication: Deduplication | None) -> str:
    return json.dumps(
        {
            "models": [{**asdict(found), "within": found.within} for found in accuracies],
            "deduplication": {**asdict(deduplication), "within": deduplication.within}
            if deduplication
            else None,
            "limits": {
                "error": ERROR_LIMIT,
                "balance": BALANCE_LIMIT,
                "speedup": SPEEDUP_LIMIT,
                "total": TOTAL_LIMIT,
            },
        },
        indent=2,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
