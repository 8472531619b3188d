"""``stagewright capture``: show how a model is split into layers, and what stays opaque."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from ...core.errors import InvalidInput
from ..options import model as flags
from ..options.model import read_named_request
from ..support.load_object import load_model
from ..support.named_models import name_config_file
from ..support.next_steps import command_line, drop_flags, suggest_measuring
from ..support.output import JsonFlag, check_writable, emit, say, say_next, write_file

if TYPE_CHECKING:
    from ...capture.captured import Captured
    from ...core.requests.requests import MeasureRequest


def command(
    context: Context,
    model: flags.Model = None,
    sample: flags.SampleObject = None,
    family: flags.Family = None,
    config: flags.Config = None,
    inputs: flags.Inputs = None,
    check: Annotated[
        bool, Option(help="Run two steps with the model and with its layers, and compare them.")
    ] = True,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Write the graph to this file.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show how a model is captured: its layers, its legal cuts and its opaque calls.

    Name the model in one of four ways: a function and --sample; --family, --config and --input;
    a .pt2 that torch.export.save wrote; or a JSON file with a request to measure.
    """
    check_writable(output)
    request = read_named_request(model, family, config, inputs, sample=sample)
    captured = _trace(request, model, sample, check)
    report = captured.report()
    emit(report.model_dump_json() if as_json else str(report))
    follow = _suggest_profiling(context.find_root().obj or ())
    if output is not None:
        write_file(output, captured.graph.to_json(indent=2) + "\n")
        say(f"wrote {output}", quiet=as_json)
        if captured.graph.rebuildable:
            follow = suggest_measuring(captured.graph, output)
    say_next(follow, quiet=as_json)


def _suggest_profiling(words: tuple[str, ...]) -> str:
    unwanted = ["--debug", "capture", "--check", "--no-check", "--json"]
    return command_line("profile", *drop_flags(words, unwanted, ["-o", "--output"]))


def _trace(
    request: MeasureRequest | None, model: str | None, sample: str | None, check: bool
) -> Captured:
    """Trace the model of a request, or one that code builds."""
    if request is None:
        module, inputs = load_model(model, sample)
    elif request.model is None or request.sample is None:
        raise InvalidInput(
            "the file already holds a captured graph; measure it with 'stagewright profile' or "
            "print it with 'stagewright show'"
        )
    else:
        from ...profiler.models.families import build_model, make_sample

        inputs, _ = make_sample(request.sample)
        with name_config_file(model):
            module = build_model(request.model)
    from ...capture.capture import trace

    return trace(module, inputs, check=check)
