"""``stagewright check``: judge a cut that another runtime uses today."""

from __future__ import annotations

import json

from typer import Context, Exit

from ..exit_codes import ExitCode
from ..options import cuts
from ..options import plan as flags
from ..support.flag_names import in_flags
from ..support.output import JsonFlag, NoCacheFlag, emit
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
    deadline: cuts.Deadline = None,
    no_cache: NoCacheFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Judge a cut in the form of another runtime: missing layers, memory, step time, and the best.

    Exit code 3 if the cut cannot run: layers are missing or duplicated, or memory does not suffice.
    What is not priced is said in a note.
    """
    from functools import partial

    from ...formats.check_cut import check_cut
    from ...planner.plan import plan

    asked = cuts.CutQuestion.read(context.params)
    with working("checking: searching for the best plan"):
        report = check_cut(
            asked.cut,
            asked.profile,
            asked.cluster,
            asked.options,
            search=partial(plan, deadline_s=deadline),
        )
    emit(json.dumps(report.to_dict(), indent=2) if as_json else in_flags(str(report)))
    if report.reasons:
        raise Exit(ExitCode.INFEASIBLE)
