"""Settings of Megatron's scripts, and of NeMo's configurations, that say how a model is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ...core.errors import InvalidInput

RANKS = "pipeline-model-parallel-size"
GROUP = "microbatch-group-size-per-virtual-pipeline-stage"

NUMBERS = (
    "num-layers",
    RANKS,
    "virtual-pipeline-model-parallel-size",
    "num-virtual-stages-per-pipeline-rank",
    "num-layers-per-virtual-pipeline-stage",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "micro-batch-size",
    "global-batch-size",
    GROUP,
)
"""Settings with a number that are read; NeMo writes them with underscores."""

ALIASES = {
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "microbatch-group-size-per-vp-stage": GROUP,
}
"""Names of the same settings in megatron-core's configuration."""

SWITCHES = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")

_SETTING = re.compile(r"(?<![\w-])(?:--)?([a-z][a-z-]*[a-z])[\"']?[\s=:]+[\"']?(\d{1,7})\b")
_SWITCH = re.compile(rf"\b({'|'.join(SWITCHES)})\b[\"']?(?:[\s=:]+(true|false)\b)?", re.IGNORECASE)
_VARIABLE = re.compile(
    r"^\s*(?:export\s+)?(\w+)=[\"']?(\d{1,7})[\"']?\s*(?:[;#].*)?$", re.MULTILINE
)
_USE = re.compile(r"\$\{?(\w+)(?::-(\d{1,7})\})?\}?")


def fill_variables(text: str) -> str:
    """Return a shell script with the numbers of its variables where they are used."""
    values = dict(_VARIABLE.findall(text))
    return _USE.sub(lambda use: values.get(use[1]) or use[2] or use[0], text)


def read_settings(content: str) -> dict[str, int]:
    """Return the settings of `NUMBERS` and, as 1, of `SWITCHES` that a text has."""
    plain = content.replace("_", "-")
    found = {ALIASES.get(name, name): int(value) for name, value in _SETTING.findall(plain)}
    on = {name.lower(): 1 for name, value in _SWITCH.findall(plain) if value.lower() != "false"}
    return {name: value for name, value in found.items() if name in NUMBERS} | on


def list_read(settings: Mapping[str, int]) -> Iterator[str]:
    """Yield a note on the settings that were read."""
    named = (f"--{name}" + f" {value}" * (name not in SWITCHES) for name, value in settings.items())
    if settings:
        yield f"read {', '.join(named)}"


def split_by_settings(settings: Mapping[str, int], num_blocks: int) -> list[int]:
    """Return the blocks of each stage, in model order, that megatron-core builds without a layout.

    The rules of get_num_layers_to_build of megatron-core 0.16.1: equal numbers for every rank and
    chunk, but for the first and last ranks where they are given, or with the embedding and the
    loss counted as a block each.

    Raises:
        InvalidInput: The numbers do not divide, where Megatron stops.
    """
    num_layers = settings.get("num-layers", num_blocks)
    ranks = settings[RANKS]
    chunks = count_chunks(settings, num_layers) if ranks > 1 else 1
    first = settings.get("decoder-first-pipeline-num-layers")
    last = settings.get("decoder-last-pipeline-num-layers")
    counted = [settings.get(name, 0) for name in SWITCHES]
    given = [number for number in (first, last) if number is not None]
    if given and any(counted):
        raise InvalidInput(f"Megatron takes --{SWITCHES[0]} and the like without first and last")
    left = ranks - len(given)
    shared = num_layers + sum(counted) - sum(given)
    if left < 0 or shared < 0 or (shared % left if left else shared):
        raise InvalidInput(
            f"{shared} blocks are no multiple of {left} ranks, which Megatron refuses; give "
            "--decoder-first-pipeline-num-layers or --pipeline-model-parallel-layout"
        )
    of_rank = [shared // left if left else 0] * ranks
    if first is not None:
        of_rank[0] = first
    if last is not None:
        of_rank[-1] = last
    uneven = next((number for number in of_rank if number % chunks), None)
    if uneven is not None:
        raise InvalidInput(f"{uneven} blocks of a rank are no multiple of its {chunks} stages")
    counts = [number // chunks for _ in range(chunks) for number in of_rank]
    counts[0] -= counted[0]
    counts[-1] -= counted[1]
    if min(counts) < 0:
        raise InvalidInput(f"{num_layers} blocks are too few for {len(counts)} stages")
    return counts


def count_chunks(settings: Mapping[str, int], num_layers: int) -> int:
    """Return the virtual stages of a rank."""
    for name in ("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"):
        if name in settings:
            return max(1, settings[name])
    share = settings.get("num-layers-per-virtual-pipeline-stage")
    return max(1, num_layers // settings[RANKS] // share) if share else 1
