"""What names a model on the command line: a function of one's own, a family, or a request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ...core.errors import InvalidInput
from ..support.load_object import call_target, load_target

if TYPE_CHECKING:
    from ...core.requests.requests import MeasureRequest

Model = Annotated[
    str | None,
    Argument(
        metavar="[MODEL]",
        help="package.module:function that returns the model, or a JSON file with a request or a "
        "captured graph.",
    ),
]
Sample = Annotated[
    str | None,
    Option(help="package.module:function that returns the inputs of one micro-batch."),
]
Family = Annotated[
    str | None,
    Option(
        help="Build the model by name instead: mlp, resnet, unet, gpt2, llama, qwen2, mixtral, "
        "bert, t5 or vit."
    ),
]
Config = Annotated[str | None, Option(help="The family's configuration, as JSON.")]
Inputs = Annotated[
    list[str] | None,
    Option("--input", help="NAME=SHAPE:DTYPE:FILL, e.g. input=8x64; may be repeated."),
]


def request_named(
    model: str | None,
    family: str | None,
    config: str | None,
    inputs: list[str] | None,
    target: str | None = None,
    **objects: str | None,
) -> MeasureRequest | None:
    """The model as data, if it is a family or in a file; `None` for one that code makes.

    Args:
        model: The argument.
        family: ``--family``.
        config: ``--config``.
        inputs: Every ``--input``.
        target: ``--target``, which a family takes, too.
        objects: Options that name objects in code, by name; a model that is data takes none.

    Raises:
        InvalidInput: What was given does not go together, or cannot be read.
    """
    from .measure import family_request, read_request

    in_code = {f"--{name}": value for name, value in objects.items()}
    as_data = {"--config": config, "--input": inputs}
    if family is not None:
        refuse("--family", {"MODEL": model, **in_code})
        return family_request(family, "{}" if config is None else config, inputs or [], target)
    if model is not None and model.endswith(".json"):
        refuse("a request file", {**in_code, "--target": target, **as_data})
        return read_request(Path(model))
    refuse("a model of your own", as_data)
    return None


def own_model(model: str | None, sample: str | None) -> tuple[Any, Any]:
    """The module and the sample that functions in somebody's code return; or a module there.

    Raises:
        InvalidInput: One is not named, fails, or is something else.
    """
    if model is None or sample is None:
        raise InvalidInput(
            "name a model and its sample (MODEL --sample package.module:function), "
            "a --family, or a JSON file"
        )
    module = load_target(model)
    if isinstance(module, type) or not hasattr(module, "named_parameters"):
        module = call_target(model)
    if not hasattr(module, "named_parameters"):
        raise InvalidInput(f"{model} returned a {type(module).__name__}, not a torch.nn.Module")
    return module, call_target(sample)


def refuse(with_what: str, options: dict[str, Any]) -> None:
    """Insist that none of these options was given: they would be ignored.

    Raises:
        InvalidInput: One was.
    """
    for name, value in options.items():
        if value is not None and value != []:
            raise InvalidInput(f"{name} does not go together with {with_what}")
