"""``stagewright demo``: two real models measured, planned, served and trained in pieces."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ..support.output import JsonFlag, check_folder, emit, say, say_next, write_file

if TYPE_CHECKING:
    from ...core.cluster.cluster import Cluster
    from ...core.plan.plan import Plan
    from ..support.local_service import Service
    from ..support.run_report import Comparison

ANSWER_TIMEOUT_S = 300.0


def command(
    models: Annotated[
        str, Option(help="Which of gpt2 and resnet50, separated by commas.")
    ] = "gpt2,resnet50",
    steps: Annotated[int, Option(min=1, help="Training steps of each model.")] = 3,
    output: Annotated[Path, Option("--output", "-o", help="Folder for plans and pictures.")] = Path(
        "demo-output"
    ),
    as_json: JsonFlag = False,
) -> None:
    """Measure, plan, serve and train GPT-2 small and ResNet-50 on two processes.

    Starts the service, posts each model as data, prints its plan, trains it on two processes
    and once unsplit, and compares step times and losses.
    """
    from ...core.errors import InvalidInput
    from ...core.text_table import text_table
    from ...profiler.links.launch_local import measure_local_links
    from ..support.local_service import running_service
    from ..support.run_report import HEADINGS
    from .demo_requests_tomerge import MODELS, RANKS

    chosen = [name.strip() for name in models.split(",")]
    if unknown := [name for name in chosen if name not in MODELS]:
        raise InvalidInput(f"unknown demo model {unknown[0]!r}; choose from {', '.join(MODELS)}")
    check_folder(output)
    started = time.monotonic()
    say(f"measuring the link between {RANKS} processes of this machine", quiet=as_json)
    cluster = measure_local_links(RANKS)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(Path(folder) / "demo.db") as service,
    ):
        say(f"the service listens on {service.url}", quiet=as_json)
        plans = [_plan(name, service, cluster, output, quiet=as_json) for name in chosen]
    found = [_train(plan, steps, quiet=as_json) for plan in plans]
    if as_json:
        emit(json.dumps([entry.to_dict() for entry in found]))
    else:
        emit(text_table([HEADINGS, *(entry.row() for entry in found)]))
    for entry in found:
        entry.check()
        for line in entry.remarks():
            say(line, quiet=as_json)
    say(
        f"losses agree to 1e-5; {time.monotonic() - started:.0f} s in all; "
        f"plans and pictures are in {output}/",
        quiet=as_json,
    )
    say_next("stagewright profile --help", quiet=as_json)


def _plan(name: str, service: Service, cluster: Cluster, output: Path, *, quiet: bool) -> Plan:
    """Post one model, show its plan, and keep plan and picture."""
    from ...client.sync_client import Client
    from ...formats.svg import timeline_svg
    from ...planner.simulator.plan_timeline import plan_timeline
    from .demo_requests_tomerge import MEASURING, MODELS, OPTIONS

    say(f"\n{name}: posting model and sample; the service measures and plans", quiet=quiet)
    with Client(service.url, service.token, timeout_s=ANSWER_TIMEOUT_S) as client:
        answer = client.plan(
            MODELS[name]["model"],
            MODELS[name]["sample"],
            cluster=cluster,
            profiling=MEASURING,
            options=OPTIONS,
            progress=not quiet,
        )
    plan = answer.require()
    say(str(plan), quiet=quiet)
    write_file(output / f"{name}.plan.json", plan.to_json(indent=2) + "\n")
    write_file(output / f"{name}.svg", timeline_svg(plan, plan_timeline(plan)))
    return plan


def _train(plan: Plan, steps: int, *, quiet: bool) -> Comparison:
    from ...core.units import count
    from ..support.launch_ranks import train
    from ..support.run_report import Comparison

    say(f"{plan.model}: {count(steps, 'step')} on {count(plan.num_stages, 'process')}", quiet=quiet)
    split = train(plan, steps=steps)
    say(f"{plan.model}: {count(steps, 'step')} unsplit, for comparison", quiet=quiet)
    return Comparison.of(plan, split, train(plan, steps=steps, whole=True))
