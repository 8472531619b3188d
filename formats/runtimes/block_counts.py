"""Lists of block counts, the form that most inference runtimes take a cut in."""

from __future__ import annotations

import re
from collections.abc import Callable

from ...core.errors import InvalidInput
from ..settings import Settings
from ..target import ImportedCut, ModelLayers

_BARE = re.compile(r"[\s\[\"']*(\d[\d, \t]*)")

MOST_SHOWN = 80
"""Characters of a text that an error shows."""


def parse_counts(text: str, example: str) -> tuple[int, ...]:
    """Parse ``17,20,3``, perhaps with brackets, quotes and ``NAME=`` in front.

    ``example`` is in the runtime's own form, for the message of an error.

    Raises:
        InvalidInput: Something else is there, or nothing.
    """
    content = " ".join(text.split()).removeprefix("export ")
    content = re.sub(r"^[A-Za-z_][A-Za-z0-9_]*\s*[=:]\s*", "", content).strip("[](){}\"' ")
    parts = [part.strip() for part in content.removesuffix(",").split(",")]
    if not parts or not all(re.fullmatch(r"\d{1,6}", part) for part in parts):
        raise InvalidInput(
            f"expected whole numbers separated by commas, such as {example}; "
            f"found {content[:MOST_SHOWN]!r}"
        )
    return tuple(map(int, parts))


def read_counts(
    settings: Settings,
    layers: ModelLayers,
    *,
    form: str,
    default: Callable[[int, int], tuple[int, ...]],
    chunks: int = 1,
) -> ImportedCut:
    """Read a cut given as numbers of blocks of its stages, by the setting of ``form`` or alone.

    Settings of a runtime without that one leave the cut to it: ``default`` is its own.

    Raises:
        InvalidInput: There are no such numbers, or another number of them than of stages.
    """
    setting, stages = re.split("[=:]", form)[0], (settings.pipeline or 1) * chunks
    given = find_setting(settings.text, setting) or settings.words.get(
        setting.lower().replace("_", "-")
    )
    if given is None and settings.written and (bare := _BARE.match(settings.text)):
        given = bare[1]
    if given is None and settings.written:
        return layers.cut_by_blocks(default(layers.stack.num_blocks, stages))
    counts = parse_counts(given or settings.text, form)
    if settings.pipeline and len(counts) != stages:
        raise InvalidInput(
            f"{setting} has {len(counts)} numbers, but the settings are of {stages} stages "
            f"({', '.join(settings.written.values())}); give {stages} numbers, or a pipeline of "
            f"{len(counts) / chunks:g}"
        )
    return layers.cut_by_blocks(counts)


def find_setting(text: str, setting: str) -> str | None:
    """Return the list that a setting has in a script, JSON or YAML; `None` if it has none.

    YAML also writes a list as a line with a dash for each entry.
    """
    one_line = r"[\"'\[]?\s*(\d[\d, \t]*)"
    found = re.search(rf"\b{setting}[\"']?\s*[:=]\s*(?:{one_line}|((?:-\s*\d+\s*)+))", text)
    return found and (found[1] or ",".join(re.findall(r"\d+", found[2])))


def split_evenly(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return equal counts, the first stages with one more if they cannot be equal."""
    share, rest = divmod(num_blocks, num_stages)
    return tuple(share + (index < rest) for index in range(num_stages))


def split_equally(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return equal counts; none if there are no equal ones, which the runtime then refuses."""
    return () if num_blocks % num_stages else (num_blocks // num_stages,) * num_stages
