"""A small ``config.json`` of each type of causal language model that the family causal_lm has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from stagewright.core.requests.hugging_face import CAUSAL_TYPES

from .published import EXPERT_SIZES, LLAMA, Published, labelled

SIZES = {**LLAMA, "max_position_embeddings": 64}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **ROUTED, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": None,
}  # fmt: skip
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "glm4_moe": {**ROUTED, "n_routed_experts": 8, "first_k_dense_replace": 1},
    "gpt_oss": LOCAL,
    "granitemoe": LOCAL,
    "mixtral": LOCAL,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**ROUTED, "num_experts": 4},
}


@dataclass(frozen=True)
class ConfigFile(Published):
    """A model as Stagewright builds it of the content of a file, which ``sizes`` is."""

    def build(self) -> nn.Module:
        from stagewright.core.requests.model_input import read_model
        from stagewright.profiler.models.families import build_model

        model: nn.Module = build_model(read_model(self.sizes))
        return model.to(self.dtype)


MODELS = {
    kind: ConfigFile(
        kind, "text", "", "", labelled, {"model_type": kind, **SIZES, **OWN.get(kind, {})},
        single=bool((EXPERT_SIZES | {"num_experts", "moe_num_experts"}) & OWN.get(kind, {}).keys()),
    )
    for kind in sorted(CAUSAL_TYPES)
}  # fmt: skip
