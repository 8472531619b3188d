"""The GPU check's results as Markdown, and whether they are good enough."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.gpu_check.order import MODEL, MODEL_NAMES, STAGES
from benchmarks.gpu_check.records import Record, Setting

STAGE_NAMES = tuple(stage.name for stage in STAGES)

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


def make_report(setting: Setting, records: dict[str, Record]) -> dict[str, Any]:
    """Put together what the stages found."""
    models = [
        records[name].result if records[name].settles else {"model": model, "error": record.error}
        for model in MODEL_NAMES
        if (record := records.get(name := MODEL + model)) is not None
    ]
    tests = records.get("marked-tests")
    return {
        **asdict(setting),
        "stages": [
            {"stage": name, "status": record.status, "s": record.elapsed_s, "error": record.error}
            for name, record in records.items()
        ],
        "results": {
            name: record.result for name, record in records.items() if not name.startswith(MODEL)
        },
        "tests": tests.result if tests and "passed" in tests.result else None,
        "models": models,
        "median_errors": medians(models),
    }


def faults(report: dict[str, Any]) -> list[str]:
    """Return what keeps the check from passing.

    On the CPU the errors themselves are none: tiny models on a shared machine say nothing of them.
    """
    found = [
        f"{stage['stage']}: {stage['error']}"
        for stage in report["stages"]
        if stage["status"] in ("failed", "over its limit")
    ]
    if report["device"] == "cpu":
        return found
    for name in ("stage_time", "stage_memory"):
        error = report["median_errors"][name]
        if error is not None and error > LIMIT:
            found.append(f"median error of {name} is {error:.1%}, above {LIMIT:.0%}")
    return found


def missing(report: dict[str, Any]) -> list[str]:
    """Return the stages that neither this run nor one before it came to the end of."""
    ended = {stage["stage"] for stage in report["stages"] if stage["status"] != "cut off"}
    return [name for name in STAGE_NAMES if name not in ended]


def verdict(report: dict[str, Any]) -> str:
    """Return one sentence; that it passed is said of the whole check alone."""
    problems = faults(report)
    if problems:
        return "Not passed: " + "; ".join(problems) + "."
    lacking = [
        f"{stage['stage']} ({stage['error']})"
        for stage in report["stages"]
        if stage["status"] == "lacking"
    ]
    left = [*missing(report), *lacking]
    if left:
        passed = len(STAGE_NAMES) - len(left)
        return (
            f"Incomplete: {passed} of {len(STAGE_NAMES)} stages passed, nothing wrong with these; "
            f"not run: {', '.join(left)}."
        )
    if report["small"]:
        return "Passed with tiny models, which say nothing of the real ones."
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
        "| stage | | s | what it found |",
        "|---|---|---|---|",
        *(
            f"| {stage['stage']} | {stage['status']} | {stage['s']:.0f} "
            f"| {stage['error'] or _words(report['results'].get(stage['stage'], {}))} |"
            for stage in report["stages"]
        ),
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


def _words(result: dict[str, Any]) -> str:
    """Return what a stage that is no model's found, in a few words."""
    found = [str(result["words"])] if "words" in result else []
    if "throughput_ratio" in result:
        found.append(f"{result['throughput_ratio']:.2f} times the throughput of torch's 1F1B")
    if "ended_s" in result:
        found.append(f"the others ended {result['ended_s']:.1f} s after the kill")
    if "recorded_s" in result:
        found.append(f"step {_ms(result['wall_s'])}, recorded {_ms(result['recorded_s'])}")
    if "passed" in result:
        counts = (result[key] for key in ("passed", "failed", "skipped"))
        found.append("{} passed, {} failed, {} skipped".format(*counts))
    if "rows" in result:
        found.append(f"{len(result['rows'])} operations timed")
    return "; ".join(found)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.2f} ms"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
