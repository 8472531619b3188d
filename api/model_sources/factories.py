"""Model factories that the operator registered by name.

The file is TOML; a name stands for an import, alone or with a schema of its arguments::

    resnet50 = "corp_models.vision:resnet50"

    [ranker]
    import = "corp_models.ranking:Ranker"
    path = ["/srv/models"]
    description = "The ranking model."

    [ranker.arguments.properties]
    num_layers = { type = "integer", minimum = 1, maximum = 48 }

``arguments`` is a JSON Schema (draft 2020-12) of an object; properties it does not name are
rejected unless it allows them. Without a schema a factory takes no arguments.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from ...core.document import Record, json_pointer
from ...core.errors import InvalidInput
from ...core.requests.requests import FactoryCall

MAX_ARGUMENT_BYTES = 2**16

TARGET = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class Factory(Record):
    """A registered factory.

    Attributes:
        target: ``package.module:callable``, imported only in the measuring child.
        path: Folders added to Python's import path.
        description: Shown to clients.
        arguments: JSON Schema of its keyword arguments.
    """

    target: str = Field(alias="import", pattern=TARGET)
    path: tuple[str, ...] = ()
    description: str = Field("", max_length=500)
    arguments: dict[str, JsonValue] = Field(default_factory=dict)

    def schema_of_arguments(self) -> dict[str, JsonValue]:
        """Return the schema completed: an object without additional properties."""
        return {"type": "object", "additionalProperties": False, **self.arguments}


Factories = Mapping[str, Factory]


def read_factories(file: Path | None) -> Factories:
    """Read the factories registered in a file, if there is one, or raise `InvalidInput`."""
    if file is None:
        return {}
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the factories in {file} cannot be read: {error}") from None
    return {name: _factory(name, value, file) for name, value in read.items()}


def check_call(call: FactoryCall, factories: Factories) -> None:
    """Raise `InvalidInput` unless a factory is registered and its arguments match the schema."""
    import jsonschema

    factory = factories.get(call.name)
    if factory is None:
        known = ", ".join(sorted(factories)) or "none"
        raise InvalidInput(
            f"no factory {call.name!r} is registered on this server; it has: {known}",
            field="/factory/name",
        )
    if len(call.model_dump_json()) > MAX_ARGUMENT_BYTES:
        raise InvalidInput(
            f"the arguments are over {MAX_ARGUMENT_BYTES} bytes of JSON", field="/factory/arguments"
        )
    validator = jsonschema.Draft202012Validator(factory.schema_of_arguments())
    for error in validator.iter_errors(call.arguments):
        where = json_pointer(tuple(error.absolute_path))
        raise InvalidInput(error.message, field=f"/factory/arguments{where}")


def _factory(name: str, value: Any, file: Path) -> Factory:
    import jsonschema

    try:
        # Requests name factories by this model; a name that it refuses could never be called.
        FactoryCall(name=name)
        factory = Factory.model_validate({"import": value} if isinstance(value, str) else value)
        jsonschema.Draft202012Validator.check_schema(factory.schema_of_arguments())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"invalid factory {name!r} in {file}: {where}: {first['msg']}") from None
    except jsonschema.SchemaError as error:
        raise InvalidInput(
            f"the arguments of factory {name!r} in {file} are not a JSON Schema: {error.message}"
        ) from None
    return factory
