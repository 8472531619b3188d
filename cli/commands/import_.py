"""``stagewright import``: turn a cut of another runtime into a plan."""

from __future__ import annotations

from typer import Context

from ..options import cuts
from ..options import plan as flags
from ..support.flag_names import plan_text
from ..support.next_steps import suggest_after_plan
from ..support.output import JsonFlag, NoCacheFlag, check_writable, emit, say, say_next, write_file
from ..support.progress import working


def command(
    context: Context,
    cut: cuts.CutText,
    source: cuts.Source,
    model: cuts.Model,
    devices: cuts.Devices,
    microbatch: flags.Microbatch = None,
    sequence: flags.SequenceLength = None,
    precision: flags.Precision = None,
    estimate_for: flags.EstimateFor = None,
    calibrate: flags.Calibrate = None,
    microbatches: cuts.Microbatches = 8,
    schedule: cuts.Schedule = "1f1b",
    optimizer: flags.Optimizer = "adam",
    recompute: cuts.Recompute = "never",
    memory_fraction: flags.MemoryFraction = 1.0,
    deadline: cuts.Deadline = 10.0,
    output: flags.Output = None,
    no_cache: NoCacheFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Read a cut in the form of another runtime, and write it as a plan.

    The plan is priced like every other: it can be drawn, explained, verified and run here, and
    exported to another runtime. A cut with missing or duplicated layers is refused.
    """
    from functools import partial

    from ...formats.check_cut import import_plan
    from ...planner.plan import plan as find_plan

    check_writable(output)
    asked = cuts.CutQuestion.read(context.params)
    with working("importing: searching for a bound"):
        plan = import_plan(
            asked.cut,
            asked.profile,
            asked.cluster,
            asked.options,
            search=partial(find_plan, deadline_s=deadline),
        )
    if output is not None:
        write_file(output, plan.to_json(indent=2) + "\n")
        say(f"wrote {output}", quiet=as_json)
    emit(plan.to_json(indent=2) if as_json else plan_text(plan))
    if output is not None:
        say_next(suggest_after_plan(plan, output), quiet=as_json)
