"""``stagewright plan``: cut a profiled model for a set of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .documents import read_devices, read_document
from .output import JsonFlag, check_writable, emit, say, say_next, write_file


def command(
    profile: Annotated[
        Path, Argument(metavar="PROFILE", help="A file written by 'stagewright profile'.")
    ],
    devices: Annotated[
        str, Option("--devices", "-d", help="4x24GB, 8x80GiB, 2xcpu, or a cluster file.")
    ],
    microbatches: Annotated[
        int, Option("--microbatches", "-m", help="Micro-batches per training step.")
    ] = 8,
    schedule: Annotated[str, Option(help="gpipe or 1f1b.")] = "1f1b",
    stages: Annotated[
        int | None, Option(help="Exactly this many stages; otherwise the fastest number is found.")
    ] = None,
    optimizer: Annotated[
        str, Option(help="none, sgd, momentum or adam: the state it keeps takes memory.")
    ] = "adam",
    memory_fraction: Annotated[
        float, Option(help="Share of each device's memory that may be used.")
    ] = 1.0,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Write the plan to this file.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Cut a profiled model into pipeline stages for a set of devices."""
    from ..core.plan import PlanOptions
    from ..core.profile import Profile
    from .checked import checked

    if output is not None:
        check_writable(output)
    options = checked(
        PlanOptions,
        num_microbatches=microbatches,
        schedule=schedule,
        num_stages=stages,
        optimizer=optimizer,
        memory_fraction=memory_fraction,
    )
    costs, cluster = read_document(profile, Profile), read_devices(devices)
    from ..planner.plan import plan as make_plan

    made = make_plan(costs, cluster, options)
    document = made.to_json(indent=2)
    if output is not None:
        write_file(output, document + "\n")
        say(f"wrote {output}", quiet=as_json)
    emit(document if as_json else str(made))
    if output is None:
        say_next("the same with -o plan.json, to keep the plan", quiet=as_json)
    else:
        say_next(f"stagewright show {output} --svg plan.svg", quiet=as_json)
