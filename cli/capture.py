"""``stagewright capture``: how a model is taken apart into layers, and what stays as written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ..core.errors import InvalidInput
from .output import JsonFlag, check_writable, emit, say, write_file

if TYPE_CHECKING:
    from ..capture.captured import Captured


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
    family: Annotated[
        str | None,
        Option(
            help="Build the model by name instead: mlp, resnet, unet, gpt2, llama, qwen2, mixtral, "
            "bert, t5 or vit."
        ),
    ] = None,
    config: Annotated[str | None, Option(help="The family's configuration, as JSON.")] = None,
    inputs: Annotated[
        list[str] | None,
        Option("--input", help="NAME=SHAPE:DTYPE:FILL, e.g. input=8x64; may be repeated."),
    ] = None,
    check: Annotated[
        bool, Option(help="Take two steps with the model and with its layers, and compare.")
    ] = True,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Write the graph to this file.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show how a model is captured: its layers, where it may be cut, what stays as written.

    Give the model one of three ways: a function and --sample; --family, --config and --input; or
    a JSON file with a request to measure.
    """
    if output is not None:
        check_writable(output)
    captured = _captured(model, sample, family, config, inputs, check)
    report = captured.report()
    emit(report.model_dump_json() if as_json else str(report))
    if output is not None:
        write_file(output, captured.graph.to_json(indent=2) + "\n")
        say(f"wrote {output}", quiet=as_json)


def _captured(
    model: str | None,
    sample: str | None,
    family: str | None,
    config: str | None,
    inputs: list[str] | None,
    check: bool,
) -> Captured:
    from .measure_request import family_request, read_request

    if family is not None:
        _refuse("--family", {"MODEL": model, "--sample": sample})
        request = family_request(family, "{}" if config is None else config, inputs or [], None)
        return _of_request(request, check)
    _refuse("a model of your own", {"--config": config, "--input": inputs})
    if model is not None and model.endswith(".json"):
        _refuse("a request file", {"--sample": sample})
        return _of_request(read_request(Path(model)), check)
    if model is None or sample is None:
        raise InvalidInput(
            "name a model and its sample (MODEL --sample package.module:function), "
            "a --family, or a JSON file"
        )
    from .targets import call_target

    module = call_target(model)
    if not hasattr(module, "named_parameters"):
        raise InvalidInput(f"{model} returned a {type(module).__name__}, not a torch.nn.Module")
    from ..capture.capture import trace

    return trace(module, call_target(sample), check=check)


def _of_request(request: Any, check: bool) -> Captured:
    from ..capture.capture import trace
    from ..profiler.models.families import build_model, make_sample

    inputs, _ = make_sample(request.sample)
    return trace(build_model(request.model), inputs, check=check)


def _refuse(with_what: str, options: dict[str, object]) -> None:
    """Insist that none of these options was given: they would be ignored."""
    for name, value in options.items():
        if value is not None and value != []:
            raise InvalidInput(f"{name} does not go together with {with_what}")
