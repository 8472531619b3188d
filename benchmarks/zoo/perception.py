"""Image, sound and two-sided models from ``transformers`` configurations, in small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .architecture import Architecture
from .language import BATCH, VOCABULARY, WIDTH, from_config, tokens

BLOCK_SIZES = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
PATCHES = {"image_size": 32, "patch_size": 8}

SOUND_SIZES = {
    **BLOCK_SIZES, "vocab_size": VOCABULARY, "conv_dim": (16, 16), "conv_kernel": (8, 4),
    "conv_stride": (4, 2), "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 2, (BATCH,))}


def segmented() -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(BATCH, 3, 64, 64),
        "labels": torch.randint(0, 2, (BATCH, 64, 64)),
    }


def spoken() -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(BATCH, 8, 32),
        "labels": torch.randint(3, VOCABULARY, (BATCH, 6)),
    }


def sound() -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(BATCH, 400),
        "labels": torch.randint(3, VOCABULARY, (BATCH, 4)),
    }


def captioned() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "pixel_values": torch.randn(BATCH, 3, 32, 32)}


def _row(
    name: str, config: str, model: str, sample: Callable[[], Any], **sizes: Any
) -> Architecture:
    build = from_config(config, model, **sizes)
    return Architecture(
        name, "transformers", build, sample, differentiable_inputs=sample is not sound
    )


ARCHITECTURES = (
    _row("vit", "ViTConfig", "ViTForImageClassification", images, **BLOCK_SIZES, **PATCHES),
    _row("deit", "DeiTConfig", "DeiTForImageClassification", images, **BLOCK_SIZES, **PATCHES),
    _row("beit", "BeitConfig", "BeitForImageClassification", images, **BLOCK_SIZES, **PATCHES,
         drop_path_rate=0.0, out_indices=[1]),
    _row("dinov2", "Dinov2Config", "Dinov2ForImageClassification", images, **BLOCK_SIZES,
         **PATCHES),
    _row("swin", "SwinConfig", "SwinForImageClassification", images, image_size=32, patch_size=2,
         embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0),
    _row("convnext", "ConvNextConfig", "ConvNextForImageClassification", images, num_stages=2,
         hidden_sizes=[16, 32], depths=[1, 2], drop_path_rate=0.0),
    _row("segformer", "SegformerConfig", "SegformerForSemanticSegmentation", segmented,
         num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32],
         patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
         decoder_hidden_size=16, drop_path_rate=0.0),
    _row("resnet-hf", "ResNetConfig", "ResNetForImageClassification", images, embedding_size=8,
         hidden_sizes=[16, 32], depths=[1, 1]),
    _row("mobilenet-v2", "MobileNetV2Config", "MobileNetV2ForImageClassification", images,
         image_size=32, depth_multiplier=0.25),
    _row("efficientnet", "EfficientNetConfig", "EfficientNetForImageClassification", images,
         image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320,
         drop_connect_rate=0.0),
    _row("whisper", "WhisperConfig", "WhisperForConditionalGeneration", spoken,
         vocab_size=VOCABULARY, num_mel_bins=8, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
         encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
         decoder_ffn_dim=64, max_source_positions=16, max_target_positions=32, use_cache=False,
         pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
         suppress_tokens=None, begin_suppress_tokens=None),
    _row("clip", "CLIPConfig", "CLIPModel", captioned,
         text_config={**BLOCK_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
                      "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
         vision_config={**BLOCK_SIZES, **PATCHES}, projection_dim=16),
    _row("siglip", "SiglipConfig", "SiglipModel", captioned,
         text_config={**BLOCK_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 12,
                      "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
         vision_config={**BLOCK_SIZES, **PATCHES}),
    _row("wav2vec2", "Wav2Vec2Config", "Wav2Vec2ForCTC", sound, **SOUND_SIZES),
    _row("hubert", "HubertConfig", "HubertForCTC", sound, **SOUND_SIZES),
)  # fmt: skip
