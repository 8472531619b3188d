"""``stagewright plan``: cut a profiled model for a set of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Context

from ..options import plan as flags
from ..options.estimate import EstimateWords, what_was_taken, with_shorter_samples
from ..options.model import is_stored_id, model_named
from ..options.plan import number_or_any, pair, pins
from ..options.server import Server, Token, token_needs_server
from ..support.flag_names import plan_text
from ..support.next_steps import after_plan, command_line, without
from ..support.output import JsonFlag, check_writable, emit, say, say_next, write_file
from ..support.progress import planning_progress
from ..support.read_documents import read_devices, read_document

if TYPE_CHECKING:
    from ...core.cluster.cluster import Cluster
    from ...core.plan.plan import Plan, PlanOptions
    from ...core.profile.profile import Profile


def command(
    context: Context,
    profiles: flags.Profiles,
    devices: flags.Devices,
    microbatch: flags.Microbatch = None,
    sequence: flags.SequenceLength = None,
    precision: flags.Precision = None,
    estimate_for: flags.EstimateFor = None,
    calibrate: flags.Calibrate = None,
    microbatches: flags.Microbatches = None,
    batch_size: flags.BatchSize = None,
    schedule: flags.Schedule = "1f1b",
    chunks: flags.Chunks = 2,
    extra_in_flight: flags.ExtraInFlight = 0,
    objective: flags.Objective = "step_time",
    stages: flags.Stages = None,
    max_stages: flags.MaxStages = None,
    max_replicas: flags.MaxReplicas = "1",
    recompute: flags.Recompute = None,
    order: flags.Order = "given",
    skips: flags.Skips = "relay",
    together: flags.Together = None,
    no_cut_after: flags.NoCutAfter = None,
    pin: flags.Pins = None,
    tied: flags.Tied = "priced",
    optimizer: flags.Optimizer = "adam",
    memory_fraction: flags.MemoryFraction = 1.0,
    gap: flags.Gap = 0.0,
    deadline: flags.Deadline = None,
    output: flags.Output = None,
    server: Server = None,
    token: Token = None,
    as_json: JsonFlag = False,
) -> None:
    """Cut a profiled model into pipeline stages for a set of devices.

    A published model can be named instead of its profile: it is captured without weights and its
    costs are estimated for the devices; the plan is then labelled ESTIMATED. With --server a
    service does all that, and takes a captured graph or an exported program (.pt2), too.
    """
    from ...core.plan.plan import PlanOptions
    from ..support.validation import checked

    if output is not None:
        check_writable(output)
    token_needs_server(server, token)
    name, cluster = model_named(profiles), read_devices(devices)
    is_model = name is not None and not is_stored_id(name)
    if is_model and microbatches is None:
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
        recompute=recompute or ("auto" if is_model else "never"),
        layer_order=order,
        skips=skips,
        together=tuple(map(pair, together or ())),
        no_cut_after=tuple(no_cut_after or ()),
        pins=pins(pin or ()),
        tied=tied,
        optimizer=optimizer,
        memory_fraction=memory_fraction,
        gap=gap,
    )
    explained: str | None
    words = EstimateWords(microbatch, sequence, precision, estimate_for, tuple(calibrate or ()))
    if server is not None:
        from ..support.service_plan import plan_on_service

        made = plan_on_service(
            server, token, profiles, name, words, cluster, options, deadline, quiet=as_json
        )
        explained = None
    elif name is None:
        made, follow = _from_files(profiles, words, cluster, options, deadline, quiet=as_json)
        explained = command_line("explain", output, follow, "-d", devices)
    else:
        made, follow = _from_name(name, words, cluster, options, deadline, quiet=as_json)
        explained = follow
    document = made.to_json(indent=2)
    if output is not None:
        write_file(output, document + "\n")
        say(f"wrote {output}", quiet=as_json)
    emit(document if as_json else plan_text(made))
    if output is None:
        again = without(context.find_root().obj or (), ["--json"], ["--token"])
        say_next(command_line(*again, "-o", "plan.json"), quiet=as_json)
    else:
        if explained is not None:
            say_next(explained, quiet=as_json)
        say_next(after_plan(made, output), quiet=as_json)


def _from_files(
    paths: Sequence[str],
    words: EstimateWords,
    cluster: Cluster,
    options: PlanOptions,
    deadline_s: float | None,
    *,
    quiet: bool,
) -> tuple[Plan, str]:
    """A plan of profiles in files, and the file that it rests on."""
    from ...core.profile.profile import Profile

    words.refuse_for_files()
    costs = [read_document(Path(path), Profile) for path in paths]
    made = _plan(costs, cluster, options, deadline_s, quiet=quiet)
    of_id = {entry.content_id(): path for path, entry in zip(paths, costs, strict=True)}
    return made, of_id[made.profile_id]


def _from_name(
    name: str,
    words: EstimateWords,
    cluster: Cluster,
    options: PlanOptions,
    deadline_s: float | None,
    *,
    quiet: bool,
) -> tuple[Plan, str]:
    """A plan of a published model, and the command that writes the profile it rests on.

    Raises:
        Infeasible: It does not fit; the message also tells what shorter samples would be.
    """
    from ...core.errors import Infeasible

    estimated = words.estimate(name, cluster)
    say(what_was_taken(name, estimated), quiet=quiet)
    try:
        made = _plan([estimated.profile], estimated.cluster, options, deadline_s, quiet=quiet)
    except Infeasible as error:
        raise with_shorter_samples(error, estimated.profile) from None
    return made, words.command_line(name, estimated)


def _plan(
    costs: Sequence[Profile],
    cluster: Cluster,
    options: PlanOptions,
    deadline_s: float | None,
    *,
    quiet: bool,
) -> Plan:
    from ...planner.plan import plan as make_plan

    with planning_progress(options.objective, quiet=quiet) as progress:
        return make_plan(costs, cluster, options, deadline_s=deadline_s, progress=progress)
