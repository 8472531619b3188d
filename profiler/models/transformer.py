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

HIDDEN_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def build_transformer(spec: TransformersSpec) -> nn.Module:
    """Build a model with random weights, in training mode, on the current default device."""
    try:
        import transformers
    except ImportError as error:
        raise InvalidInput(
            f"the family {spec.family!r} needs transformers; in the checkout run: "
            "pip install -e '.[hf]'",
            field="/model/family",
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model: nn.Module
    if isinstance(spec, GPT2Spec):
        settings = _config(spec, "resid_pdrop", "embd_pdrop", "attn_pdrop")
        end = spec.config.vocab_size - 1
        settings |= {"bos_token_id": end, "eos_token_id": end, "use_cache": False}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    elif isinstance(spec, LlamaSpec):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_decoder(spec.config)))
    elif isinstance(spec, Qwen2Spec):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_decoder(spec.config)))
    elif isinstance(spec, MixtralSpec):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**_decoder(spec.config), sliding_window=None)
        )
    elif isinstance(spec, BertSpec):
        settings = _config(spec, *HIDDEN_DROPOUTS) | {"pad_token_id": None}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**settings))
    elif isinstance(spec, T5Spec):
        settings = _config(spec, "dropout_rate") | {"decoder_start_token_id": 0, "use_cache": False}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))
    else:
        settings = _config(spec, *HIDDEN_DROPOUTS)
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**settings))
    model.train()
    return model


def _config(spec: GPT2Spec | BertSpec | T5Spec | ViTSpec, *dropouts: str) -> dict[str, Any]:
    """Return a family's settings with its dropout under the names ``transformers`` gives it."""
    config = spec.config
    return {**config.model_dump(exclude={"dropout"}), **dict.fromkeys(dropouts, config.dropout)}


def _decoder(config: LlamaConfig) -> dict[str, Any]:
    end = config.vocab_size - 1
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    return {**config.model_dump(), **special, "use_cache": False}
