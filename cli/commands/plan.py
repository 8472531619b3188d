"""``stagewright plan``: split a profiled model into pipeline stages for a set of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Context

from ...core.errors import InvalidInput
from ...view.option_flags import flags_of_options
from ..options import plan as flags
from ..options.service import Server, Token, check_token
from ..support.flag_names import plan_text
from ..support.named_models import (
    EstimateFlags,
    describe_estimate,
    find_model_name,
    is_model_name,
    read_recipe,
    suggest_shorter_samples,
)
from ..support.next_steps import command_line, drop_flags, suggest_after_plan
from ..support.output import (
    JsonFlag,
    NoCacheFlag,
    VerboseFlag,
    check_writable,
    emit,
    say,
    say_next,
    write_file,
)
from ..support.progress import planning_progress, working
from ..support.read_documents import build_record, read_devices, read_document
from ..support.service import plan_on_service

if TYPE_CHECKING:
    from ...core.cluster.cluster import Cluster
    from ...core.plan.plan import Plan, PlanOptions
    from ...core.profile.profile import Profile

    MakePlan = Callable[[Sequence[Profile], Cluster], Plan]


def command(
    context: Context,
    profiles: flags.Profiles,
    devices: flags.Devices,
    microbatch: flags.Microbatch = None,
    sequence: flags.SequenceLength = None,
    precision: flags.Precision = None,
    estimate_for: flags.EstimateFor = None,
    calibrate: flags.Calibrate = None,
    microbatches: flags.Microbatches = "auto",
    batch_size: flags.BatchSize = None,
    schedule: flags.Schedule = "auto",
    chunks: flags.Chunks = "auto",
    extra_in_flight: flags.ExtraInFlight = 0,
    objective: flags.Objective = "step_time",
    stages: flags.Stages = None,
    max_stages: flags.MaxStages = None,
    max_replicas: flags.MaxReplicas = "1",
    tensor: flags.Tensor = "1",
    strategies: flags.Strategies = "replicate",
    recompute: flags.Recompute = None,
    order: flags.Order = "given",
    skips: flags.Skips = "relay",
    together: flags.Together = None,
    no_cut_after: flags.NoCutAfter = None,
    pin: flags.Pins = None,
    tied: flags.Tied = "priced",
    cut_at: flags.CutAt = "layers",
    regular: flags.Regular = "no",
    regular_within: flags.RegularWithin = None,
    target: flags.Target = None,
    optimizer: flags.Optimizer = "adam",
    memory_fraction: flags.MemoryFraction = 1.0,
    reserves: flags.Reserves = None,
    gap: flags.Gap = 0.0,
    robust: flags.Robust = False,
    deadline: flags.Deadline = None,
    output: flags.Output = None,
    server: Server = None,
    token: Token = None,
    no_cache: NoCacheFlag = False,
    verbose: VerboseFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Split a profiled model into pipeline stages for a set of devices.

    Costs of a model given by name are estimated. With --server, a service plans.
    """
    check_writable(output)
    check_token(server, token)
    name, cluster = find_model_name(profiles), read_devices(devices)
    options = build_options(context.params, is_model=is_model_name(name))
    estimate, explain = EstimateFlags.of(context.params), ""
    make = partial(_make_plan, given=context.params, options=options)
    if server is not None:
        asked = (server, token, profiles, name, estimate, cluster, options, deadline)
        plan = plan_on_service(*asked, quiet=as_json)
    elif name is None:
        plan, explain = _plan_files(profiles, estimate, cluster, make, ("-d", devices), output)
    else:
        plan, explain = _plan_name(name, estimate, cluster, make, options, context.params)
    _finish(context, plan, output, explain)


def build_options(given: Mapping[str, Any], *, is_model: bool) -> PlanOptions:
    """Build planning options from the parameters of `command`; errors name the flag.

    For a model's name (``is_model``) the defaults suit models too large to profile here.
    """
    from ...core.plan.plan import PlanOptions

    if given.get("server") is not None and given.get("target") is not None:
        raise InvalidInput("--for plans here; leave out --server, or plan without --for")
    # A parameter is named like its flag, and FLAGS knows the flag of every field.
    values = {name: given[flag[2:].replace("-", "_")] for name, flag in flags_of_options().items()}
    values["max_replicas"] = flags.parse_max_replicas(values["max_replicas"])
    values["tensor"] = flags.parse_tensor(values["tensor"])
    values["strategies"] = tuple(values["strategies"].split(","))
    values["together"] = tuple(map(flags.parse_together, values["together"] or ()))
    values["no_cut_after"] = tuple(values["no_cut_after"] or ())
    values["pins"] = tuple(map(flags.parse_pin, values["pins"] or ()))
    values["num_microbatches"] = flags.parse_count(values["num_microbatches"], "--microbatches")
    values["chunks"] = flags.parse_count(values["chunks"], "--chunks")
    values["precision"] = read_recipe(values["precision"], is_model=is_model)
    values["reserves"] = flags.parse_reserves(values["reserves"])
    if values["recompute"] is None:
        values["recompute"] = "auto" if is_model else "never"
    open_values = {"schedule": "auto", "chunks": None, "num_microbatches": None}
    values["auto"] = tuple(name for name, auto in open_values.items() if values[name] == auto)
    for name in (*values["auto"], "memory_fraction"):
        if name in values["auto"] or values[name] is None:
            del values[name]
    return build_record(PlanOptions, **values)


