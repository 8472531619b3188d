"""A model without data (on the meta device) is captured as the real one is."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace

transformers = pytest.importorskip("transformers")

TOKENS = {"input_ids": torch.arange(24).reshape(2, 12)}


def gpt2_small():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def chain():
    return nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8), nn.ReLU())


@pytest.mark.parametrize("build", [gpt2_small, llama, chain], ids=lambda build: build.__name__)
def test_a_model_without_data_is_captured_as_the_real_one(build):
    sample = TOKENS["input_ids"] if build is chain else TOKENS
    real = trace(build(), sample, check=False).graph
    with torch.device("meta"):
        model = build()
        meta_sample = torch.utils._pytree.tree_map(lambda tensor: tensor.to("meta"), sample)
    found = trace(model, meta_sample, check=False).graph
    assert found.layers == real.layers
    assert found.parameters == real.parameters
    assert found.boundaries == real.boundaries
    assert found.operations == real.operations
    assert all(parameter.is_meta for parameter in model.parameters())
    if build is not chain:
        assert any(".scaled_dot_product_attention" in o.target for o in found.operations) or any(
            "_mode_" in operation.target for operation in found.operations
        )


def test_a_causal_mask_without_data_is_recognised():
    """It is computed on the CPU to be looked at; one that blocks something else stays a mask."""

    def flags(shift):
        class Masked(nn.Module):
            def forward(self, x):
                rows = torch.arange(5, device=x.device)
                mask = rows[:, None] >= rows[None] - shift
                return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

        captured = trace(Masked(), torch.empty(2, 5, 8, device="meta"), check=False)
        attention = torch.ops.aten.scaled_dot_product_attention.default
        return [
            node.kwargs.get("is_causal")
            for node in captured.program.graph.nodes
            if node.target is attention
        ]

    assert flags(0) == [True]
    assert flags(1) == [None]
