"""``stagewright demo``: measure, plan, serve and train two real models on two processes."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..support.output import JsonFlag, check_folder, emit, say, say_next, write_file
from ..support.progress import working

if TYPE_CHECKING:
    from ...core.cluster.cluster import Cluster
    from ...core.plan.plan import Plan
    from ..support.local_service import LocalService
    from ..support.run_report import RunReport

ANSWER_TIMEOUT_S = 300.0
"""Longest wait for a plan: the service measures the model first, which takes some minutes."""


def command(
    models: Annotated[
        str, Option(help="Models to run: gpt2, resnet50, or both, separated by commas.")
    ] = "gpt2,resnet50",
    steps: Annotated[int, Option(min=1, help="Training steps per model.")] = 3,
    output: Annotated[Path, Option("--output", "-o", help="Folder for plans and drawings.")] = Path(
        "demo-output"
    ),
    as_json: JsonFlag = False,
) -> None:
    """Measure, plan, serve and train GPT-2 small and ResNet-50 on two processes.

    Starts the service, submits each model as data, prints its plan, trains it on two processes
    and once unsplit, and compares step times and losses.
    """
    from ...core.errors import InvalidInput
    from ...core.text_table import format_table
    from ...profiler.links.launch_local import measure_local_links
    from ..support.local_service import running_service
    from ..support.run_report import HEADINGS

    chosen = [name.strip() for name in models.split(",")]
    if unknown := [name for name in chosen if name not in MODELS]:
        raise InvalidInput(f"unknown demo model {unknown[0]!r}; choose from {', '.join(MODELS)}")
    check_folder(output)
    started = time.monotonic()
    say(f"measuring the link between {RANKS} processes on this machine", quiet=as_json)
    with nullcontext() if as_json else working("measuring the link"):
        cluster = measure_local_links(RANKS)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(Path(folder) / "demo.db") as service,
    ):
        say(f"the service is listening on {service.url}", quiet=as_json)
        plans = [_plan(name, service, cluster, output, quiet=as_json) for name in chosen]
    # After the service has stopped, which would take a core from the ranks.
    reports = [_train(plan, steps, quiet=as_json) for plan in plans]
    if as_json:
        emit(json.dumps([entry.to_dict() for entry in reports]))
    else:
        emit(format_table([HEADINGS, *(entry.row() for entry in reports)]))
    for entry in reports:
        entry.check()
        for line in entry.remarks():
            say(line, quiet=as_json)
    say(
        f"losses agree to 1e-5; {time.monotonic() - started:.0f} s in total; "
        f"plans and drawings are in {output}/",
        quiet=as_json,
    )
    say_next("stagewright profile --help", quiet=as_json)


def _plan(name: str, service: LocalService, cluster: Cluster, output: Path, *, quiet: bool) -> Plan:
    """Have the service plan one model; print and save the plan and its drawing."""
    from ...client.client import Client
    from ...formats.svg import timeline_svg
    from ...planner.simulator.plan_timeline import plan_timeline

    say(f"\n{name}: submitting model and sample; the service measures and plans", quiet=quiet)
    is_drawn = sys.stderr.isatty()  # by the client, in a terminal
    with (
        nullcontext() if quiet or is_drawn else working(f"{name}: measuring"),
        Client(service.url, service.token, timeout_s=ANSWER_TIMEOUT_S) as client,
    ):
        answer = client.plan(
            MODELS[name]["model"],
            MODELS[name]["sample"],
            cluster=cluster,
            profiling=PROFILING,
            options=OPTIONS,
            progress=not quiet,
        )
    plan = answer.require()
    say(str(plan), quiet=quiet)
    write_file(output / f"{name}.plan.json", plan.to_json(indent=2) + "\n")
    write_file(output / f"{name}.svg", timeline_svg(plan, plan_timeline(plan)))
    return plan


def _train(plan: Plan, steps: int, *, quiet: bool) -> RunReport:
    from ...core.units import count
    from ..support.launch_ranks import train
    from ..support.run_report import RunReport

    say(f"{plan.model}: {count(steps, 'step')} on {count(plan.num_stages, 'process')}", quiet=quiet)
    with nullcontext() if quiet else working("training"):
        split = train(plan, steps=steps)
    say(f"{plan.model}: {count(steps, 'step')} unsplit, for comparison", quiet=quiet)
    with nullcontext() if quiet else working("training"):
        whole = train(plan, steps=steps, whole=True)
    return RunReport.of(plan, split, whole)


NUM_MICROBATCHES = 4
RANKS = 2

PROFILING = {"num_threads": 1, "busy_neighbours": RANKS - 1, "budget_s": 15.0}
"""One thread, as each rank has, next to a neighbour as busy as the other rank will be."""

GPT2_SMALL: dict[str, Any] = {
    "model": {"family": "gpt2", "config": {"dropout": 0.0}},
    "sample": {
        "inputs": {
            "input_ids": {"shape": [1, 128], "dtype": "int64", "fill": "randint", "high": 50257}
        },
        "target": {"shape": [1, 128], "dtype": "int64", "fill": "randint", "high": 50257},
    },
}
"""GPT-2 small (124 million parameters), without dropout so that losses can be compared."""

RESNET50: dict[str, Any] = {
    "model": {"family": "resnet", "config": {"depth": 50}},
    "sample": {
        "inputs": {"x": {"shape": [2, 3, 224, 224]}},
        "target": {"shape": [2], "dtype": "int64", "fill": "randint", "high": 1000},
    },
}
"""ResNet-50 (25.6 million parameters) on ImageNet-sized images."""

MODELS: dict[str, dict[str, Any]] = {"gpt2": GPT2_SMALL, "resnet50": RESNET50}


OPTIONS: dict[str, Any] = {
    "num_microbatches": NUM_MICROBATCHES,
    "num_stages": RANKS,
    "optimizer": "sgd",
}