def _plan_files(
    paths: Sequence[str],
    estimate: EstimateFlags,
    cluster: Cluster,
    make: MakePlan,
    devices: tuple[str, str],
    output: Path | None,
) -> tuple[Plan, str]:
    """Plan from profiles in files; return the plan and the command that explains it."""
    from ...core.profile.profile import Profile

    estimate.refuse_for_profiles()
    profiles = [read_document(Path(path), Profile) for path in paths]
    for path, profile in zip(paths, profiles, strict=True):
        _warn_if_poor(path, profile)
    plan = make(profiles, cluster)
    path_of = {entry.content_id(): path for path, entry in zip(paths, profiles, strict=True)}
    # A plan for inference is of the forward passes of its only profile.
    source = path_of.get(plan.profile_id, paths[0])
    return plan, command_line("explain", output, source, *devices)


def _warn_if_poor(path: str, profile: Profile) -> None:
    """Say that a plan is no better than the numbers it is made of."""
    from ...core.profile.grade import grade

    found = grade(profile)
    if found.verdict == "poor":
        remedy = (
            "calibrate it with a measured profile (stagewright estimate --calibrate)"
            if profile.provenance.source == "estimated"
            else "measure again on an idle machine, with a larger --budget"
        )
        say(f"warning: {path}: {found}; {remedy}")


def _plan_name(
    name: str,
    estimate: EstimateFlags,
    cluster: Cluster,
    make: MakePlan,
    options: PlanOptions,
    given: Mapping[str, Any],
) -> tuple[Plan, str]:
    """Plan a published model; return the plan and the command that explains it.

    Without a cache it is the command that writes the profile, which explaining needs.
    """
    from ...core.errors import Infeasible

    devices, output = given["devices"], given["output"]
    estimated = estimate.estimate(name, cluster, devices)
    say(describe_estimate(name, estimated, estimate), quiet=given["as_json"])
    try:
        plan = make([estimated.profile], estimated.cluster)
    except Infeasible as error:
        again = partial(estimate.estimate_at, name, cluster, devices)
        profile, used = estimated.profile, estimated.cluster
        raise suggest_shorter_samples(error, profile, options, again, used) from None
    if estimate.use_cache:
        return plan, command_line("explain", output)
    return plan, estimate.estimate_command(name, estimated)


def _make_plan(
    profiles: Sequence[Profile],
    cluster: Cluster,
    *,
    given: Mapping[str, Any],
    options: PlanOptions,
) -> Plan:
    from ...planner.plan import plan

    deadline_s, quiet = given["deadline"], given["as_json"]
    if given["target"] is not None:
        return _plan_for(given["target"], profiles, cluster, options, deadline_s)
    with planning_progress(options.objective, quiet=quiet) as progress:
        return plan(profiles, cluster, options, deadline_s=deadline_s, progress=progress)


def _plan_for(
    name: str,
    profiles: Sequence[Profile],
    cluster: Cluster,
    options: PlanOptions,
    deadline_s: float | None,
) -> Plan:
    from ...formats.plan_for import plan_for
    from ...formats.runtimes.registry import find_target
    from ...planner.plan import plan

    target = find_target(name)
    if len(profiles) > 1:
        raise InvalidInput("--for takes one profile; choose the micro-batch size first")
    search = partial(plan, deadline_s=deadline_s)
    with working(f"planning under the rules of {target.title}"):
        return plan_for(target, profiles[0], cluster, options, search=search).plan


def _finish(context: Context, plan: Plan, output: Path | None, explain: str) -> None:
    quiet = context.params["as_json"]
    if output is not None:
        write_file(output, plan.to_json(indent=2) + "\n")
        say(f"wrote {output}", quiet=quiet)
    details = context.params["verbose"]
    emit(plan.to_json(indent=2) if quiet else plan_text(plan, details=details))
    if output is None:
        # The same command with -o; a token must not end up in a shell's history.
        again = drop_flags(context.find_root().obj or (), ["--json"], ["--token"])
        say_next(command_line(*again, "-o", "plan.json"), quiet=quiet)
        return
    if explain:
        say_next(explain, quiet=quiet)
    if target := context.params["target"]:
        say_next(command_line("export", output, "--to", target), quiet=quiet)
    say_next(suggest_after_plan(plan, output), quiet=quiet)
