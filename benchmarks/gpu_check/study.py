"""One model of the GPU check: what its profile predicts, and what the device then does.

Predicted and measured are compared for the whole model's step, and for every stage of a plan of
two and of four stages: time of one micro-batch forwards and backwards, and the most memory the
stage's rank holds in a step of eight micro-batches by 1F1B. Each stage runs alone, on the values
it really receives. `scripts/gpu_check` starts this in a process of its own for each model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.activation_memory import measured_peak  # noqa: E402
from benchmarks.gpu_check.models.registry import MODELS, Studied  # noqa: E402
from benchmarks.gpu_check.rehearsal import rehearsed_on_card  # noqa: E402
from benchmarks.stage_runs import ModelRun, Place, StageRunner, places  # noqa: E402
from stagewright.core.cluster.cluster import Cluster  # noqa: E402
from stagewright.core.plan.plan import Plan, PlanOptions  # noqa: E402
from stagewright.core.profile.profile import Profile, Timing  # noqa: E402
from stagewright.core.requests.requests import ProfilingOptions  # noqa: E402
from stagewright.planner.plan import plan as make_plan  # noqa: E402
from stagewright.profiler.machine.clock import Clock  # noqa: E402
from stagewright.profiler.machine.memory import keep_freed_memory  # noqa: E402
from stagewright.profiler.measure.profile import profile as make_profile  # noqa: E402

STAGES = (2, 4)
MICROBATCHES = 8
WARM_UP_RUNS, RUNS, SMALL_RUNS = 3, 15, 3
REHEARSED_S = 0.1
"""Of repeats, where only the calls count."""

DTYPE = torch.bfloat16
"""Of weights and activations; gradients as well."""


def study(name: str, device: torch.device, budget_s: float, *, small: bool) -> dict[str, Any]:
    """Everything there is to say of one model; its profile under ``profile``."""
    torch.manual_seed(0)
    studied = _on_device(MODELS[name](small), device)
    found = make_profile(
        studied.model,
        studied.sample,
        options=ProfilingOptions(budget_s=budget_s, device=device.type),
        loss_fn=studied.loss_fn,
        target=studied.target,
    )
    run = ModelRun.of(found, studied.model, studied.sample, studied.target, studied.loss_fn)
    for parameter in studied.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    repeats = SMALL_RUNS if small else RUNS
    stages: list[dict[str, Any]] = []
    for count in STAGES:
        stages += compare_stages(run, found, count, device, repeats)
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in studied.model.parameters()),
        "dtype": str(DTYPE).removeprefix("torch."),
        "sample": {key: list(value.shape) for key, value in studied.sample.items()},
        "layers": len(found.layers),
        "whole": whole_step(studied, found, device, repeats),
        "stages": stages,
        "profile": json.loads(found.to_json()),
    }


def whole_step(
    studied: Studied, found: Profile, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Compare the model as it was written, loss included, with the sum of the layers."""

    def forward() -> tuple[Tensor, ...]:
        return (studied.loss_fn(studied.model(**studied.sample), studied.target),)

    measured_s = time_of(forward, torch.autograd.backward, device, repeats)
    return _compared(predicted_s(found, 0, len(found.layers)), measured_s)


def compare_stages(
    run: ModelRun, found: Profile, num_stages: int, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """Every stage of the most even split, alone."""
    rows = []
    plan = split(found, num_stages)
    for index, (place, stage) in enumerate(zip(places(plan), plan.stages, strict=True)):
        alone = StageRunner(run, Place(place.first, place.last, 1, 1), contextlib.nullcontext)
        measured_s = time_of(alone.forward, alone.backward, device, repeats)
        whole = StageRunner(run, place, contextlib.nullcontext)
        peak_bytes = measured_peak(whole, device, optimizer=False)
        rows.append(
            {
                "stages": num_stages,
                "stage": index,
                "layers": stage.num_layers,
                "in_flight": stage.in_flight,
                "time": _compared(predicted_s(found, place.first, place.last), measured_s),
                "memory": _compared(stage.memory.total_bytes, peak_bytes),
                "memory_parts": stage.memory.model_dump(),
            }
        )
    return rows


def split(found: Profile, num_stages: int) -> Plan:
    """Return the most even split by time, without optimizer state, which is not measured."""
    options = PlanOptions(
        objective="balance_time",
        num_stages=num_stages,
        num_microbatches=MICROBATCHES,
        optimizer="none",
    )
    return make_plan(found, Cluster.uniform(num_stages), options)


def predicted_s(found: Profile, first: int, last: int) -> float:
    """Forward and backward of these layers: the device's work, or issuing it if that is longer."""
    layers = found.layers[first:last]
    device_s = sum(entry.forward.median_s + entry.backward.median_s for entry in layers)
    dispatch_s = sum(
        _median_s(entry.dispatch_forward) + _median_s(entry.dispatch_backward) for entry in layers
    )
    if found.loss is not None and last == len(found.layers):
        device_s += found.loss.forward.median_s + found.loss.backward.median_s
    return max(device_s, dispatch_s)


def _median_s(timing: Timing | None) -> float:
    return timing.median_s if timing is not None else 0.0


def time_of(
    forward: Callable[[], tuple[Tensor, ...]],
    backward: Callable[[tuple[Tensor, ...]], None],
    device: torch.device,
    repeats: int,
) -> float:
    """Median of one forward and backward; on CUDA one runs behind the other without a pause."""
    clock = Clock(device)
    marks = []
    for turn in range(WARM_UP_RUNS + repeats):
        if turn == WARM_UP_RUNS:
            clock.settle()
        start = clock.mark()
        roots = forward()
        backward(roots)
        del roots
        marks.append((start, clock.mark()))
    return statistics.median(clock.seconds(*pair) for pair in marks[WARM_UP_RUNS:])


def _compared(predicted: float, measured: float) -> dict[str, float]:
    return {
        "predicted": predicted,
        "measured": measured,
        "relative_error": (predicted - measured) / measured,
    }


def _on_device(studied: Studied, device: torch.device) -> Studied:
    sample = {
        name: value.to(device, DTYPE if value.is_floating_point() else value.dtype)
        for name, value in studied.sample.items()
    }
    model = studied.model.to(device, DTYPE)
    return Studied(model, sample, studied.target.to(device), studied.loss_fn)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="the same shape, every size shrunk")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of repeats")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--profiles", type=Path, required=True, help="folder for the profile")
    given, _ = parser.parse_known_args()
    if given.device == "cpu":
        keep_freed_memory()
        torch.set_num_threads(1)
        if given.small:
            with rehearsed_on_card():
                study(given.model, torch.device("cpu"), REHEARSED_S, small=True)
    found = study(given.model, torch.device(given.device), given.budget, small=given.small)
    size = "-small" if given.small else ""
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    file = given.profiles / f"{given.model}{size}-{_plain(name)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found.pop("profile"), separators=(",", ":")), encoding="utf-8")
    given.output.write_text(json.dumps(found), encoding="utf-8")
    return 0


def _plain(name: str) -> str:
    """Return a device's name as part of a file's."""
    words = "".join(letter if letter.isalnum() else " " for letter in name.lower()).split()
    return "-".join(word for word in words if word != "nvidia")


if __name__ == "__main__":
    sys.exit(main())
