"""Measure the error of estimates, on this CPU and on the GPU of PipeDream's published profiles.

Every model is estimated without its own profile: uncalibrated, and calibrated by the profiles of
all the others. ``--measure`` profiles the models here first (minutes); ``--pipedream FOLDER`` adds
the GPU; ``--write`` writes `docs/evidence/estimates.md` and the figures in
`profiler/estimates/error_band.py`; ``--large`` plans Llama 70B on 64 devices and says what that
took.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
from estimate_pipedream import pipedream_cases
from estimate_report import report

from stagewright.core.cluster.accelerators import Precision
from stagewright.core.models.families import (
    GPT2Config,
    GPT2Spec,
    LlamaConfig,
    LlamaSpec,
    MLPConfig,
    MLPSpec,
    ModelSpec,
    ResNetSpec,
    UNetConfig,
    UNetSpec,
    ViTConfig,
    ViTSpec,
)
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.default_samples import default_sample
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.estimates.calibration import (
    CalibrationPoint,
    calibrate,
    make_calibration_point,
)
from stagewright.profiler.estimates.estimate import profile_work, target
from stagewright.profiler.estimates.flops import OPERATION_CLASSES
from stagewright.profiler.estimates.roofline import CostTable, DeviceRates, default_rates

ROOT = Path(__file__).resolve().parent.parent
MOST, COVERED, LEAST_LAYERS = 0.7, 0.9, 5
"""Share of a layer's time that is of its class, share of the time of a class's layers that a band
has to hold, and the fewest layers that say anything."""

LARGE_S, LARGE_BYTES = 60.0, 2 * 2**30
"""What a large model may take, on two cores with nothing else to do."""

PROFILES = ROOT / "benchmarks" / "profiles" / "estimate"
DOCUMENT = ROOT / "docs" / "evidence" / "estimates.md"
ERRORS = ROOT / "profiler" / "estimates" / "error_band.py"

MODELS: dict[str, tuple[ModelSpec, int, int | None]] = {
    "mlp": (
        MLPSpec(
            family="mlp",
            config=MLPConfig(input_size=1024, hidden_size=1024, output_size=100, num_layers=12),
        ),
        128,
        None,
    ),
    "resnet50": (ResNetSpec(family="resnet"), 2, None),
    "unet": (UNetSpec(family="unet", config=UNetConfig(width=8)), 1, None),
    "gpt2": (
        GPT2Spec(
            family="gpt2", config=GPT2Config(vocab_size=8192, n_embd=512, n_layer=6, n_head=8)
        ),
        1,
        256,
    ),
    "llama-like": (
        LlamaSpec(family="llama", config=LlamaConfig(vocab_size=8192, num_hidden_layers=6)),
        1,
        256,
    ),
    "vit-like": (
        ViTSpec(
            family="vit",
            config=ViTConfig(
                hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6
            ),
        ),
        2,
        None,
    ),
}
"""Family, samples in a micro-batch, tokens of a sample."""


@dataclass(frozen=True)
class Case:
    """A model that was measured, and what its parts do."""

    name: str
    observed: CalibrationPoint


@dataclass(frozen=True)
class LayerError:
    """Relative error of a layer, the class that takes most of its time, its share of the step."""

    kind: str
    error: float
    share: float


@dataclass(frozen=True)
class Row:
    """One model, estimated without its own profile.

    Attributes:
        measured_s: Of a step of one micro-batch.
        step_errors: (estimated - measured) / measured, uncalibrated and calibrated.
        share_errors: Mean over layers of the difference between the shares of the step's time,
            each weighted by its share: half the sum of absolute differences, likewise.
        layer_errors: Relative error of each layer that is mostly of one class, uncalibrated and
            calibrated.
    """

    name: str
    measured_s: float
    step_errors: tuple[float, float]
    share_errors: tuple[float, float]
    layer_errors: tuple[tuple[LayerError, ...], tuple[LayerError, ...]]


def main() -> None:
    options = _arguments()
    if options.large:
        found = large(options.model, options.devices)
        print(json.dumps(found, indent=2))
        sys.exit(0 if found["within_limits"] else 1)
    if options.measure:
        measure(options.profiles, options.budget)
    cpu = leave_one_out(cpu_cases(options.profiles), cpu_rates(options.profiles))
    gpu: list[Row] = []
    if options.pipedream:
        cases = [Case(*entry) for entry in pipedream_cases(options.pipedream)]
        gpu = leave_one_out(cases, _rates("V100", "float32"))
    found = {"cpu": [asdict(row) for row in cpu], "gpu": [asdict(row) for row in gpu]}
    if options.write:
        bands = [kernel_bands(cpu, index) for index in (0, 1)]
        text = report(cpu, gpu, _machine(options.profiles), bands)
        DOCUMENT.write_text(text, encoding="utf-8")
        write_errors(cpu, gpu)
    print(json.dumps(found, indent=2) if options.json else _table(cpu, gpu))


def measure(folder: Path, budget_s: float) -> None:
    """Profile every model here, one thread each, by that thread's own clock.

    It stands still while the thread waits for a core, so that other work on the machine does not
    count; what that work does to caches and memory does.
    """
    from stagewright.profiler.machine import clock
    from stagewright.profiler.measure.profile import profile
    from stagewright.profiler.models.families import build_loss, build_model, make_sample

    folder.mkdir(parents=True, exist_ok=True)
    clock.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[assignment]
    for name, (spec, batch, tokens) in MODELS.items():
        inputs, goal = make_sample(default_sample(spec, batch, tokens))
        found = profile(
            build_model(spec),
            inputs,
            options=ProfilingOptions(num_threads=1, budget_s=budget_s),
            loss_fn=build_loss(spec),
            target=goal,
            spec=spec,
        )
        (folder / f"{name}.json").write_text(found.to_json() + "\n", encoding="utf-8")
        print(f"measured {name}", file=sys.stderr)


def cpu_profiles(folder: Path) -> dict[str, Profile]:
    return {name: Profile.read(folder / f"{name}.json") for name in MODELS}


def cpu_cases(folder: Path) -> list[Case]:
    wanted = target("CPU", "float32", 1)
    return [
        Case(name, make_calibration_point(profile_work(profile, wanted), profile))
        for name, profile in cpu_profiles(folder).items()
    ]


def cpu_rates(folder: Path) -> DeviceRates:
    threads = {profile.provenance.num_threads for profile in cpu_profiles(folder).values()}
    assert threads == {1}, "all models are measured with one thread"
    return _rates("CPU", "float32")


def _rates(device: str, precision: Precision) -> DeviceRates:
    wanted = target(device, precision, 1)
    return default_rates(wanted.device, wanted.precision, 1)


def leave_one_out(cases: list[Case], start: DeviceRates) -> list[Row]:
    rows = []
    for left in cases:
        others = [case.observed for case in cases if case is not left]
        fit = calibrate(start, others)
        usual, fitted = (_errors(left.observed, rates) for rates in (start, fit))
        rows.append(
            Row(
                name=left.name,
                measured_s=sum(left.observed.measured_s),
                step_errors=(usual[0], fitted[0]),
                share_errors=(usual[1], fitted[1]),
                layer_errors=(
                    _layer_errors(left.observed, start),
                    _layer_errors(left.observed, fit),
                ),
            )
        )
    return rows


def _errors(observed: CalibrationPoint, rates: DeviceRates) -> tuple[float, float]:
    """Of the step, and of the layers' shares of it (forward and backward of a layer together)."""
    estimated = CostTable(observed.costs).seconds(rates).reshape(-1, 2).sum(axis=1)
    times = observed.measured_s
    measured = [times[i] + times[i + 1] for i in range(0, len(times), 2)]
    total, goal = float(estimated.sum()), sum(measured)
    shares = sum(abs(float(a) / total - b / goal) for a, b in zip(estimated, measured, strict=True))
    return total / goal - 1, shares / 2


