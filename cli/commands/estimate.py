"""``stagewright estimate``: estimate a model's layer costs on a device that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from ..options.model import FAMILIES, Config
from ..support.named_models import estimate_on_device, name_config_file, read_model, read_precision
from ..support.output import JsonFlag, NoCacheFlag, check_writable, emit, finish_profile
from ..support.read_documents import read_document


def list_models(is_asked: bool) -> None:
    """Print every published model's name and parameters, and end the command."""
    if not is_asked:
        return
    from ...core.requests.presets import PRESETS
    from ...core.text_table import format_table

    rows = [
        (name, f"{preset.num_parameters / 1e9:,.2f}", preset.spec.family)
        for name, preset in PRESETS.items()
    ]
    emit(format_table([("model", "10^9 parameters", "family"), *rows]))
    raise Exit


Models = Annotated[
    bool,
    Option(
        "--models",
        is_eager=True,
        callback=list_models,
        help="List the published models by name, and exit.",
    ),
]


def command(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="A published model, such as gpt2-xl or llama-70b; with --config, a family: "
            f"{FAMILIES}.",
        ),
    ],
    device: Annotated[
        str,
        Option("--device", "-d", help="Accelerator from the catalogue, such as H100 or RTX4090."),
    ],
    config: Config = None,
    microbatch: Annotated[int, Option(help="Samples in a micro-batch.")] = 1,
    sequence: Annotated[
        int | None, Option(help="Tokens per sample. Default: the model's published length.")
    ] = None,
    precision: Annotated[
        str | None,
        Option(
            help="Precision of weights, gradients and activations: fp32, tf32, bf16 or fp16. "
            "Default: bf16, or fp16 on GPUs without it, or fp32 on CPUs."
        ),
    ] = None,
    threads: Annotated[
        int | None, Option(help="CPU cores to use, with --device CPU. Default: all.")
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        Option(
            metavar="PROFILE",
            help="Calibrate with this measured profile of the same kind of device. Repeatable.",
        ),
    ] = None,
    output: Annotated[
        Path, Option("--output", "-o", help="Write the profile to this file.")
    ] = Path("profile.json"),
    no_cache: NoCacheFlag = False,
    models: Models = False,
    as_json: JsonFlag = False,
) -> None:
    """Estimate what each layer of a model costs on a device that is not available here.

    The model is captured without weights, so it need not fit into this machine's memory. The
    profile is labelled ESTIMATED and reports the error of such estimates where it was measured.
    """
    from ...core.cluster.accelerators import get_accelerator
    from ...core.profile.profile import Profile

    check_writable(output)
    dtype = read_precision(precision)
    spec, sample = read_model(model, config, microbatch, sequence)
    target = get_accelerator(device)
    measured = [read_document(path, Profile) for path in calibrate or ()]
    with name_config_file(model if config is None else None):
        profile = estimate_on_device(
            spec, sample, target, dtype, threads, measured, use_cache=not no_cache
        )
    finish_profile(profile, output, as_json=as_json)
