"""``stagewright estimate``: what each layer of a model would cost on a device that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..options.model import named_model, read_precision
from ..support.next_steps import command_line
from ..support.output import JsonFlag, check_writable, emit, profile_text, say, say_next, write_file
from ..support.read_documents import read_document


def command(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="A published model, such as gpt2-xl or llama-70b; with --config a family: mlp, "
            "resnet, unet, gpt2, llama, qwen2, mixtral, bert, t5 or vit.",
        ),
    ],
    device: Annotated[
        str, Option("--device", "-d", help="A device of the catalogue, such as H100 or RTX4090.")
    ],
    config: Annotated[str | None, Option(help="A family's configuration, as JSON.")] = None,
    microbatch: Annotated[int, Option(help="Samples in a micro-batch.")] = 1,
    sequence: Annotated[
        int | None,
        Option(help="Tokens of a sample; those of the model's publication if not given."),
    ] = None,
    precision: Annotated[
        str | None,
        Option(
            help="fp32, tf32, bf16 or fp16, of weights too. If not given bf16, on a GPU without "
            "it fp16, on a CPU fp32."
        ),
    ] = None,
    threads: Annotated[
        int | None, Option(help="CPU cores at work, with --device CPU; all if not given.")
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        Option(
            metavar="PROFILE",
            help="Calibrate by this measured profile of the same kind of device. May be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path, Option("--output", "-o", help="Write the profile to this file.")
    ] = Path("profile.json"),
    as_json: JsonFlag = False,
) -> None:
    """Estimate what each layer of a model costs on a device, without the device.

    The model is captured without its weights, so it need not fit here. The profile is labelled
    ESTIMATED and says how far such estimates were off where that was measured.
    """
    from ...core.cluster.accelerators import get_accelerator
    from ...core.profile.profile import Profile

    check_writable(output)
    wanted = read_precision(precision)
    spec, sample = named_model(model, config, microbatch, sequence)
    found = get_accelerator(device)
    measured = [read_document(path, Profile) for path in calibrate or ()]
    from ...profiler.estimates.estimate import estimate_spec

    profile = estimate_spec(
        spec, sample, device=found, precision=wanted, num_threads=threads, calibrate_by=measured
    )
    document = profile.to_json(indent=2)
    write_file(output, document + "\n")
    emit(document if as_json else profile_text(profile))
    say(f"wrote {output}", quiet=as_json)
    follow = command_line("plan", output, "--devices", f"4x{found.name}", "-o", "plan.json")
    say_next(follow, quiet=as_json)
