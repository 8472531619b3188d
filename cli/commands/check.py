"""``stagewright check``: judge a cut that another runtime uses today."""

from __future__ import annotations

import json
from typing import Annotated

from typer import Exit, Option

from ..exit_codes import ExitCode
from ..options import cuts
from ..support.output import JsonFlag, emit
from ..support.progress import working
from ..support.read_documents import read_devices


def command(
    cut: cuts.CutText,
    source: cuts.Source,
    model: cuts.Model,
    devices: cuts.Devices,
    microbatches: cuts.Microbatches = 8,
    schedule: cuts.Schedule = "1f1b",
    microbatch: cuts.MicrobatchSize = None,
    sequence: cuts.Sequence = None,
    deadline: Annotated[
        float | None, Option(min=0.0, help="Time limit in seconds for the best plan.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Judge a cut in the form of another runtime: lost layers, memory, step time, and the best.

    Exit code 3 if the cut cannot run: layers are lost or doubled, or memory does not suffice.

    Examples:
    stagewright check 17,20,3 --from vllm --model llama-13b -d 3x24GB

    stagewright check layout.sh --from megatron --model profile.json -d 8xH100 --microbatches 64
    """
    from functools import partial

    from ...formats.check_cut import check_cut
    from ...planner.plan import plan

    cluster = read_devices(devices)
    costs, cluster = cuts.read_profile(
        model, cluster, microbatch=microbatch, sequence=sequence, quiet=as_json
    )
    found, costs = cuts.read_cut(cut, source, costs)
    options = cuts.build_cut_options(schedule, microbatches)
    with working("checking: searching for the best plan"):
        report = check_cut(
            found, costs, cluster, options, search=partial(plan, deadline_s=deadline)
        )
    emit(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    if report.plan is None:
        raise Exit(ExitCode.INFEASIBLE)
