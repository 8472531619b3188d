"""Colossal-AI: blocks of each stage in the arguments of its hybrid plugin."""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.plan.schedule import ScheduleName
from ..settings import Settings
from ..target import (
    Export,
    ImportedCut,
    ModelLayers,
    count_blocks,
    count_ranks,
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
    header = write_header(plan, TITLE, CHECKED, "Use: Booster(plugin=plugin).")
    lines = (
        "from colossalai.booster.plugin import HybridParallelPlugin",
        "",
        "plugin = HybridParallelPlugin(",
        *arguments,
        ")",
    )
    return Export(header + "\n".join(lines) + "\n")


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read ``num_layers_per_stage`` and ``num_model_chunks``, or numbers alone."""
    counts, form = settings.counts, "num_layers_per_stage=[17, 20, 3]"
    chunks, style = max(1, counts.get("num-model-chunks", 1)), settings.words.get("pp-style")
    cut = read_counts(settings, layers, form=form, default=split_evenly, chunks=chunks)
    names = {theirs: ours for ours, theirs in STYLES.items()}
    if style and style not in names:
        raise InvalidInput(f"pp_style is {style!r}; there are {', '.join(names)}")
    return replace(
        cut,
        chunks=chunks,
        ranks_setting="" if "num-model-chunks" in counts else "num_model_chunks",
        schedule=names[style] if style else None,
        num_microbatches=counts.get("num-microbatches"),
        microbatch_size=counts.get("microbatch-size"),
    )
