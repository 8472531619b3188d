"""The GPU check's results as Markdown, and whether they are good enough."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

MODEL_NAMES = ("gpt2-medium", "resnet50", "llama-1b", "vit-large")
"""What the check is about; less than all of them does not pass it."""

LIMIT = 0.05
"""Largest median error of stage times, and of stage peaks."""


def medians(models: list[dict[str, Any]]) -> dict[str, float | None]:
    """Median absolute errors over all stages of all models; `None` where nothing was measured."""
    return {
        "stage_time": _median([abs(row["time"]["relative_error"]) for row in stages(models)]),
        "stage_memory": _median([abs(row["memory"]["relative_error"]) for row in stages(models)]),
        "whole_time": _median(
            [abs(found["whole"]["relative_error"]) for found in models if "whole" in found]
        ),
    }


def stages(models: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every stage of every model that was measured."""
    for found in models:
        yield from found.get("stages", ())


def faults(report: dict[str, Any]) -> list[str]:
    """Return what keeps the check from passing.

    On the CPU the errors themselves are none: tiny models on a shared machine say nothing of them.
    """
    found = [
        f"{model['model']}: {model['error']}" for model in report["models"] if "error" in model
    ]
    tests = report["tests"]
    if tests is not None and tests["failed"]:
        found.append(f"{tests['failed']} gpu tests failed")
    if report["device"] == "cpu":
        return found
    if tests is not None and not tests["passed"]:
        found.append("no gpu test ran")
    for name in ("stage_time", "stage_memory"):
        error = report["median_errors"][name]
        if error is not None and error > LIMIT:
            found.append(f"median error of {name} is {error:.1%}, above {LIMIT:.0%}")
    return found


def missing(report: dict[str, Any]) -> list[str]:
    """Models of the check that were not measured, in this run or in one before it."""
    measured = {model["model"] for model in report["models"] if "error" not in model}
    return [name for name in MODEL_NAMES if name not in measured]


def verdict(report: dict[str, Any]) -> str:
    """One sentence; that it passed is said of the whole check alone."""
    problems = faults(report)
    if problems:
        return "Not passed: " + "; ".join(problems) + "."
    lacking = missing(report)
    if lacking:
        return (
            f"Incomplete: {len(MODEL_NAMES) - len(lacking)} of {len(MODEL_NAMES)} models measured, "
            f"nothing wrong with these; not measured: {', '.join(lacking)}."
        )
    if report["tests"] is None:
        return "Incomplete: nothing wrong with the models; the tests marked `gpu` were left out."
    if report["small"]:
        return "Passed with tiny configurations, which say nothing of the models themselves."
    if report["device"] == "cpu":
        return "Ran to its end on the CPU, where errors are shown and not judged."
    return "Passed."


def page(report: dict[str, Any]) -> str:
    """Return a document a person reads."""
    lines = [
        "# GPU check",
        "",
        f"Written by `scripts/gpu_check` on {report['device_name']} with torch {report['torch']}"
        + (", tiny configurations" if report["small"] else "")
        + ". Every stage ran alone on the values it really receives, in bf16; memory is the peak "
        "of a step by 1F1B, without optimizer state.",
        "",
        _tests(report["tests"]),
        "",
        "| | median error |",
        "|---|---|",
    ]
    names = {
        "whole_time": "step time of whole models",
        "stage_time": "stage times",
        "stage_memory": "stage peaks",
    }
    for key, words in names.items():
        lines.append(f"| {words} | {_percent(report['median_errors'][key])} |")
    for found in report["models"]:
        lines += ["", *_model(found)]
    lines += ["", verdict(report)]
    return "\n".join(lines) + "\n"


def _model(found: dict[str, Any]) -> Iterator[str]:
    if "error" in found:
        yield f"## {found['model']}"
        yield ""
        yield f"Not measured: {found['error']}"
        return
    whole = found["whole"]
    yield f"## {found['model']}: {found['parameters'] / 1e6:,.0f} million parameters"
    yield ""
    yield (
        f"Whole step predicted {_ms(whole['predicted'])}, measured {_ms(whole['measured'])} "
        f"({whole['relative_error']:+.1%})."
    )
    yield ""
    yield (
        "| stage | layers | in flight | predicted | measured | error "
        "| predicted peak | measured peak | error |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in found["stages"]:
        time, memory = row["time"], row["memory"]
        yield (
            f"| {row['stage'] + 1} of {row['stages']} | {row['layers']} | {row['in_flight']} "
            f"| {_ms(time['predicted'])} | {_ms(time['measured'])} | {time['relative_error']:+.1%} "
            f"| {_mib(memory['predicted'])} | {_mib(memory['measured'])} "
            f"| {memory['relative_error']:+.1%} |"
        )


def _tests(tests: dict[str, int] | None) -> str:
    if tests is None:
        return "The tests marked `gpu` were left out."
    return (
        f"Tests marked `gpu`: {tests['passed']} passed, {tests['failed']} failed, "
        f"{tests['skipped']} skipped."
    )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.2f} ms"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
