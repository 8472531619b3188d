"""Forty models of ``transformers`` whose configurations say nothing but sizes.

Caches, dropout, layer drop, masking of spectrograms and tied weights stay as transformers sets
them. Sizes are those that let a model be built in a moment; a few that depend on one another, such
as a rotary dimension, count as sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from stagewright.core.plan.plan import Plan

VOCABULARY, BATCH, TOKENS = 128, 2, 12

BODY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Tokens within the small vocabulary; a default beyond it could not be built."""
TEXT = {**BODY, **SPECIAL, "vocab_size": VOCABULARY}
LLAMA = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERT_SIZES = {"num_experts_per_tok", "num_local_experts", "n_routed_experts"}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TWO_SIDED = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, **SPECIAL, "decoder_start_token_id": 2,
}  # fmt: skip
PATCHES = {"image_size": 32, "patch_size": 8}
SOUND = {
    **TEXT, "conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (4, 2),
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
}  # fmt: skip


def _normal(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, dtype=torch.float64)


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS))


def labelled() -> dict[str, Tensor]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1, -3:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def two_texts() -> dict[str, Tensor]:
    return {"input_ids": ids(), "labels": ids()}


def image() -> dict[str, Tensor]:
    return {"pixel_values": _normal(3, 32, 32)}


def large_image() -> dict[str, Tensor]:
    return {"pixel_values": _normal(3, 64, 64)}


def waveform() -> dict[str, Tensor]:
    return {"input_values": _normal(800)}


def spectrogram() -> dict[str, Tensor]:
    return {"input_features": _normal(8, 32), "decoder_input_ids": ids()[:, :6]}


def patches_of_sound() -> dict[str, Tensor]:
    return {"input_values": _normal(32, 16)}


@dataclass(frozen=True)
class Published:
    """A model of transformers and its sample.

    Attributes:
        name: Name of the architecture.
        kind: What it reads.
        model: Class of the model.
        config: Class of its configuration.
        sample: Makes one micro-batch.
        sizes: All that its configuration is given.
        single: Run it in float32: its grouped products of experts take no float64.
    """

    name: str
    kind: str
    model: str
    config: str
    sample: Callable[[], dict[str, Tensor]]
    sizes: dict[str, Any]
    single: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and inputs."""
        return torch.float32 if self.single else torch.float64

    def build(self) -> nn.Module:
        """Return the model with new weights."""
        import transformers

        config = getattr(transformers, self.config)(**self.sizes)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.to(self.dtype)

    def build_again(self, other: nn.Module) -> nn.Module:
        """Return a new model with another one's weights and buffers."""
        model = self.build()
        model.load_state_dict(other.state_dict())
        return model


def differ(model: nn.Module, plan: Plan, samples: Sequence[dict[str, Tensor]]) -> float:
    """Return the worst relative difference of a pipeline's outputs from the model's own.

    The model is called as its author wrote it, with whatever cache it makes. Compared is every
    output of the pipeline that has a place for each sample; having none is infinitely far.
    """
    from stagewright.runtime.pipeline import Pipeline

    with torch.no_grad():
        expected = [model(**sample) for sample in samples]
        batch = {name: torch.cat([one[name] for one in samples]) for name in samples[0]}
        found = Pipeline(model, plan).eval()(**batch)
    worst = [
        float((value - wanted).norm() / wanted.norm().clamp(min=1e-12))
        for name, value in found.items()
        if isinstance(value, Tensor) and value.dim() > 1
        for wanted in [torch.cat([getattr(output, name) for output in expected])]
    ]
    return max(worst, default=float("inf"))


