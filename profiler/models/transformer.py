"""Builds the transformer families with the package ``transformers``."""

from __future__ import annotations

import inspect
import logging
from difflib import get_close_matches
from typing import Any

from torch import nn

from ...core.errors import InvalidInput
from ...core.models.families import (
    BertSpec,
    CausalLMConfig,
    CausalLMSpec,
    GPT2Spec,
    LlamaConfig,
    LlamaSpec,
    MixtralSpec,
    Qwen2Spec,
    T5Spec,
    ViTSpec,
)

TransformersSpec = (
    GPT2Spec | LlamaSpec | Qwen2Spec | MixtralSpec | CausalLMSpec | BertSpec | T5Spec | ViTSpec
)

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
    elif isinstance(spec, CausalLMSpec):
        model = _build_causal_lm(spec.config)
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


def _decoder(config: LlamaConfig | CausalLMConfig, *left_out: str) -> dict[str, Any]:
    end = config.vocab_size - 1
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    return {**config.model_dump(exclude=set(left_out)), **special, "use_cache": False}


OLDER_NAMES = (
    "head_dim", "partial_rotary_factor", "rope_local_base_freq", "rope_scaling", "rope_theta",
    "sliding_window_pattern",
)  # fmt: skip
"""Settings that ``transformers`` reads without declaring them, in files of earlier releases."""

NOT_READ = (
    "full_attn_mod", "hidden_act", "interpolate_factor", "max_window_layers",
    "sliding_window_size", "topk_method",
)  # fmt: skip
"""Settings in published files of types of which ``transformers`` reads none of that name."""

NOT_SET = (
    "bos_token_id", "eos_token_id", "output_router_logits", "pad_token_id", "use_cache",
)  # fmt: skip
"""Declared settings that are chosen here: those of generation, and of outputs."""


def _build_causal_lm(config: CausalLMConfig) -> nn.Module:
    """Build the model that ``transformers`` has for a type and its settings."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

    kind = config.model_type
    if kind not in CONFIG_MAPPING:
        raise InvalidInput(
            f"the transformers installed here has no {kind!r}; install a newer one",
            field="/model/config/model_type",
        )
    known = {*_parameters(CONFIG_MAPPING[kind]), *CONFIG_MAPPING[kind].attribute_map}
    known -= {*_parameters(PreTrainedConfig), *NOT_SET}
    settings: dict[str, Any] = _decoder(config, "model_type", "settings")
    if config.num_key_value_heads is None:
        del settings["num_key_value_heads"]
    for name, value in config.settings.items():
        if name in known or (name in OLDER_NAMES and value is not None):
            settings[name] = value
    try:
        made = CONFIG_MAPPING[kind](**settings)
        _check_rest(made, config, known)
        model: nn.Module = AutoModelForCausalLM.from_config(made)  # type: ignore[no-untyped-call]
    except InvalidInput:
        raise
    except Exception as error:  # whatever a configuration leads transformers to
        raise InvalidInput(
            f"transformers builds no {kind} of these settings: {_reason(error, config)}",
            field="/model/config",
        ) from error
    return model


def _reason(error: Exception, config: CausalLMConfig) -> str:
    """Return what transformers said, without Python's words for a value that is null."""
    if isinstance(error, KeyError):  # says what was looked for, such as an activation, and no more
        return f"it knows no {error}"
    empty = sorted(name for name, value in config.settings.items() if value is None)
    if isinstance(error, TypeError) and "NoneType" in str(error) and empty:
        return f"a value is needed where the file has null; give one to {' or '.join(empty)}"
    # A validator of transformers puts its name and the type of its error in front.
    _, _, said = f"ValueError: {error}".rpartition("ValueError: ")
    return " ".join(said.split())[:300]


def _check_rest(made: Any, config: CausalLMConfig, known: set[str]) -> None:
    """Refuse settings that were not handed on, and heads that only the forward would trip over."""
    for name, value in config.settings.items():
        # Files hold what follows from other settings, too; what is unknown and off changes nothing.
        if (
            name in (*known, *OLDER_NAMES, *NOT_READ)
            or not value
            or getattr(made, name, None) == value
        ):
            continue
        near = get_close_matches(name, known - CausalLMConfig.model_fields.keys(), n=1)
        raise InvalidInput(
            f"{config.model_type} of transformers has no setting {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ", or none for training; remove it"),
            field=f"/model/config/settings/{name}",
        )
    active = getattr(made, "num_experts_per_tok", None) or 0
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if active > getattr(made, name, active):
            raise InvalidInput(
                f"num_experts_per_tok ({active}) is more than {name} ({getattr(made, name)})",
                field=f"/model/config/settings/{name}",
            )
    heads, groups = made.num_attention_heads, made.num_key_value_heads
    if heads % groups:
        raise InvalidInput(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads, which "
            f"transformers sets to {groups} where it is not given; give num_key_value_heads",
            field="/model/config/num_key_value_heads",
        )


def _parameters(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters)