def _layer_errors(observed: CalibrationPoint, rates: DeviceRates) -> tuple[LayerError, ...]:
    costs = CostTable(observed.costs)
    estimated = costs.seconds(rates).reshape(-1, 2).sum(axis=1)
    measured = np.array(observed.measured_s).reshape(-1, 2).sum(axis=1)
    by_class = costs.seconds_by_class(rates).reshape(len(estimated), 2, -1).sum(axis=1)
    return tuple(
        LayerError(OPERATION_CLASSES[kinds.argmax()], float(time_s / real_s - 1), float(share))
        for kinds, time_s, real_s, share in zip(
            by_class, estimated, measured, measured / measured.sum(), strict=True
        )
        if real_s and kinds.max() > MOST * time_s
    )


def kernel_bands(rows: list[Row], index: int) -> dict[str, float]:
    """Return each class's band: layers with `COVERED` of its measured time keep to it."""
    found = {}
    for kind in OPERATION_CLASSES:
        errors = [one for row in rows for one in row.layer_errors[index] if one.kind == kind]
        ranked = sorted(errors, key=lambda one: abs(one.error))
        shares = np.cumsum([one.share for one in ranked])
        if len(ranked) >= LEAST_LAYERS:
            place = int(np.searchsorted(shares, COVERED * shares[-1]))
            found[kind] = round(abs(ranked[place].error), 3)
    return found


