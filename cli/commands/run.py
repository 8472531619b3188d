"""``stagewright run``: train a plan's model on this machine, one process per device."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ..options import model as of_model
from ..options import profile as flags
from ..support.load_object import OwnModel
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next, write_file
from ..support.progress import working
from ..support.read_documents import read_document

if TYPE_CHECKING:
    from ...core.plan.plan import Plan
    from ...core.plan.timeline import Timeline


def command(
    plan: Annotated[Path, Argument(metavar="PLAN", help="A file written by 'stagewright plan'.")],
    model: of_model.Model = None,
    sample: of_model.SampleObject = None,
    loss: flags.Loss = None,
    target: flags.Target = None,
    steps: Annotated[int, Option(min=1, help="Training steps.")] = 3,
    compare: Annotated[
        bool, Option("--compare", help="Also train the unsplit model, and compare the losses.")
    ] = False,
    seed: Annotated[int, Option(min=0, help="Seed of the weights and the data.")] = 0,
    trace: Annotated[
        Path | None,
        Option(help="Record a step; write it and the planned one as a trace for Perfetto."),
    ] = None,
    svg: Annotated[
        Path | None, Option(help="Record a step; draw it below the planned one.")
    ] = None,
    timeout: Annotated[float, Option(min=1, help="Seconds a rank waits for another.")] = 120.0,
    as_json: JsonFlag = False,
) -> None:
    """Train a plan's model under torchrun, and compare with the prediction.

    A model family trains on synthetic data. For a plan of your own model, name the model and its
    sample as for 'verify': every micro-batch of every step is a call of the sample's function.
    """
    from ...core.plan.plan import Plan
    from ...core.text_table import format_table
    from ...core.units import count
    from ..support.launch_ranks import check_trainable, check_training_memory, train
    from ..support.run_report import HEADINGS, RunReport

    document = read_document(plan, Plan)
    own = OwnModel.of("run", document, model, sample, loss, target)
    check_trainable(document, own)
    check_training_memory(document)
    say(f"training {count(document.num_stages, 'stage')} for {count(steps, 'step')}", quiet=as_json)
    records = trace is not None or svg is not None
    with nullcontext() if as_json else working("training"):
        split = train(document, own=own, steps=steps, seed=seed, timeout_s=timeout, records=records)
    whole = None
    if compare:
        say("training the unsplit model for comparison", quiet=as_json)
        with nullcontext() if as_json else working("training"):
            whole = train(document, own=own, steps=steps, seed=seed, whole=True)
    report = RunReport.of(document, split, whole)
    emit(json.dumps(report.to_dict()) if as_json else format_table([HEADINGS, report.row()]))
    if split.timeline is not None:
        _draw(document, split.timeline, trace, svg, quiet=as_json)
    report.check()
    for line in report.remarks():
        say(line, quiet=as_json)
    say("see examples/train.py for doing this in your own script", quiet=as_json)
    words = own.words if own is not None else []
    again = command_line("run", plan, *words, "--svg", "run.svg")
    say_next(command_line("show", plan) if records else again, quiet=as_json)


def _draw(
    plan: Plan, measured: Timeline, trace: Path | None, svg: Path | None, *, quiet: bool
) -> None:
    """Write the recorded step next to the planned one, and print where they differ most."""
    from ...formats.chrome_trace import chrome_trace
    from ...formats.svg import timeline_svg
    from ...planner.simulator.plan_timeline import plan_timeline
    from ...runtime.compare import compare

    planned = plan_timeline(plan)
    if trace is not None:
        write_file(trace, chrome_trace(planned, measured))
        say(f"wrote {trace}; open it at ui.perfetto.dev", quiet=quiet)
    if svg is not None:
        write_file(svg, timeline_svg(plan, planned, measured))
        say(f"wrote {svg}", quiet=quiet)
    say(str(compare(plan, measured)), quiet=quiet)
