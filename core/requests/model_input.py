"""The forms in which a request may name a model: a family, a published model, a ``config.json``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, JsonValue, TypeAdapter, ValidationError

from ..document import Name
from ..errors import InvalidInput
from ..models.families import ModelSpec
from ..validation_words import describe_violation
from .default_samples import default_sample
from .hugging_face import read_hugging_face_config
from .presets import find_preset

_SPEC: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)


def is_shorthand(model: object) -> bool:
    """Return True for the name of a published model, and for a Hugging Face ``config.json``."""
    return isinstance(model, str) or (isinstance(model, dict) and "model_type" in model)


def read_model(model: object) -> object:
    """Return the family and configuration that shorthand stands for; anything else unchanged.

    Raises:
        InvalidInput: There is no such model, or this release does not build it.
    """
    if not is_shorthand(model):
        return model
    if isinstance(model, str):
        return find_preset(model[:200]).spec
    assert isinstance(model, dict), "shorthand is a name or a config.json"
    try:
        return _SPEC.validate_python(read_hugging_face_config(model))
    except ValidationError as error:
        first = error.errors()[0]
        # The last part is a key, or "config" where several keys do not go together; "settings" is
        # not in the file, and "[key]" stands for a key that is refused itself.
        *_, name = (part for part in first["loc"] if part not in ("settings", "[key]"))
        place = "" if name == "config" else f"/{name}"
        message = f"Hugging Face config{place}: {describe_violation(first)}"
        raise InvalidInput(message, field=place) from None


ModelInput = Annotated[
    ModelSpec,
    BeforeValidator(read_model, json_schema_input_type=ModelSpec | Name | dict[Name, JsonValue]),
]
"""A family and its configuration, the name of a published model such as ``gpt2-xl``, or a Hugging
Face ``config.json``."""


def expand_model(request: Any) -> Any:
    """Return a request as parsed, with the family that its model stands for and a sample of it.

    Without a sample it gets the family's usual one, that of a published model with as many tokens
    as in its training. A model that is wrong is left for validation.
    """
    model = request.get("model") if isinstance(request, dict) else None
    if model is None:
        return request
    try:
        spec = _SPEC.validate_python(read_model(model))
        length = find_preset(model).sequence_length if isinstance(model, str) else None
        usual = default_sample(spec, 1, length)
    except (InvalidInput, ValidationError):
        return request
    sample = request.get("sample")
    return {**request, "model": spec, "sample": usual if sample is None else sample}
