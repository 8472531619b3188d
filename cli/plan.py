"""``stagewright plan``: cut a profiled model for a set of devices."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .documents import read_document
from .model_names import (
    devices_named,
    estimated_model,
    model_named,
    refuse_for_files,
    what_was_taken,
    words_of_estimate,
)
from .output import JsonFlag, check_writable, emit, say, say_next, write_file
from .plan_options import number_or_any, pair, pins
from .progress import planning_progress

MODEL = "For a model's name instead of a profile"
STEP = "What a step is"
GOAL = "What to look for"
RULES = "What to keep to"
MEMORY = "Memory"
SEARCH = "How long to search"
RESULT = "Result"


def command(
    profiles: Annotated[
        list[str],
        Argument(
            metavar="PROFILE|MODEL",
            help="A file written by 'stagewright profile' or 'estimate'; with --batch-size "
            "several, of one model at several sizes of micro-batches. Or a published model's "
            "name, such as gpt2-xl or llama-70b: its costs are estimated.",
        ),
    ],
    devices: Annotated[
        str,
        Option(
            "--devices",
            "-d",
            help="4x24GB, 2xcpu, 4x8x80GB (4 nodes of 8), 2x80GB,4x24GB (two kinds), 8xH200 "
            "(a device of the catalogue), or a cluster file.",
            rich_help_panel=STEP,
        ),
    ],
    microbatch: Annotated[
        int | None,
        Option(help="Samples in a micro-batch; 1 if not given.", rich_help_panel=MODEL),
    ] = None,
    sequence: Annotated[
        int | None,
        Option(
            help="Tokens of a sample; those of the model's publication if not given.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        Option(
            help="fp32, tf32, bf16 or fp16, of weights, gradients and activations; bf16 if not "
            "given, on CPUs fp32.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    estimate_for: Annotated[
        str | None,
        Option(
            metavar="KIND",
            help="The catalogue's device to estimate for, if --devices does not name it.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        Option(
            metavar="PROFILE",
            help="Calibrate the estimate by this measured profile. May be repeated.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    microbatches: Annotated[
        int | None,
        Option(
            "--microbatches",
            "-m",
            help="Micro-batches per training step; 8 if not given, for a model's name at least as "
            "many as devices. With --batch-size, which it has to divide, the size of micro-batches "
            "follows.",
            rich_help_panel=STEP,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        Option(
            help="Samples per training step: the size of micro-batches is chosen too. For speed "
            "none is chosen below the sizes profiled; others are estimated in proportion.",
            rich_help_panel=STEP,
        ),
    ] = None,
    schedule: Annotated[
        str,
        Option(
            help="gpipe, 1f1b, interleaved_1f1b, looped_bfs, zero_bubble, "
            "interleaved_zero_bubble or zbv.",
            rich_help_panel=STEP,
        ),
    ] = "1f1b",
    chunks: Annotated[
        int,
        Option(help="Stages a device, for the schedules that take several.", rich_help_panel=STEP),
    ] = 2,
    extra_in_flight: Annotated[
        int,
        Option(
            help="Micro-batches a stage may run ahead beyond its warm-up (1f1b), where that is "
            "faster.",
            rich_help_panel=STEP,
        ),
    ] = 0,
    objective: Annotated[
        str,
        Option(
            help="What to minimise: step_time, throughput, latency (forward only), memory, "
            "devices, balance_time, balance_size or pipedream.",
            rich_help_panel=GOAL,
        ),
    ] = "step_time",
    stages: Annotated[
        int | None,
        Option(
            help="Exactly this many stages; otherwise the best number is found.",
            rich_help_panel=GOAL,
        ),
    ] = None,
    max_stages: Annotated[
        int | None, Option(help="At most this many stages.", rich_help_panel=GOAL)
    ] = None,
    max_replicas: Annotated[
        str,
        Option(
            metavar="N|any",
            help="At most this many devices a stage, which share its micro-batches.",
            rich_help_panel=GOAL,
        ),
    ] = "1",
    recompute: Annotated[
        str | None,
        Option(
            help="never, auto or always: keep a stage's inputs only and run its forward again. "
            "never if not given, auto for a model's name.",
            rich_help_panel=GOAL,
        ),
    ] = None,
    order: Annotated[
        str,
        Option(
            help="given, or any to reorder branches that do not depend on each other (in Python "
            "and over HTTP: layer_order).",
            rich_help_panel=GOAL,
        ),
    ] = "given",
    together: Annotated[
        list[str] | None,
        Option(
            metavar="FIRST:LAST",
            help="Layers from one to the other share a stage. May be repeated.",
            rich_help_panel=RULES,
        ),
    ] = None,
    no_cut_after: Annotated[
        list[str] | None,
        Option(
            metavar="LAYER",
            help="No stage ends with this layer. May be repeated.",
            rich_help_panel=RULES,
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        Option(
            metavar="LAYER=STAGE|@KIND",
            help="A layer's stage, counted from 0, or its kind of device. May be repeated.",
            rich_help_panel=RULES,
        ),
    ] = None,
    tied: Annotated[
        str,
        Option(
            help="priced: layers that share a weight may be apart, at the price of summing its "
            "gradients; together: they may not.",
            rich_help_panel=RULES,
        ),
    ] = "priced",
    optimizer: Annotated[
        str,
        Option(
            help="none, sgd, momentum or adam: the state it keeps takes memory.",
            rich_help_panel=MEMORY,
        ),
    ] = "adam",
    memory_fraction: Annotated[
        float,
        Option(help="Share of each device's memory that may be used.", rich_help_panel=MEMORY),
    ] = 1.0,
    gap: Annotated[
        float,
        Option(
            help="Good enough: 0.01 stops once no plan can be more than 1 % better.",
            rich_help_panel=SEARCH,
        ),
    ] = 0.0,
    deadline: Annotated[
        float | None,
        Option(
            metavar="SECONDS",
            min=0.0,
            help="Take the best plan found until then; none is exit code 6.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="Write the plan to this file.", rich_help_panel=RESULT),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Cut a profiled model into pipeline stages for a set of devices.

    A published model can be named instead of its profile: it is captured without weights and its
    costs are estimated for the devices; the plan is then labelled ESTIMATED.
    """
    from ..core.plan import PlanOptions
    from ..core.profile import Profile
    from .checked import checked

    if output is not None:
        check_writable(output)
    name, cluster = model_named(profiles), devices_named(devices)
    if name is not None and microbatches is None:
        microbatches = max(8, len(cluster.devices))
    options = checked(
        PlanOptions,
        **({} if microbatches is None else {"num_microbatches": microbatches}),
        batch_size=batch_size,
        schedule=schedule,
        chunks=chunks,
        max_extra_in_flight=extra_in_flight,
        objective=objective,
        num_stages=stages,
        max_stages=max_stages,
        max_replicas=number_or_any(max_replicas),
        recompute=recompute or ("never" if name is None else "auto"),
        layer_order=order,
        together=tuple(map(pair, together or ())),
        no_cut_after=tuple(no_cut_after or ()),
        pins=pins(pin or ()),
        tied=tied,
        optimizer=optimizer,
        memory_fraction=memory_fraction,
        gap=gap,
    )
    given = {
        "--microbatch": microbatch,
        "--sequence": sequence,
        "--precision": precision,
        "--estimate-for": estimate_for,
        "--calibrate": calibrate,
    }
    if name is None:
        refuse_for_files(given)
        costs = [read_document(Path(path), Profile) for path in profiles]
    else:
        estimated = estimated_model(
            name, cluster, microbatch, sequence, precision, estimate_for, calibrate or ()
        )
        costs, cluster = [estimated.profile], estimated.cluster
        say(what_was_taken(name, estimated), quiet=as_json)
    from ..planner.plan import plan as make_plan

    with planning_progress(options.objective, quiet=as_json) as progress:
        made = make_plan(costs, cluster, options, deadline_s=deadline, progress=progress)
    document = made.to_json(indent=2)
    if output is not None:
        write_file(output, document + "\n")
        say(f"wrote {output}", quiet=as_json)
    emit(document if as_json else str(made))
    if output is None:
        say_next("the same with -o plan.json, to keep the plan", quiet=as_json)
    elif name is not None:
        say_next(f"stagewright show {output} --svg plan.svg", quiet=as_json)
        again = words_of_estimate(name, estimated, microbatch, sequence, precision, calibrate or ())
        say_next(f"{again}, for 'stagewright explain'", quiet=as_json)
    else:
        used = next(
            path
            for path, entry in zip(profiles, costs, strict=True)
            if entry.content_id() == made.profile_id
        )
        words = shlex.join(["explain", str(output), str(used), "-d", devices])
        say_next(f"stagewright {words}, to see what would help", quiet=as_json)
        say_next(f"stagewright show {output} --svg plan.svg", quiet=as_json)
