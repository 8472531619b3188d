"""Flags that name a model: as Python code, as a model family, or as a request in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ..support.load_object import refuse_options

if TYPE_CHECKING:
    from ...core.requests.requests import MeasureRequest


Model = Annotated[
    str | None,
    Argument(
        metavar="MODEL",
        help="package.module:function that returns the model, a .pt2 of torch.export.save, or a "
        "JSON file with a request, a captured graph or a Hugging Face configuration (or the folder "
        "of its config.json).",
    ),
]
SampleObject = Annotated[
    str | None, Option(help="package.module:function that returns the inputs of one micro-batch.")
]
FAMILIES = "mlp, resnet, unet, gpt2, llama, qwen2, mixtral, causal_lm, bert, t5 or vit"
Family = Annotated[str | None, Option(help=f"Build a model of this family instead: {FAMILIES}.")]
Config = Annotated[str | None, Option(help="The family's configuration, as JSON.")]
Inputs = Annotated[
    list[str] | None, Option("--input", help="NAME=SHAPE:DTYPE:FILL, e.g. input=8x64. Repeatable.")
]


def read_named_request(
    model: str | None,
    family: str | None,
    config: str | None,
    inputs: list[str] | None,
    target: str | None = None,
    **code_options: str | None,
) -> MeasureRequest | None:
    """Return the request if the model is a family or in a file; `None` if code builds it.

    ``code_options`` are the values of options that name Python objects, refused in either case.
    """
    from .measure import build_family_request, read_request  # imports pydantic

    in_code = {f"--{name}": value for name, value in code_options.items()}
    as_data = {"--config": config, "--input": inputs}
    if family is not None:
        refuse_options("--family", {"MODEL": model, **in_code})
        return build_family_request(
            family, "{}" if config is None else config, inputs or [], target
        )
    if model is not None and (model.endswith(".json") or Path(model).is_dir()):
        refuse_options("a request file", {**in_code, "--target": target, **as_data})
        return read_request(Path(model))
    refuse_options("a model built by your own code", as_data)
    return None
