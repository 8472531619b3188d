"""Lists of block counts, the form that most inference runtimes take a cut in."""

from __future__ import annotations

import re

from ...core.errors import InvalidInput
from ..target import ImportedCut, ModelLayers


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse ``17,20,3``, perhaps with brackets, quotes, ``NAME=`` in front and ``#`` comments.

    Raises:
        InvalidInput: Something else is there, or nothing.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    content = " ".join(line for line in lines if line)
    content = content.removeprefix("export ").strip()
    content = re.sub(r"^[A-Za-z_][A-Za-z0-9_]*\s*[=:]\s*", "", content).strip("[](){}\"' ")
    parts = [part.strip() for part in content.removesuffix(",").split(",")]
    if not parts or not all(re.fullmatch(r"\d{1,6}", part) for part in parts):
        raise InvalidInput(
            f"expected numbers of blocks separated by commas, such as 17,20,3; found {content!r}"
        )
    return tuple(map(int, parts))


def read_counts(text: str, layers: ModelLayers, chunks: int = 1) -> ImportedCut:
    """Read a cut given as numbers of blocks of its stages."""
    stages = layers.from_block_counts(parse_counts(text))
    return ImportedCut(stages, len(layers.names), chunks=chunks)


def split_evenly(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return equal counts, the first stages with one more if they cannot be equal."""
    share, rest = divmod(num_blocks, num_stages)
    return tuple(share + (index < rest) for index in range(num_stages))
