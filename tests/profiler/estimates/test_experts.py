"""Mixtures of experts are priced by the experts that a token is sent to: formulas of our own."""

from __future__ import annotations

from typing import Any

import pytest

from stagewright.core.models.families import CausalLMConfig, CausalLMSpec
from stagewright.core.requests.default_samples import default_sample

TOKENS, HIDDEN, EXPERT, LAYERS = 128, 32, 16, 2
LATENT = {
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "moe_intermediate_size": EXPERT,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("num_local_experts", {}),
    "qwen3_moe": ("num_experts", {"moe_intermediate_size": EXPERT, "head_dim": 8}),
    "deepseek_v3": ("n_routed_experts", LATENT),
    "gpt_oss": ("num_local_experts", {"head_dim": 8}),
}


def forward_flops(kind: str, experts: int, active: int) -> int:
    pytest.importorskip("transformers")
    from stagewright.profiler.estimates.estimate import spec_work, target

    name, settings = KINDS[kind]
    config = CausalLMConfig.model_validate(
        {
            "model_type": kind, "vocab_size": 64, "hidden_size": HIDDEN,
            "intermediate_size": EXPERT, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
            "num_key_value_heads": 4, "max_position_embeddings": 64,
            "settings": {**settings, name: experts, "num_experts_per_tok": active},
        }
    )  # fmt: skip
    spec = CausalLMSpec(family="causal_lm", config=config)
    work = spec_work(spec, default_sample(spec, 2, TOKENS // 2), target("H100"))
    return sum(cost.flops for part in work.parts for cost in part.forward)


@pytest.mark.parametrize("kind", KINDS)
def test_only_active_experts_are_computed(kind):
    """More experts cost a larger router, and nothing else; one more active one costs its MLP."""
    four, eight = forward_flops(kind, 4, 2), forward_flops(kind, 8, 2)
    assert eight - four == LAYERS * TOKENS * 2 * HIDDEN * 4
    expert = 2 * HIDDEN * EXPERT * 3  # gate, up and down
    assert forward_flops(kind, 4, 3) - four == LAYERS * TOKENS * expert
