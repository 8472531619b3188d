"""Servers of inference that take the blocks of each rank as numbers: vLLM, SGLang, TensorRT-LLM."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ...core.plan.plan import Plan
from ..gpu_numbers import VISIBLE, list_gpus
from ..settings import Settings
from ..target import Export, ImportedCut, ModelLayers, count_blocks, write_header
from .block_counts import read_counts, split_evenly


@dataclass(frozen=True)
class Server:
    """One of them, with the names that the modules of other runtimes have.

    Attributes:
        form: An example of its setting: an environment variable, or a key of YAML.
        use: How to use the file; ``{}`` is the number of ranks.
        split_by_default: Its own split of a number of blocks over a number of ranks.
    """

    TITLE: str
    CHECKED: str
    form: str
    use: str
    split_by_default: Callable[[int, int], tuple[int, ...]]

    def write(self, plan: Plan) -> Export:
        """Write the counts; the first rank also has the embedding, the last norm and head."""
        counts, gpus = count_blocks(plan), list_gpus(plan) if plan.ranks else []
        setting, mark, *_ = re.split("([=:])", self.form)
        # A script sets the GPUs too, but one file cannot set the variable of several machines.
        is_set = mark == "=" and {node for node, _ in gpus} == {0}
        use, visible = self.use.format(len(counts)), [] if is_set else gpus
        header = write_header(plan, self.TITLE, self.CHECKED, use, visible=visible)
        if mark == ":":
            return Export(
                f"{header}pipeline_parallel_size: {len(counts)}\n{setting}: {list(counts)}\n"
            )
        values = {setting: counts, **({VISIBLE: [number for _, number in gpus]} if is_set else {})}
        lines = (f"export {name}={','.join(map(str, held))}\n" for name, held in values.items())
        return Export(header + "".join(lines))

    def read(self, settings: Settings, layers: ModelLayers) -> ImportedCut:
        """Read the counts. Raises: InvalidInput."""
        return read_counts(settings, layers, form=self.form, default=self.split_by_default)


def _split_for_vllm(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    share, rest = divmod(num_blocks, num_stages)
    # get_pp_indices of 0.33.0: the last rank has the head, so it gets nothing extra, and the
    # ranks before it are filled from the back.
    return tuple(share + (num_stages - 1 - rest <= at < num_stages - 1) for at in range(num_stages))


def _split_for_sglang(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    share, rest = divmod(num_blocks, num_stages)
    return tuple(share + (at >= num_stages - rest) for at in range(num_stages))


SERVERS = {
    "vllm": Server(
        "vLLM",
        "the rule of vllm/distributed/utils.py (get_pp_indices) of vLLM 0.33.0, rewritten",
        "VLLM_PP_LAYER_PARTITION=17,20,3",
        "Set it in the environment of: vllm serve MODEL --pipeline-parallel-size {}",
        _split_for_vllm,
    ),
    "sglang": Server(
        "SGLang",
        "the rule of srt/distributed/utils.py (get_pp_indices) of SGLang 0.5.23, rewritten",
        "SGLANG_PP_LAYER_PARTITION=17,20,3",
        "Set it in the environment of: python -m sglang.launch_server --model-path MODEL "
        "--pp-size {}",
        _split_for_sglang,
    ),
    "tensorrt-llm": Server(
        "TensorRT-LLM",
        "the grammar of pull request 9003 (November 2025), not run",
        "pp_partition: [17, 20, 3]",
        "Use: trtllm-serve MODEL --config THIS_FILE, or LLM(model, pp_partition=[...], "
        "pipeline_parallel_size=...).",
        split_evenly,
    ),
}
"""Servers by the names of their targets."""
