"""Real architectures from ``transformers`` configurations: block by block, every cut legal."""

import pytest
import torch

from stagewright.capture.capture import trace
from stagewright.capture.observation.generation_cache import NOTE, switch_off_caches
from stagewright.core.errors import CaptureError, InvalidInput

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


def _llama(**settings):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **settings)
    )


def test_caches_are_off_while_a_model_is_captured():
    """Every causal language model has one by default, and no cut can pass it on."""
    model, without = _llama(), _llama(use_cache=False)
    captured = trace(model, TOKENS)
    assert model.config.use_cache is True
    assert [layer.name for layer in captured.graph.layers] == [
        layer.name for layer in trace(without, TOKENS).graph.layers
    ]
    assert NOTE in captured.program.notes
    assert NOTE not in trace(without, TOKENS).program.notes


def test_a_cache_is_back_on_after_a_failed_capture():
    model = _llama()
    with pytest.raises(InvalidInput):
        trace(model, {"no_such_argument": TOKENS})
    assert model.config.use_cache is True


def test_nested_configurations_lose_their_caches_too():
    model = torch.nn.Module()
    model.config = transformers.Gemma3Config(text_config={"use_cache": True})
    with switch_off_caches(model) as had_cache:
        assert had_cache
        assert model.config.text_config.use_cache is False
    assert model.config.text_config.use_cache is True


class Branching(transformers.LlamaForCausalLM):
    """A model that has to run as written, and asks its configuration each time."""

    def forward(self, input_ids):
        output = super().forward(input_ids)
        if output.logits.sum() > 0:
            output.logits = output.logits + 1
        return output


def test_a_whole_model_that_would_ask_for_its_cache_again_is_refused():
    model = Branching(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    with pytest.raises(CaptureError, match="use_cache = False"):
        trace(model, TOKENS)
    model.config.use_cache = False
    assert trace(model, TOKENS).graph.layers


def _tokens():
    return torch.randint(3, 64, (2, 16))


def prophetnet():
    config = transformers.ProphetNetConfig(
        vocab_size=64, hidden_size=32, encoder_ffn_dim=64, num_encoder_layers=2,
        num_encoder_attention_heads=4, decoder_ffn_dim=64, num_decoder_layers=2,
        num_decoder_attention_heads=4, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model = transformers.ProphetNetForConditionalGeneration(config)
    return model, {"input_ids": _tokens(), "labels": _tokens()}


def switch_transformers():
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_sparse_encoder_layers=1,
        num_decoder_layers=2, num_sparse_decoder_layers=1, num_heads=4, num_experts=4,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.SwitchTransformersForConditionalGeneration(config)
    return model, {"input_ids": _tokens(), "labels": _tokens()}


def longt5():
    config = transformers.LongT5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False,
        decoder_start_token_id=0, local_radius=4,
    )  # fmt: skip
    model = transformers.LongT5ForConditionalGeneration(config)
    return model, {"input_ids": _tokens(), "labels": _tokens()}


def time_series_transformer():
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, lags_sequence=[1, 2], num_time_features=1, use_cache=False,
    )  # fmt: skip
    return transformers.TimeSeriesTransformerForPrediction(config), {
        "past_values": torch.randn(2, 10),
        "past_time_features": torch.randn(2, 10, 1),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 1),
    }


@pytest.mark.parametrize(
    ("build", "stages"),
    [
        (prophetnet, 11),
        (switch_transformers, 13),
        (longt5, 13),
        (time_series_transformer, 3),  # encoder and decoder drop layers by chance
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_checks_its_data_or_asks_if_compiled_can_be_cut(build, stages):
    torch.manual_seed(0)
    model, sample = build()
    graph = trace(model, sample).graph
    assert 1 + sum(boundary.legal for boundary in graph.boundaries) == stages
