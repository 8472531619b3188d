"""What names a model on the command line: a function of one's own, a family, or a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ...core.errors import InvalidInput
from ..support.load_object import call_target, load_target

if TYPE_CHECKING:
    from ...core.cluster.accelerators import Precision
    from ...core.graph.sample import Sample
    from ...core.models.families import ModelSpec
    from ...core.requests.requests import MeasureRequest


Model = Annotated[
    str | None,
    Argument(
        metavar="[MODEL]",
        help="package.module:function that returns the model, or a JSON file with a request or a "
        "captured graph.",
    ),
]
SampleObject = Annotated[
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


def model_named(arguments: Sequence[str]) -> str | None:
    """The model, if that is what was named; `None` for files.

    Raises:
        InvalidInput: Several names, or a name that is neither a file nor a model.
    """
    names = [text for text in arguments if not _is_file(text)]
    if not names:
        return None
    if len(arguments) > 1:
        raise InvalidInput(
            f"{names[0]!r} is no file; give either one model's name or profile files"
        )
    return names[0]


def is_stored_id(name: str) -> bool:
    """Whether it is how a service names a profile or a graph, and no model's name."""
    return name.startswith(("profile_", "graph_"))


def _is_file(text: str) -> bool:
    return Path(text).suffix in (".json", ".pt2") or "/" in text or Path(text).exists()


def named_model(
    name: str, config: str | None, microbatch: int, sequence: int | None
) -> tuple[ModelSpec, Sample]:
    """A model and one micro-batch of it.

    Args:
        name: Of a published model, or of a family.
        config: The family's configuration as JSON; its defaults if not given.
        microbatch: Samples in a micro-batch.
        sequence: Tokens of a sample; those of the publication if not given.

    Raises:
        InvalidInput: There is no such model, or a number does not fit it.
    """
    from ...core.models.families import ModelSpec
    from ...core.requests.default_samples import default_sample
    from ...core.requests.presets import find_preset
    from ..support.validation import checked_json

    if microbatch < 1:
        raise InvalidInput(f"--microbatch is {microbatch}; a micro-batch has at least one sample")
    if sequence is not None and sequence < 1:
        raise InvalidInput(f"--sequence is {sequence}; a sample has at least one token")
    if config is None:
        found = find_preset(name)
        spec, length = found.spec, found.sequence_length
    else:
        try:
            text = json.dumps({"family": name, "config": json.loads(config)})
        except ValueError as error:
            raise InvalidInput(f"--config is not JSON: {error}") from None
        spec, length = checked_json(ModelSpec, text, "model"), None
    return spec, default_sample(spec, microbatch, sequence or length)


PRECISIONS: dict[str, Precision] = {
    "fp32": "float32",
    "tf32": "tf32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def read_precision(text: str | None) -> Precision | None:
    """The precision by either name, such as ``bf16`` or ``bfloat16``; `None` for `None`.

    Raises:
        InvalidInput: There is none of that name.
    """
    if text is None:
        return None
    for short, precision in PRECISIONS.items():
        if text.lower() in (short, precision):
            return precision
    raise InvalidInput(
        f"--precision takes {', '.join(PRECISIONS)}, not {text!r}", field="/precision"
    )


def long_name(text: str | None) -> str | None:
    """A dtype's name in torch for its short one; what is neither stays as it is."""
    return text if text is None else PRECISIONS.get(text.lower(), text)
