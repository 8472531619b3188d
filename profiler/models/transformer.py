"""Builds the transformer families with the package ``transformers``."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from ...core.errors import InvalidInput
from ...core.models.families import (
    BertSpec,
    GPT2Spec,
    LlamaConfig,
    LlamaSpec,
    MixtralSpec,
    Qwen2Spec,
    T5Spec,
    ViTSpec,
)

TransformersSpec = GPT2Spec | LlamaSpec | Qwen2Spec | MixtralSpec | BertSpec | T5Spec | ViTSpec


def build_transformer(spec: TransformersSpec) -> nn.Module:
    """Build a model with random weights, in training mode, on the current default device."""
    try:
        import transformers
    except ImportError as error:
        raise InvalidInput(
            f"the family {spec.family!r} needs transformers; pip install 'stagewright[hf]'",
            field="/model/family",
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model: nn.Module
    if isinstance(spec, GPT2Spec):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_gpt2(spec)))
    elif isinstance(spec, LlamaSpec):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_decoder(spec.config)))
    elif isinstance(spec, Qwen2Spec):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_decoder(spec.config)))
    elif isinstance(spec, MixtralSpec):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**_decoder(spec.config), sliding_window=None)
        )
    elif isinstance(spec, BertSpec):
        model = transformers.BertForMaskedLM(transformers.BertConfig(**_bert(spec)))
    elif isinstance(spec, T5Spec):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**_t5(spec)))
    else:
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**_vit(spec)))
    model.train()
    return model


def _gpt2(spec: GPT2Spec) -> dict[str, Any]:
    config = spec.config
    return {
        **config.model_dump(exclude={"dropout"}),
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "bos_token_id": config.vocab_size - 1,
        "eos_token_id": config.vocab_size - 1,
        "use_cache": False,
    }


def _decoder(config: LlamaConfig) -> dict[str, Any]:
    end = config.vocab_size - 1
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    return {**config.model_dump(), **special, "use_cache": False}


def _bert(spec: BertSpec) -> dict[str, Any]:
    config = spec.config
    return {
        **config.model_dump(exclude={"dropout"}),
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "pad_token_id": None,
    }


def _t5(spec: T5Spec) -> dict[str, Any]:
    config = spec.config
    return {
        **config.model_dump(exclude={"dropout"}),
        "dropout_rate": config.dropout,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }


def _vit(spec: ViTSpec) -> dict[str, Any]:
    config = spec.config
    return {
        **config.model_dump(exclude={"dropout"}),
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
    }
