"""``stagewright profile``: measure what each layer of a model costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Context

from ...core.errors import InvalidInput, RankFailed
from ..exit_codes import exit_code, report
from ..options import model as of_model
from ..options import profile as flags
from ..options.model import read_named_request
from ..options.service import Server, Token, check_token
from ..support.load_object import call_object, load_model, load_object, refuse_options
from ..support.named_models import lengthen_dtype, name_config_file
from ..support.output import JsonFlag, check_writable, finish_profile
from ..support.progress import progress_bar
from ..support.service import profile_on_service

if TYPE_CHECKING:
    from ...core.profile.profile import Profile
    from ...core.progress import Progress as ProgressCallback
    from ...core.requests.requests import MeasureRequest, ProfilingOptions

DEFAULT_OUTPUT = Path("profile.json")

OF_MODELS = {
    "MODEL": "model", "--sample": "sample", "--loss": "loss", "--target": "target",
    "--family": "family", "--config": "config", "--input": "inputs", "--threads": "threads",
    "--neighbours": "neighbours", "--autocast": "autocast", "--compile": "compiled",
    "--deduplicate": "deduplicate", "--server": "server",
}  # fmt: skip
"""Flags that cannot be combined with ``--links``, and their parameters of `command`."""


def command(
    context: Context,
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
    """Measure what each layer of a model costs per micro-batch, or the links between devices.

    Name the model in one of three ways: a function and --sample, with --loss and --target to
    start backward from a loss; --family, --config and --input; or a JSON file. With --server, a
    service measures it; a model built by your own code is captured here and sent as a graph.
    With --links, measure between the devices of this machine or, under torchrun, all ranks.
    """
    if links:
        refuse_options("--links", {name: context.params[key] for name, key in OF_MODELS.items()})
        from ..support.links import DEFAULT_OUTPUT as CLUSTER
        from ..support.links import profile_links

        profile_links(
            ranks=ranks, device=device, budget_s=budget, timeout_s=timeout,
            output=output or CLUSTER, as_json=as_json, give_up=partial(_give_up, as_json=as_json),
        )  # fmt: skip
        return
    refuse_options("a model; it requires --links", {"--ranks": ranks})
    check_token(server, token)
    output = output or DEFAULT_OUTPUT
    check_writable(output)
    request = read_named_request(model, family, config, inputs, target, sample=sample, loss=loss)
    options = _build_options(context.params, request)
    if server is not None:
        profile = profile_on_service(
            server, token, request, options, model, sample,
            quiet=as_json, loss=loss, target=target,
        )  # fmt: skip
    else:
        profile = _measure_here(request, model, sample, loss, target, options, quiet=as_json)
    finish_profile(profile, output, as_json=as_json)


def _build_options(given: Mapping[str, Any], request: MeasureRequest | None) -> ProfilingOptions:
    from ...core.requests.requests import ProfilingOptions
    from ..options.measure import override_options

    return override_options(
        request.profiling if request else ProfilingOptions(),
        device=given["device"],
        num_threads=given["threads"],
        busy_neighbours=given["neighbours"],
        budget_s=given["budget"],
        autocast=lengthen_dtype(given["autocast"]),
        compile=given["compiled"],
        deduplicate=given["deduplicate"],
    )


def _give_up(error: RankFailed, *, as_json: bool) -> None:
    # The rank's main thread is stuck in a collective, so that raising would end nothing.
    report(error, as_json=as_json)
    sys.stderr.flush()
    os._exit(exit_code(error))


def _measure_here(
    request: MeasureRequest | None,
    model: str | None,
    sample: str | None,
    loss: str | None,
    target: str | None,
    options: ProfilingOptions,
    *,
    quiet: bool,
) -> Profile:
    """Measure the requested model, or else the user's objects, in this process."""
    from ...profiler.measure_worker import measure

    with progress_bar(quiet=quiet) as progress:
        if request is None:
            return _measure_objects(model, sample, loss, target, options, progress)
        with name_config_file(model):
            return measure(request.model_copy(update={"profiling": options}), progress)


def _measure_objects(
    model: str | None,
    sample: str | None,
    loss: str | None,
    target: str | None,
    options: ProfilingOptions,
    progress: ProgressCallback | None,
) -> Profile:
    """Measure a model built by the user's code, in this process."""
    if (loss is None) != (target is None):
        raise InvalidInput("--loss and --target must be given together")
    from ...profiler.machine.memory import keep_freed_memory
    from ...profiler.machine.provenance import check_device
    from ...profiler.measure.profile import profile

    # Before the user's code allocates anything, for the allocator's settings to apply.
    keep_freed_memory()
    device = check_device(options.device) if options.device else None
    module, inputs = load_model(model, sample)
    return profile(
        module.to(device) if device else module,
        inputs,
        options=options,
        loss_fn=None if loss is None else load_object(loss),
        target=None if target is None else call_object(target),
        progress=progress,
    )
