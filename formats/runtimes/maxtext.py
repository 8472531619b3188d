"""MaxText: equal stages, as settings of its configuration."""

from __future__ import annotations

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.units import list_some
from ..settings import MOST_NAMED, Settings
from ..target import (
    Export,
    ImportedCut,
    ModelLayers,
    count_blocks,
    count_ranks,
    write_header,
)

TITLE = "MaxText"
MAX_STAGES = 100_000
CHECKED = "the settings of src/maxtext/configs/base.yml at e591f30c, not run"


def write(plan: Plan) -> Export:
    """Write ``num_layers_per_pipeline_stage`` and its fellows."""
    counts = count_blocks(plan)
    places = count_ranks(plan)
    settings = {
        "ici_pipeline_parallelism": places,
        "num_layers_per_pipeline_stage": counts[0],
        "num_pipeline_repeats": plan.chunks,
        "num_pipeline_microbatches": plan.num_microbatches,
    }
    header = write_header(
        plan,
        TITLE,
        CHECKED,
        "Use: python -m maxtext.train base.yml, with these as overrides, or in the file.",
    )
    return Export(header + "".join(f"{name}: {value}\n" for name, value in settings.items()))


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read equal stages.

    Raises:
        InvalidInput: A setting is missing.
    """
    found, places = settings.counts, settings.pipeline
    share = found.get("num-layers-per-pipeline-stage")
    if share is None or places is None:
        raise InvalidInput(
            "a MaxText cut has num_layers_per_pipeline_stage and ici_pipeline_parallelism or "
            f"dcn_pipeline_parallelism; found {list_some([*settings.written.values()], MOST_NAMED)}"
        )
    chunks = found.get("num-pipeline-repeats", -1)
    if share < 1:
        raise InvalidInput(f"{places} stages of {share} layers; give at least one of each")
    if chunks < 1:  # MaxText derives it from its layers
        chunks = max(1, layers.stack.num_blocks // (share * places))
    if places * chunks > MAX_STAGES:
        raise InvalidInput(f"{places * chunks} stages are more than {MAX_STAGES}")
    return layers.cut_by_blocks(
        [share] * (places * chunks),
        schedule="looped_bfs" if chunks > 1 else "gpipe",
        chunks=chunks,
        num_microbatches=found.get("num-pipeline-microbatches"),
    )
