"""``stagewright profile``: measure what each layer of a model costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ..core.errors import InvalidInput
from .output import JsonFlag, check_writable, emit, say, say_next, write_file

if TYPE_CHECKING:
    from ..core.options import MeasureRequest, ProfilingOptions
    from ..core.profile import Profile
    from ..core.progress import Progress

SHORT_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
LINKS = "Links between devices"
DEFAULT_OUTPUT = Path("profile.json")


def command(
    model: Annotated[
        str | None,
        Argument(
            metavar="[MODEL]",
            help="package.module:function that returns the model, or a JSON file with a request.",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        Option(help="package.module:function that returns the inputs of one micro-batch."),
    ] = None,
    loss: Annotated[
        str | None, Option(help="package.module:function of output and target; the loss.")
    ] = None,
    target: Annotated[
        str | None,
        Option(help="package.module:function that returns the target; with --family a tensor."),
    ] = None,
    family: Annotated[
        str | None, Option(help="Build the model by name instead: mlp, resnet, unet or gpt2.")
    ] = None,
    config: Annotated[str | None, Option(help="The family's configuration, as JSON.")] = None,
    inputs: Annotated[
        list[str] | None,
        Option("--input", help="NAME=SHAPE:DTYPE:FILL, e.g. input=8x64; may be repeated."),
    ] = None,
    device: Annotated[
        str | None, Option(help="cpu, cuda or cuda:N; the model is moved there.")
    ] = None,
    threads: Annotated[int | None, Option(help="CPU threads of the measured model.")] = None,
    neighbours: Annotated[
        int | None, Option(help="Processes kept busy alike on other cores meanwhile.")
    ] = None,
    budget: Annotated[float | None, Option(help="Seconds to spend on repeats.")] = None,
    autocast: Annotated[str | None, Option(help="Run under torch.autocast: bf16 or fp16.")] = None,
    compiled: Annotated[
        bool | None,
        Option("--compile/--no-compile", help="Compile every layer with torch.compile first."),
    ] = None,
    deduplicate: Annotated[
        bool | None,
        Option(
            "--deduplicate/--no-deduplicate",
            help="Measure one of the layers that do the same, or each.",
        ),
    ] = None,
    links: Annotated[
        bool,
        Option(
            "--links",
            help="Measure the links between devices instead; no model.",
            rich_help_panel=LINKS,
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        Option(
            min=2, help="CPU ranks to start, instead of a rank a device.", rich_help_panel=LINKS
        ),
    ] = None,
    timeout: Annotated[
        float,
        Option(min=1, help="Seconds a rank waits for another.", rich_help_panel=LINKS),
    ] = 60.0,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="Write the result to this file: profile.json, or cluster.json with --links.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what each layer of a model costs, for one micro-batch; or links between devices.

    Give the model one of three ways: a function and --sample, with --loss and --target if the
    backward is to start from a loss; --family, --config and --input; or a JSON file.
    With --links: between the devices of this machine, or, started by torchrun, between all ranks.
    """
    if links:
        from .profile_links import DEFAULT_OUTPUT as CLUSTER
        from .profile_links import profile_links

        of_models: dict[str, object] = {
            "MODEL": model, "--sample": sample, "--loss": loss, "--target": target,
            "--family": family, "--config": config, "--input": inputs, "--threads": threads,
            "--neighbours": neighbours, "--autocast": autocast, "--compile": compiled,
            "--deduplicate": deduplicate,
        }  # fmt: skip
        _refuse("--links", of_models)
        profile_links(
            ranks=ranks,
            device=device,
            budget_s=budget,
            timeout_s=timeout,
            output=output or CLUSTER,
            as_json=as_json,
        )
        return
    _refuse("a model; it is for --links", {"--ranks": ranks})
    output = output or DEFAULT_OUTPUT
    from ..core.options import ProfilingOptions
    from ..profiler.child import measure
    from .measure_request import family_request, read_request, with_options
    from .profile_table import profile_table
    from .progress import progress_bar

    check_writable(output)
    given = {
        "device": device,
        "num_threads": threads,
        "busy_neighbours": neighbours,
        "budget_s": budget,
        "autocast": SHORT_TYPES.get(autocast or "", autocast),
        "compile": compiled,
        "deduplicate": deduplicate,
    }
    request: MeasureRequest | None = None
    if family is not None:
        _refuse("--family", {"MODEL": model, "--sample": sample, "--loss": loss})
        request = family_request(family, "{}" if config is None else config, inputs or [], target)
    elif model is not None and model.endswith(".json"):
        objects = {"--sample": sample, "--loss": loss, "--target": target}
        _refuse("a request file", {**objects, "--config": config, "--input": inputs})
        request = read_request(Path(model))
    else:
        _refuse("a model of your own", {"--config": config, "--input": inputs})
    with progress_bar(quiet=as_json) as progress:
        if request is not None:
            options = with_options(request.profiling, **given)
            profile = measure(request.model_copy(update={"profiling": options}), progress)
        else:
            options = with_options(ProfilingOptions(), **given)
            profile = _measure_objects(model, sample, loss, target, options, progress)
    document = profile.to_json(indent=2)
    write_file(output, document + "\n")
    emit(document if as_json else profile_table(profile))
    say(f"wrote {output}", quiet=as_json)
    say_next(f"stagewright plan {output} --devices 4x24GB -o plan.json", quiet=as_json)


def _refuse(with_what: str, options: dict[str, object]) -> None:
    """Insist that none of these options was given: they would be ignored."""
    for name, value in options.items():
        if value is not None and value != []:
            raise InvalidInput(f"{name} does not go together with {with_what}")


def _measure_objects(
    model: str | None,
    sample: str | None,
    loss: str | None,
    target: str | None,
    options: ProfilingOptions,
    progress: Progress | None,
) -> Profile:
    from .targets import call_target, load_target

    if model is None or sample is None:
        raise InvalidInput(
            "name a model and its sample (MODEL --sample package.module:function), "
            "a --family, or a JSON file"
        )
    if (loss is None) != (target is None):
        raise InvalidInput("--loss and --target go together")
    from ..profiler.machine.allocator import keep_freed_memory
    from ..profiler.machine.devices import check_device
    from ..profiler.measure.profile import profile

    keep_freed_memory()
    device = check_device(options.device) if options.device else None
    module = call_target(model)
    if not hasattr(module, "named_parameters"):
        raise InvalidInput(f"{model} returned a {type(module).__name__}, not a torch.nn.Module")
    return profile(
        module.to(device) if device else module,
        call_target(sample),
        options=options,
        loss_fn=None if loss is None else load_target(loss),
        target=None if target is None else call_target(target),
        progress=progress,
    )
