"""Architectures of ``transformers`` in a seeded draw from all configurations it knows.

A configuration keeps its defaults but for its sizes. What does not build or run like that is
passed over, so a draw of sixty looks at more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from .architecture import Architecture

SEED = 16
VOCABULARY, WIDTH, HEADS, BLOCKS, BATCH, TOKENS, PIXELS, SAMPLES = 64, 32, 4, 2, 2, 16, 32, 1600
LARGEST = 20_000_000
"""Most parameters of a model that counts as tiny: some sizes have names of their own."""

SIZES = (
    (WIDTH, (
        "hidden_size d_model n_embd dim embed_dim embedding_size embedding_dim hidden_dim "
        "word_embed_proj_dim attention_hidden_size projection_dim moe_intermediate_size "
        "d_embed bottleneck_size encoder_hidden_size decoder_hidden_size"
    )),
    (2 * WIDTH, (
        "intermediate_size d_ff d_inner ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner "
        "shared_expert_intermediate_size ffn_hidden_size feed_forward_size"
    )),
    (BLOCKS, (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "num_decoder_layers num_encoder_layers depth num_hidden_groups num_blocks"
    )),
    (HEADS, (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "num_experts num_local_experts n_routed_experts"
    )),
    (WIDTH // HEADS, "head_dim d_kv d_head attention_head_size v_head_dim qk_nope_head_dim"),
    (WIDTH // HEADS // 2, "qk_rope_head_dim rotary_dim"),
    (16, "q_lora_rank kv_lora_rank"),
    (VOCABULARY, (
        "vocab_size max_position_embeddings n_positions max_source_positions entity_vocab_size "
        "max_target_positions max_2d_position_embeddings num_embeddings"
    )),
    (PIXELS, "image_size"),
    (8, "patch_size"),
)  # fmt: skip
"""Small values, and the names that configurations use for such sizes."""

SMALL = {name: value for value, names in SIZES for name in names.split()}

HEAD_CLASSES = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
)
"""Classes by type of model, the preferred ones first: with a loss if there is one."""


def class_names() -> dict[str, str]:
    """Return the class that stands for each type of model, by type."""
    found: dict[str, str] = {}
    for mapping in reversed(HEAD_CLASSES):
        for kind, name in mapping.items():
            found[kind] = name if isinstance(name, str) else name[0]
    return found


def draw(known: Sequence[str], seed: int = SEED) -> Iterator[Architecture]:
    """Yield all architectures in a drawn order, but for the known ones and their decoders."""
    classes = class_names()
    kinds = sorted(set(classes) - set(known))
    random.Random(seed).shuffle(kinds)
    seen: set[str] = set()
    for kind in kinds:
        name = classes[kind]
        if name not in seen and kind.replace("_", "-") not in known:
            seen.add(name)
            yield Architecture(kind, "drawn", _builder(name), _sampler(name))


def tiny_config(model: type[Any]) -> Any:
    config = model.config_class()
    shrink(config)
    return config


def shrink(config: Any) -> None:
    """Make a configuration's sizes small, those of its parts too; other settings stay."""
    counts = [name for name, value in SMALL.items() if value == BLOCKS]
    blocks = {getattr(config, name, None) for name in counts}
    heads = getattr(config, "num_attention_heads", None)
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in values.items():
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value)
        elif isinstance(value, bool) or value is None:
            continue
        elif name == "num_key_value_heads":
            setattr(config, name, HEADS if value == heads else min(value, HEADS // 2))
        elif name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, value % 3)
        elif name in SMALL and isinstance(value, int):
            setattr(config, name, min(value, SMALL[name]))
        elif name in SMALL and isinstance(value, list | tuple) and value:
            setattr(config, name, type(value)(min(item, SMALL[name]) for item in value))
        elif name == "hidden_sizes":
            setattr(config, name, [8 * 2**stage for stage in range(len(value))])
        elif name == "depths":
            setattr(config, name, [min(depth, 2) for depth in value])
        elif isinstance(value, list) and len(value) in blocks and len(value) > BLOCKS:
            setattr(config, name, value[:BLOCKS])
    if hasattr(config, "use_cache"):
        config.use_cache = False


def _builder(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = getattr(transformers, name)
        config = tiny_config(model)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model(config).parameters())
        if size > LARGEST:
            raise ValueError(f"{size:,} parameters are not tiny")
        built: nn.Module = model(config)
        return built

    return build


def _sampler(name: str) -> Callable[[], dict[str, Tensor]]:
    def sample() -> dict[str, Tensor]:
        model = getattr(transformers, name)
        given = _main_input(model, tiny_config(model))
        ids = given.get("input_ids")
        if "ImageClassification" in name:
            given["labels"] = torch.randint(0, 2, (BATCH,))
        elif ids is not None and name.endswith(("CausalLM", "LMHeadModel", "MaskedLM")):
            given["labels"] = ids.clone()
        elif "ConditionalGeneration" in name and ids is not None:
            given["labels"] = _ids()
        elif getattr(model.config_class(), "is_encoder_decoder", False):
            given["decoder_input_ids"] = _ids()
        return given

    return sample


def _main_input(model: type[Any], config: Any) -> dict[str, Tensor]:
    if model.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", PIXELS)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        return {"pixel_values": torch.randn(BATCH, channels, height, width)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(BATCH, SAMPLES)}
    if model.main_input_name == "input_features":
        bands = getattr(config, "num_mel_bins", 80)
        return {"input_features": torch.randn(BATCH, bands, 2 * VOCABULARY)}
    return {"input_ids": _ids()}


def _ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS))
