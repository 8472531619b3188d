"""Cuts that others published or that runtimes choose by themselves, beside the best plan.

Each is read by the same code as `stagewright check` and priced on estimates for H100s. A device
stands for all GPUs of a rank, with their memory and the time of one, so two cuts are compared, not
a throughput.

    python benchmarks/published_cuts.py --write docs/evidence/published-cuts.md
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tables import markdown_table, write_between_marks

import stagewright
from stagewright.cli.support.named_models import EstimateFlags
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.formats.check_cut import CutReport, check_cut
from stagewright.formats.runtimes.registry import TARGETS, import_cut

GPU_GIB = 80

MODEL_BYTES, OPTIMIZER_BYTES = 2 + 4, 4 + 8
"""Bytes a parameter of bf16_mixed: weights and gradients; master weights and Adam's moments."""

ONE_COPY = MODEL_BYTES + OPTIMIZER_BYTES


@dataclass(frozen=True)
class PublishedCut:
    """A cut with its source.

    Attributes:
        name: What the table calls it.
        source: Where it was read.
        runtime: Its form.
        text: The cut in that form.
        model: Name of the published model.
        ranks: Pipeline ranks.
        gpus: GPUs of a rank, which share a stage by tensor or context parallelism.
        microbatches: Micro-batches a step.
        held_bytes: Bytes a parameter of weights, gradients and optimizer on the GPUs of a rank
            together, by the source's own sharding; those of one copy, whole, by default.
    """

    name: str
    source: str
    runtime: str
    text: str
    model: str
    ranks: int
    gpus: int = 1
    microbatches: int = 32
    held_bytes: float = ONE_COPY


def default_counts(runtime: str, blocks: int, ranks: int) -> str:
    """Return what a runtime chooses without being told."""
    split = TARGETS[runtime].default_split
    assert split is not None, runtime
    return ",".join(map(str, split(blocks, ranks)))


def titan_parts(counts: list[int]) -> str:
    """Return torchtitan's lists for numbers of layers."""
    parts, first = [], 0
    for count in counts:
        parts.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return repr(parts).replace("'", '"')


DEEPSEEK = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}
"""DeepSeek-V3's published configuration; no family of ours, so it is captured from transformers."""

TITAN = "torchtitan 0.3.0, what _generate_llm_fqn_per_model_part returned"

CUTS = (
    PublishedCut(
        "torchtitan's own",
        f"{TITAN}; on the 8 GPUs of its run_train.sh, 4 share the optimizer's state by FSDP",
        "torchtitan",
        titan_parts([16, 16]),
        "llama-3-8b",
        2,
        held_bytes=MODEL_BYTES + OPTIMIZER_BYTES / 4,
    ),
    PublishedCut(
        "torchtitan's own",
        TITAN,
        "torchtitan",
        titan_parts([20, 21, 20, 19]),
        "llama-3-70b",
        4,
        gpus=8,
    ),
    PublishedCut(
        "Llama 3, 16 stages",
        "The Llama 3 Herd of Models, 3.3.2: a layer less on the first and the last; also "
        "torchtitan's own; 128 replicas share the optimizer's state by FSDP (table 4)",
        "torchtitan",
        titan_parts([7, *[8] * 14, 7]),
        "llama-3.1-405b",
        16,
        gpus=8,
        microbatches=64,
        held_bytes=MODEL_BYTES + OPTIMIZER_BYTES / 128,
    ),
    PublishedCut(
        "NeMo's recipe",
        "NVIDIA/NeMo llama31_405b.py at 00aa2e12: 9 ranks of 2 chunks, 8-way tensor and 4-way "
        "context parallel, whose 4 copies and 2 replicas share the optimizer's state",
        "megatron",
        "--pipeline-model-parallel-size 9 --pipeline-model-parallel-layout 'Et*7|(t*7|)*16t*7L'",
        "llama-3.1-405b",
        9,
        gpus=32,
        microbatches=72,
        held_bytes=4 * MODEL_BYTES + OPTIMIZER_BYTES / 2,
    ),
    PublishedCut(
        "NeMo's recipe",
        "NVIDIA/NeMo llama3_70b.py at 0189a3b3: 4 ranks of 5 chunks, 4-way tensor and 2-way "
        "context parallel, whose 2 copies share the optimizer's state",
        "megatron",
        "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*4|(t*4|)*18t*4L'",
        "llama-3-70b",
        4,
        gpus=8,
        held_bytes=2 * MODEL_BYTES + OPTIMIZER_BYTES,
    ),
    PublishedCut(
        "Megatron-LM, 96 GPUs a model",
        "Narayanan et al. 2021, table 2: 8 x 12 model-parallel GPUs, equal stages",
        "megatron",
        "Et*8|(t*8|)*10t*8L",
        "gpt3-175b",
        12,
        gpus=8,
        microbatches=48,
    ),
    PublishedCut(
        "Megatron-Bridge's recipe",
        "NVIDIA-NeMo/Megatron-Bridge deepseek_v3.py at 355cef45: 16 ranks, 2-way tensor and 64-way "
        "expert parallel; its m layer is left out",
        "megatron",
        "Et*4|(t*4|)*14tmL",
        "deepseek-v3",
        16,
        gpus=64,
        microbatches=64,
    ),
    PublishedCut(
        "vLLM's own, documented",
        "the table of vllm-project/vllm pull request 46217 (before): DeepSeek-V3.1 on 4 ranks",
        "vllm",
        "VLLM_PP_LAYER_PARTITION=15,15,16,15",
        "deepseek-v3",
        4,
        gpus=32,
        microbatches=8,
    ),
    *(
        PublishedCut(
            f"{TARGETS[runtime].title}'s own",
            TARGETS[runtime].checked_with,
            runtime,
            default_counts(runtime, blocks, 3),
            model,
            3,
            microbatches=8,
        )
        for runtime, model, blocks in (
            ("vllm", "llama-3-70b", 80),
            ("vllm", "llama-2-13b", 40),
            ("sglang", "llama-3-70b", 80),
            ("tensorrt-llm", "llama-2-13b", 40),
        )
    ),
)


