"""SGLang: blocks of each rank in an environment variable."""

from __future__ import annotations

from ...core.plan.plan import Plan
from ..target import Export, Target, TargetRules, count_blocks, list_devices, write_header
from .block_counts import read_counts

TITLE = "SGLang"
CHECKED = "the rule of srt/distributed/utils.py (get_pp_indices) of SGLang 0.5.23, rewritten"


def write(plan: Plan) -> Export:
    """Write ``SGLANG_PP_LAYER_PARTITION``; the first rank also has the embedding."""
    counts = count_blocks(plan)
    use = (
        "Set it in the environment of: python -m sglang.launch_server --model-path MODEL "
        f"--pp-size {len(counts)}",
        f"{list_devices(plan)}.",
    )
    header = write_header(plan, TITLE, CHECKED, *use)
    return Export(f"{header}export SGLANG_PP_LAYER_PARTITION={','.join(map(str, counts))}\n")


def split_by_default(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return SGLang's own split: the last ranks get what is left over."""
    share, rest = divmod(num_blocks, num_stages)
    return tuple(share + (index >= num_stages - rest) for index in range(num_stages))


TARGET = Target(
    name="sglang",
    title=TITLE,
    checked_with=CHECKED,
    file_name="sglang-partition.sh",
    rules=TargetRules(inference=True, unit="block"),
    write=write,
    read=read_counts,
    default_split=split_by_default,
)
