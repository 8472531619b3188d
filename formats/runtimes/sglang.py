"""SGLang: blocks of each rank in an environment variable."""

from __future__ import annotations

from functools import partial

from ...core.plan.plan import Plan
from ..target import Export
from .block_counts import read_counts, write_variable

TITLE = "SGLang"
CHECKED = "the rule of srt/distributed/utils.py (get_pp_indices) of SGLang 0.5.23, rewritten"
VARIABLE = "SGLANG_PP_LAYER_PARTITION"
COMMAND = "python -m sglang.launch_server --model-path MODEL --pp-size"


def write(plan: Plan) -> Export:
    """Write ``SGLANG_PP_LAYER_PARTITION``; the first rank also has the embedding."""
    return write_variable(plan, TITLE, CHECKED, VARIABLE, COMMAND)


def split_by_default(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return SGLang's own split: the last ranks get what is left over."""
    share, rest = divmod(num_blocks, num_stages)
    return tuple(share + (index >= num_stages - rest) for index in range(num_stages))


read = partial(read_counts, form=f"{VARIABLE}=17,20,3", default=split_by_default)
