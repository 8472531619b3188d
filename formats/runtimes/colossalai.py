"""Colossal-AI: blocks of each stage in the arguments of its hybrid plugin."""

from __future__ import annotations

import re
from dataclasses import replace

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.plan.schedule import ScheduleName
from ..target import (
    Export,
    ImportedCut,
    ModelLayers,
    Target,
    TargetRules,
    count_blocks,
    count_ranks,
    list_devices,
    write_header,
)
from .block_counts import read_counts, split_evenly

TITLE = "Colossal-AI"
CHECKED = (
    "the grammar of booster/plugin/hybrid_parallel_plugin.py and pipeline/stage_manager.py of "
    "Colossal-AI 0.5.0, not run"
)
STYLES: dict[ScheduleName, str] = {"1f1b": "1f1b", "interleaved_1f1b": "interleaved", "zbv": "zbv"}
"""Names of its schedules."""


def write(plan: Plan) -> Export:
    """Write a ``HybridParallelPlugin`` with ``num_layers_per_stage``."""
    counts = count_blocks(plan)
    places = count_ranks(plan)
    arguments = [
        "    tp_size=1,",
        f"    pp_size={places},",
        f"    num_microbatches={plan.num_microbatches},",
        f'    pp_style="{STYLES[plan.schedule]}",',
        f"    num_model_chunks={plan.chunks},",
        f"    num_layers_per_stage={list(counts)},",
    ]
    header = write_header(
        plan, TITLE, CHECKED, "Use: Booster(plugin=plugin).", f"{list_devices(plan)}."
    )
    lines = (
        "from colossalai.booster.plugin import HybridParallelPlugin",
        "",
        "plugin = HybridParallelPlugin(",
        *arguments,
        ")",
    )
    return Export(header + "\n".join(lines) + "\n")


def read(text: str, layers: ModelLayers) -> ImportedCut:
    """Read ``num_layers_per_stage`` and ``num_model_chunks``, or numbers alone."""
    chunks = re.search(r"num_model_chunks\s*=\s*(\d{1,2})", text)
    setting = "num_layers_per_stage"
    cut = read_counts(text, layers, setting=setting, example=f"{setting}=[17, 20, 3]")
    style = re.search(r"pp_style\s*=\s*[\"'](\w+)[\"']", text)
    names = {theirs: ours for ours, theirs in STYLES.items()}
    if style and style[1] not in names:
        raise InvalidInput(f"pp_style is {style[1]!r}; there are {', '.join(names)}")
    number = re.search(r"num_microbatches\s*=\s*(\d{1,7})", text)
    return replace(
        cut,
        chunks=int(chunks[1]) if chunks else 1,
        ranks_setting="" if chunks else "num_model_chunks",
        schedule=names[style[1]] if style else None,
        num_microbatches=int(number[1]) if number else None,
    )


TARGET = Target(
    name="colossalai",
    title=TITLE,
    checked_with=CHECKED,
    file_name="colossalai_plugin.py",
    rules=TargetRules(unit="block", schedules=tuple(STYLES), tied_weights=True),
    write=write,
    read=read,
    default_split=split_evenly,
)
