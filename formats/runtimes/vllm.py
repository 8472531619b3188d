"""vLLM: blocks of each rank in an environment variable."""

from __future__ import annotations

from functools import partial

from ...core.plan.plan import Plan
from ..target import Export
from .block_counts import read_counts, write_variable

TITLE = "vLLM"
CHECKED = "the rule of vllm/distributed/utils.py (get_pp_indices) of vLLM 0.33.0, rewritten"
VARIABLE = "VLLM_PP_LAYER_PARTITION"
COMMAND = "vllm serve MODEL --pipeline-parallel-size"


def write(plan: Plan) -> Export:
    """Write ``VLLM_PP_LAYER_PARTITION``; the last rank also has norm and head."""
    return write_variable(plan, TITLE, CHECKED, VARIABLE, COMMAND)


def split_by_default(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return vLLM's own split: what is left over goes to the ranks in front of the last one."""
    share, rest = divmod(num_blocks, num_stages)
    counts = [share] * num_stages
    # get_pp_indices of 0.33.0: the last rank has the head, so it gets nothing extra, and the
    # ranks before it are filled from the back.
    for index in range(rest):
        counts[-2 - index] += 1
    return tuple(counts)


read = partial(read_counts, form=f"{VARIABLE}=17,20,3", default=split_by_default)
