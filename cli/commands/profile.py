"""``stagewright profile``: measure what each layer of a model costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import InvalidInput
from ..options import model as of_model
from ..options import profile as flags
from ..options.model import long_name, own_model, refuse, request_named
from ..options.server import Server, Token, token_needs_server
from ..support.next_steps import planning
from ..support.output import JsonFlag, check_writable, emit, profile_text, say, say_next, write_file
from ..support.service_documents import profile_on_service

if TYPE_CHECKING:
    from ...core.profile.profile import Profile
    from ...core.progress import Progress
    from ...core.requests.requests import ProfilingOptions

DEFAULT_OUTPUT = Path("profile.json")


def command(
    model: of_model.Model = None,
    sample: of_model.SampleObject = None,
    loss: flags.Loss = None,
    target: flags.Target = None,
    family: of_model.Family = None,
    config: of_model.Config = None,
    inputs: of_model.Inputs = None,
    device: flags.Device = None,
    threads: flags.Threads = None,
    neighbours: flags.Neighbours = None,
    budget: flags.Budget = None,
    autocast: flags.Autocast = None,
    compiled: flags.Compiled = None,
    deduplicate: flags.Deduplicate = None,
    links: flags.Links = False,
    ranks: flags.Ranks = None,
    timeout: flags.Timeout = 60.0,
    output: flags.Output = None,
    server: Server = None,
    token: Token = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what each layer of a model costs, for one micro-batch; or links between devices.

    Give the model one of three ways: a function and --sample, with --loss and --target if the
    backward is to start from a loss; --family, --config and --input; or a JSON file.
    With --server a service measures it; a model of one's own is captured here and its graph sent.
    With --links: between the devices of this machine, or, started by torchrun, between all ranks.
    """
    if links:
        of_models: dict[str, object] = {
            "MODEL": model, "--sample": sample, "--loss": loss, "--target": target,
            "--family": family, "--config": config, "--input": inputs, "--threads": threads,
            "--neighbours": neighbours, "--autocast": autocast, "--compile": compiled,
            "--deduplicate": deduplicate, "--server": server,
        }  # fmt: skip
        refuse("--links", of_models)
        _links(ranks, device, budget, timeout, output, as_json=as_json)
        return
    refuse("a model; it is for --links", {"--ranks": ranks})
    token_needs_server(server, token)
    output = output or DEFAULT_OUTPUT
    check_writable(output)
    from ...core.requests.requests import ProfilingOptions
    from ...profiler.measure_worker import measure
    from ..options.measure import with_options
    from ..support.progress import progress_bar

    given = {
        "device": device,
        "num_threads": threads,
        "busy_neighbours": neighbours,
        "budget_s": budget,
        "autocast": long_name(autocast),
        "compile": compiled,
        "deduplicate": deduplicate,
    }
    request = request_named(model, family, config, inputs, target, sample=sample, loss=loss)
    options = with_options(request.profiling if request else ProfilingOptions(), **given)
    if server is not None:
        profile = profile_on_service(
            server, token, request, options, model, sample,
            quiet=as_json, loss=loss, target=target,
        )  # fmt: skip
    else:
        with progress_bar(quiet=as_json) as progress:
            if request is not None:
                profile = measure(request.model_copy(update={"profiling": options}), progress)
            else:
                profile = _measure_objects(model, sample, loss, target, options, progress)
    document = profile.to_json(indent=2)
    write_file(output, document + "\n")
    emit(document if as_json else profile_text(profile))
    say(f"wrote {output}", quiet=as_json)
    say_next(planning(profile, output), quiet=as_json)


def _links(
    ranks: int | None,
    device: str | None,
    budget_s: float | None,
    timeout_s: float,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    from ..support.links import DEFAULT_OUTPUT as CLUSTER
    from ..support.links import profile_links

    profile_links(
        ranks=ranks,
        device=device,
        budget_s=budget_s,
        timeout_s=timeout_s,
        output=output or CLUSTER,
        as_json=as_json,
    )


def _measure_objects(
    model: str | None,
    sample: str | None,
    loss: str | None,
    target: str | None,
    options: ProfilingOptions,
    progress: Progress | None,
) -> Profile:
    """Measure in this process, where the objects are."""
    if (loss is None) != (target is None):
        raise InvalidInput("--loss and --target go together")
    from ...profiler.machine.allocator import keep_freed_memory
    from ...profiler.machine.device_check import check_device
    from ...profiler.measure.profile import profile
    from ..support.load_object import call_target, load_target

    keep_freed_memory()
    device = check_device(options.device) if options.device else None
    module, inputs = own_model(model, sample)
    return profile(
        module.to(device) if device else module,
        inputs,
        options=options,
        loss_fn=None if loss is None else load_target(loss),
        target=None if target is None else call_target(target),
        progress=progress,
    )