def _rows() -> list[Published]:
    def causal(name: str, prefix: str, sizes: dict[str, Any], model: str = "") -> Published:
        return Published(
            name, "text", model or f"{prefix}ForCausalLM", f"{prefix}Config", labelled, sizes,
            single=bool(EXPERT_SIZES & sizes.keys()),
        )  # fmt: skip

    def masked(name: str, prefix: str, sizes: dict[str, Any]) -> Published:
        return Published(name, "text", f"{prefix}ForMaskedLM", f"{prefix}Config", padded, sizes)

    def pair(name: str, prefix: str, sizes: dict[str, Any]) -> Published:
        return Published(
            name, "text to text", f"{prefix}ForConditionalGeneration", f"{prefix}Config",
            two_texts, sizes,
        )  # fmt: skip

    def sight(
        name: str, prefix: str, sizes: dict[str, Any], sample: Callable[[], Any] = image
    ) -> Published:
        return Published(
            name, "images", f"{prefix}ForImageClassification", f"{prefix}Config", sample, sizes
        )

    def speech(
        name: str, prefix: str, sizes: dict[str, Any], head: str, sample: Callable[[], Any]
    ) -> Published:
        return Published(name, "sound", f"{prefix}{head}", f"{prefix}Config", sample, sizes)

    return [
        causal("gpt2", "GPT2", GPT2, "GPT2LMHeadModel"),
        causal("gpt-neox", "GPTNeoX", TEXT),
        causal("gpt-j", "GPTJ", {**GPT2, "rotary_dim": 4}),
        causal("opt", "OPT", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
        causal("bloom", "Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2,
                                  "n_head": 4, **SPECIAL}),
        causal("falcon", "Falcon", TEXT),
        causal("llama", "Llama", LLAMA),
        causal("mistral", "Mistral", LLAMA),
        causal("mixtral", "Mixtral", {**LLAMA, "num_local_experts": 4}),
        causal("qwen2", "Qwen2", LLAMA),
        causal("qwen3", "Qwen3", LLAMA),
        causal("qwen3-moe", "Qwen3Moe", {**LLAMA, **EXPERTS}),
        causal("gemma2", "Gemma2", LLAMA),
        Published("gemma3", "text", "Gemma3ForCausalLM", "Gemma3TextConfig", labelled, LLAMA),
        causal("phi3", "Phi3", {**TEXT, "num_key_value_heads": 2}),
        causal("olmo2", "Olmo2", {**TEXT, "num_key_value_heads": 2}),
        causal("gpt-oss", "GptOss", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
        causal("deepseek-v3", "DeepseekV3", {
            **TEXT, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8,
            "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
            "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 8}),
        causal("mamba", "Mamba", {"vocab_size": VOCABULARY, "hidden_size": 32,
                                  "num_hidden_layers": 2, "state_size": 4, **SPECIAL}),
        masked("bert", "Bert", TEXT),
        masked("distilbert", "DistilBert", {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64,
                                            "n_layers": 2, "n_heads": 4}),
        masked("roberta", "Roberta", TEXT),
        masked("albert", "Albert", {**TEXT, "embedding_size": 16}),
        masked("electra", "Electra", {**TEXT, "embedding_size": 16}),
        masked("deberta-v2", "DebertaV2", TEXT),
        masked("modernbert", "ModernBert", {**TEXT, "cls_token_id": 1, "sep_token_id": 2}),
        pair("t5", "T5", {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64,
                          "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
        pair("bart", "Bart", TWO_SIDED),
        sight("vit", "ViT", {**BODY, **PATCHES}),
        sight("deit", "DeiT", {**BODY, **PATCHES}),
        sight("beit", "Beit", {**BODY, **PATCHES, "out_indices": [1]}),
        sight("dinov2", "Dinov2", {**BODY, **PATCHES}),
        sight("swin", "Swin", {"image_size": 32, "patch_size": 2, "embed_dim": 16,
                               "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}),
        sight("convnext", "ConvNext", {"num_stages": 2, "hidden_sizes": [16, 32],
                                       "depths": [1, 2]}),
        sight("resnet", "ResNet", {"embedding_size": 8, "hidden_sizes": [16, 32],
                                   "depths": [1, 1]}),
        sight("segformer", "Segformer", {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2],
            "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16},
            large_image),
        speech("whisper", "Whisper", {**TWO_SIDED, "num_mel_bins": 8, "max_source_positions": 16,
                                      "max_target_positions": 32}, "ForConditionalGeneration",
               spectrogram),
        speech("wav2vec2", "Wav2Vec2", SOUND, "ForCTC", waveform),
        speech("hubert", "Hubert", SOUND, "ForCTC", waveform),
        speech("audio-spectrogram", "AST", {
            **BODY, "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 32,
            "num_mel_bins": 16}, "ForAudioClassification", patches_of_sound),
    ]  # fmt: skip


MODELS = {published.name: published for published in _rows()}
"""Models by name, in the order of the table."""