@cache
def estimate_deepseek() -> Profile:
    """Estimate DeepSeek-V3 from its code in transformers, without weights."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)).to(torch.bfloat16)
        sample = {"input_ids": torch.zeros(1, 2048, dtype=torch.int64), "use_cache": False}
    return stagewright.estimate(model, sample, device="H100")


def hold(profile: Profile, share: float) -> Profile:
    """Return the profile with this share of a copy's bytes for every parameter."""
    if share == 1:
        return profile
    layers = tuple(
        entry.model_copy(
            update={
                "layer": entry.layer.model_copy(
                    update={"parameter_bytes": round(entry.layer.parameter_bytes * share)}
                )
            }
        )
        for entry in profile.layers
    )
    parameters = tuple(
        entry.model_copy(
            update={
                # As many bytes an element as before: they tell the recipe.
                "size_bytes": round(entry.numel * share) * (entry.size_bytes // entry.numel),
                "numel": round(entry.numel * share),
            }
        )
        for entry in profile.parameters
    )
    return profile.model_copy(update={"layers": layers, "parameters": parameters})


def judge(cut: PublishedCut) -> CutReport:
    """Price a cut and the best plan."""
    devices = f"1x{cut.ranks}xH100"
    cluster = Cluster.parse(devices)
    if cut.model == "deepseek-v3":
        profile = estimate_deepseek()
    else:
        estimated = EstimateFlags(sequence=2048).estimate(cut.model, cluster, devices)
        cluster, profile = estimated.cluster, estimated.profile
    larger = tuple(
        device.model_copy(update={"memory_bytes": cut.gpus * GPU_GIB * 2**30})
        for device in cluster.devices
    )
    cluster = cluster.model_copy(update={"devices": larger})
    if not TARGETS[cut.runtime].rules.inference:
        profile = hold(profile, cut.held_bytes / ONE_COPY)
    options = PlanOptions(num_microbatches=cut.microbatches, precision="bf16_mixed")
    found = import_cut(cut.text, cut.runtime, profile)
    from stagewright.planner.plan import plan

    return check_cut(found, profile, cluster, options, search=partial(plan, deadline_s=60.0))


def row(cut: PublishedCut) -> list[str]:
    """Return the table's row of a cut."""
    report = judge(cut)
    priced = report.plan or report.unlimited
    assert priced is not None, report
    slower = report.slowdown
    counts = "nothing fits" if report.best is None else ", ".join(map(str, report.best.balance))
    return [
        cut.model,
        cut.name,
        str(priced.num_stages),
        str(cut.gpus),
        "" if TARGETS[cut.runtime].rules.inference else f"{cut.held_bytes:.3g}",
        f"{priced.bubble_fraction:.1%}",
        "fits" if report.plan is not None else "does not fit",
        "" if slower is None or report.plan is None else f"{slower:.1%}",
        counts,
        cut.source,
    ]


def main() -> None:
    """Price every cut, print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="Write the table into this page.")
    chosen = parser.parse_args()
    columns = [
        "model",
        "cut",
        "stages",
        "GPUs a rank",
        "bytes a parameter",
        "bubble",
        "memory",
        "slower than the best",
        "layers of the best",
        "source",
    ]
    rows = []
    for cut in CUTS:
        rows.append(row(cut))
        print(" | ".join(rows[-1]), flush=True)
    if chosen.write is not None:
        write_between_marks(
            chosen.write, "published_cuts.py", markdown_table(columns, rows, left=2)
        )


if __name__ == "__main__":
    main()
