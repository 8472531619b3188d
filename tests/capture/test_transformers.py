"""Real architectures from ``transformers`` configurations: block by block, every cut legal."""

import pytest
import torch

from stagewright.capture.capture import trace
from stagewright.core.errors import CaptureError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip
TOKENS = {"input_ids": torch.arange(24).reshape(2, 12)}


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config), TOKENS


def tied_qwen():
    config = transformers.Qwen2Config(
        **SIZES, num_key_value_heads=2, use_cache=False, tie_word_embeddings=True
    )
    return transformers.Qwen2ForCausalLM(config), TOKENS


def bert():
    mask = torch.ones(2, 12, dtype=torch.int64)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return model, {**TOKENS, "attention_mask": mask}


def vit():
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False
    )
    tokens = TOKENS["input_ids"]
    return (
        transformers.T5ForConditionalGeneration(config),
        {"input_ids": tokens, "decoder_input_ids": tokens.clone()},
    )


BLOCKS = {
    llama: "model.layers",
    tied_qwen: "model.layers",
    bert: "bert.encoder.layer",
    vit: "layers",
    t5: "decoder.block",
}


@pytest.mark.parametrize("build", BLOCKS, ids=lambda build: build.__name__)
def test_blocks_are_layers_and_dropout_follows_the_mode(build):
    """Tracing compares outputs, gradients and buffers in pieces, in both modes; see the gate."""
    torch.manual_seed(0)
    model, sample = build()
    graph = trace(model.train(), sample).graph
    names = [layer.name for layer in graph.layers]
    assert {f"{BLOCKS[build]}.0", f"{BLOCKS[build]}.1"} <= set(names)
    assert all(boundary.legal for boundary in graph.boundaries)
    assert graph.fixed_mode == ()


def test_a_cache_that_is_on_is_named_with_its_way_out():
    """Every causal language model has it on by default."""
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    with pytest.raises(CaptureError, match="use_cache = False"):
        trace(transformers.LlamaForCausalLM(config), TOKENS)
