"""TensorRT-LLM: blocks of each rank in the arguments of its LLM API."""

from __future__ import annotations

from functools import partial

from ...core.plan.plan import Plan
from ..target import Export, count_blocks, write_header
from .block_counts import read_counts, split_evenly

TITLE = "TensorRT-LLM"
CHECKED = "the grammar of pull request 9003 (November 2025), not run"


def write(plan: Plan) -> Export:
    """Write ``pp_partition`` as a file for ``--config``."""
    counts = count_blocks(plan)
    use = (
        "Use: trtllm-serve MODEL --config THIS_FILE, or LLM(model, pp_partition=[...], "
        "pipeline_parallel_size=...).",
    )
    header = write_header(plan, TITLE, CHECKED, *use)
    return Export(f"{header}pipeline_parallel_size: {len(counts)}\npp_partition: {list(counts)}\n")


read = partial(read_counts, form="pp_partition: [17, 20, 3]", default=split_evenly)