def write_errors(cpu: list[Row], gpu: list[Row]) -> None:
    """Put the largest errors into the module that estimates read them from."""
    lines = []
    on_cpu = f"{len(cpu)} models on one CPU"
    on_gpu = f"{len(gpu)} convolutional nets in float32 on a V100 (published with PipeDream)"
    for name, rows, index, where in (
        ("CPU_UNCALIBRATED", cpu, 0, on_cpu),
        ("CPU_CALIBRATED", cpu, 1, on_cpu),
        ("GPU_UNCALIBRATED", gpu, 0, on_gpu),
        ("GPU_CALIBRATED", gpu, 1, on_gpu),
    ):
        largest = max(abs(row.step_errors[index]) for row in rows)
        lines.append(f'{name} = MeasuredError(\n    {largest:.3f},\n    "{where}",\n)')
    for index, name in enumerate(("CPU_KERNELS_UNCALIBRATED", "CPU_KERNELS_CALIBRATED")):
        lines.append(f"{name}: Mapping[str, float] = {json.dumps(kernel_bands(cpu, index))}")
    text = ERRORS.read_text(encoding="utf-8")
    begin, end = "# written by benchmarks/estimate.py\n", "# end of what is written"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    text = re.sub(pattern, lambda _: begin + "\n".join(lines) + "\n" + end, text, flags=re.DOTALL)
    ERRORS.write_text(text, encoding="utf-8")


def _machine(folder: Path) -> str:
    return next(iter(cpu_profiles(folder).values())).provenance.device_name


def large(model: str, devices: str) -> dict[str, object]:
    """Plan a large model by name, in a process of its own, and say what that took."""
    command = [sys.executable, "-m", "stagewright.cli", "plan", model, "-d", devices, "--json"]
    load, started = os.getloadavg()[0], time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall_s = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    plan = json.loads(done.stdout)
    memory_bytes = used.ru_maxrss * 1024
    return {
        "within_limits": wall_s <= LARGE_S and memory_bytes <= LARGE_BYTES and plan["estimated"],
        "command": f"stagewright plan {model} -d {devices}",
        "wall_s": round(wall_s, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "load_average_before": round(load, 1),
        "peak_memory_bytes": memory_bytes,
        "stages": len(plan["stages"]),
        "devices": plan["cluster_devices"],
        "step_time_s": plan["step_time_s"],
        "estimated": plan["estimated"],
        "error_band": plan["error_band"],
    }


def _table(cpu: list[Row], gpu: list[Row]) -> str:
    lines = []
    for what, rows in (("CPU", cpu), ("V100", gpu)):
        for row in rows:
            errors = (*row.step_errors, *row.share_errors)
            lines.append(
                f"{what:5}{row.name:16}{row.measured_s * 1e3:10.1f} ms"
                + "".join(f"{error:+9.1%}" for error in errors)
            )
        if rows:
            middle = [median(abs(r.step_errors[i]) for r in rows) for i in (0, 1)]
            lines.append(f"{what:5}{'median':16}{'':13}{middle[0]:9.1%}{middle[1]:9.1%}")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="profile the models here first")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds a model")
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="measured profiles")
    parser.add_argument("--pipedream", type=Path, help="folder with PipeDream's profiles")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/estimates.md")
    parser.add_argument("--large", action="store_true", help="plan a large model by name")
    parser.add_argument("--model", default="llama-70b")
    parser.add_argument("--devices", default="8x8x80GB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.write and not options.pipedream:
        parser.error("--write needs --pipedream FOLDER: the document has both")
    return options


if __name__ == "__main__":
    main()
