"""Models named on the command line instead of a profile: which they are, and a sample of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import InvalidInput

if TYPE_CHECKING:
    from ...core.graph.sample import Sample
    from ...core.models.families import ModelSpec


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
    from ...core.requests.presets import preset
    from ..support.validation import checked_json

    if microbatch < 1:
        raise InvalidInput(f"--microbatch is {microbatch}; a micro-batch has at least one sample")
    if sequence is not None and sequence < 1:
        raise InvalidInput(f"--sequence is {sequence}; a sample has at least one token")
    if config is None:
        found = preset(name)
        spec, length = found.spec, found.sequence_length
    else:
        try:
            text = json.dumps({"family": name, "config": json.loads(config)})
        except ValueError as error:
            raise InvalidInput(f"--config is not JSON: {error}") from None
        spec, length = checked_json(ModelSpec, text, "model"), None
    return spec, default_sample(spec, microbatch, sequence or length)
