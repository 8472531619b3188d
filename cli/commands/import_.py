"""``stagewright import``: turn a cut of another runtime into a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from ..options import cuts
from ..support.flag_names import plan_text
from ..support.next_steps import suggest_after_plan
from ..support.output import JsonFlag, check_writable, emit, say, say_next, write_file
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
    output: Annotated[
        Path | None, Option("--output", "-o", help="Write the plan to this file.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Read a cut in the form of another runtime, and write it as a plan.

    The plan is priced like every other: it can be drawn, explained, verified and run here, and
    exported to another runtime. A cut with lost or doubled layers is refused; 'stagewright check'
    says which they are.

    Examples:
    stagewright import 17,20,3 --from vllm --model llama-13b -d 3x24GB -o plan.json

    stagewright import layout.sh --from megatron --model profile.json -d 8xH100
    """
    from ...formats.check_cut import merge_options, price_cut

    check_writable(output)
    cluster = read_devices(devices)
    costs, cluster = cuts.read_profile(
        model, cluster, microbatch=microbatch, sequence=sequence, quiet=as_json
    )
    found, costs = cuts.read_cut(cut, source, costs)
    options = merge_options(found, cuts.build_cut_options(schedule, microbatches))
    plan = price_cut(found, costs, cluster, options)
    if output is not None:
        write_file(output, plan.to_json(indent=2) + "\n")
        say(f"wrote {output}", quiet=as_json)
    emit(plan.to_json(indent=2) if as_json else plan_text(plan))
    if output is not None:
        say_next(suggest_after_plan(plan, output), quiet=as_json)
