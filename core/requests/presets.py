"""Published models by name: their families and configurations, from ``tables/published.json``.

A group of that table has a family, the configuration of all its models (``same``, and ``settings``
of a causal language model) and ``fields``. A model's row is its source, its tokens per sample, its
parameters (of image models: torchvision's), the values of the fields in their order and, for some,
settings of its own.

`tests/profiler/models/test_presets.py` compares what they build with the published numbers of
parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter

from ..errors import InvalidInput
from ..models.families import ModelSpec


@dataclass(frozen=True)
class Preset:
    """A published model.

    ``num_parameters`` is as published, or of the published checkpoint; tied weights count once.
    ``sequence_length`` is that of its training, in tokens, if the publication says.
    """

    spec: ModelSpec
    num_parameters: int
    source: str
    sequence_length: int | None = None


def find_preset(name: str) -> Preset:
    """Return the published model of a name or alias.

    Raises:
        InvalidInput: There is none; the message has the closest names.
    """
    found = PRESETS.get(ALIASES.get(name.lower(), name.lower()))
    if found is None:
        near = " or ".join(map(repr, get_close_matches(name.lower(), [*PRESETS, *ALIASES], n=3)))
        raise InvalidInput(
            f"unknown model {name!r}"
            + (f"; did you mean {near}?" if near else ".")
            + f" 'stagewright estimate --models' lists all {len(PRESETS)}"
        )
    return found


def _read_group(group: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[Preset]:
    """Yield the models of a group of the table."""
    spec: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)
    for source, sequence_length, num_parameters, values, *own in group["models"].values():
        config = group["same"] | dict(zip(group["fields"].split(), values, strict=True))
        settings = group.get("settings", {}) | (own[0] if own else {})
        if settings:
            config["settings"] = settings
        made = spec.validate_python({"family": group["family"], "config": config})
        yield Preset(made, num_parameters, sources[source], sequence_length)


_TABLE = json.loads(
    files(__package__).joinpath("tables", "published.json").read_text(encoding="utf-8")
)

PRESETS: dict[str, Preset] = {
    name: preset
    for group in _TABLE["groups"]
    for name, preset in zip(group["models"], _read_group(group, _TABLE["sources"]), strict=True)
}
"""Published models by name."""

ALIASES: dict[str, str] = _TABLE["aliases"]
"""Other names of published models."""
