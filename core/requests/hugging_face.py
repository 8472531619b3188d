"""A Hugging Face ``config.json``, read as a model of one of this release's families.

Every key is read, must have the value that the family is built with, or is known to change neither
shapes nor time; any other is refused by name, unless it switches something off. Of causal language
models all keys are handed on, and what ``transformers`` does not know is refused when it builds
them; keys of parts that are left out are said in notes (`SAID`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, get_args

from ..errors import InvalidInput
from ..models.families import CausalLMConfig, CausalModelType

INSTEAD = (
    "capture the model where its code is ('stagewright capture', or the Python client) and send "
    "the graph"
)

IGNORED = frozenset(
    (
        "_name_or_path", "attention_probs_dropout_prob", "attn_pdrop", "bos_token_id",
        "classifier_dropout", "decoder_start_token_id", "dropout_rate", "dtype", "embd_pdrop",
        "encoder_stride", "eos_token_id", "finetuning_task", "gradient_checkpointing",
        "hidden_dropout_prob", "id2label", "initializer_factor", "initializer_range", "label2id",
        "layer_norm_eps", "layer_norm_epsilon", "max_window_layers", "n_ctx", "n_positions",
        "num_labels", "output_past", "pad_token_id", "pooler_act", "pooler_output_size",
        "pretraining_tp", "problem_type", "relative_attention_max_distance", "resid_pdrop",
        "return_dict", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
        "router_aux_loss_coef", "scale_attn_weights", "scale_decoder_outputs", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version",
        "use_cache",
    )
)  # fmt: skip
"""Keys of constants, of generation and of heads that are not built; dropouts are read elsewhere."""


@dataclass(frozen=True)
class Family:
    """Keys of a family's ``config.json`` that are read, and the values they must have.

    Attributes:
        architecture: The class that is built.
        sizes: Keys that must be there, as fields of the family's configuration.
        defaults: Other such keys, with what their absence means.
        fixed: Keys whose value has to be this one, if they are there.
        dropouts: Keys of dropout rates, which have to be equal.
    """

    architecture: str
    sizes: str
    defaults: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    dropouts: tuple[str, ...] = ()


_HIDDEN_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "vocab_size n_positions n_embd n_layer n_head",
        fixed={"activation_function": "gelu_new", "tie_word_embeddings": True},
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "bert": Family(
        "BertForMaskedLM",
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "max_position_embeddings",
        fixed={
            "hidden_act": "gelu",
            "type_vocab_size": 2,
            "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
        },
        dropouts=_HIDDEN_DROPOUTS,
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "vocab_size d_model d_kv d_ff num_layers num_heads",
        {"num_decoder_layers": lambda config: config["num_layers"]},
        {
            "feed_forward_proj": "relu",
            "dense_act_fn": "relu",
            "is_encoder_decoder": True,
            "relative_attention_num_buckets": 32,
            "tie_word_embeddings": True,
        },
        ("dropout_rate",),
    ),
    "vit": Family(
        "ViTForImageClassification",
        "image_size patch_size num_channels hidden_size intermediate_size num_hidden_layers "
        "num_attention_heads",
        # A config without labels stands for two (transformers.PretrainedConfig).
        {"num_labels": lambda config: len(_labels(config))},
        {"hidden_act": "gelu", "qkv_bias": True},
        _HIDDEN_DROPOUTS,
    ),
}


CAUSAL_TYPES = frozenset(get_args(CausalModelType))

TEXT_TYPES = {"gemma3": "gemma3_text"}
"""Types of models of images and text, whose text part is read, with the type of that part."""

NOT_IN_FILES: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""Sizes that published files leave to the defaults of ``transformers``."""

SDPA = "attention is that of torch (scaled_dot_product_attention)"
MTP = "layers that predict several tokens (multi-token prediction) are in no stage"

SAID: Mapping[str, str] = {
    "_attn_implementation": SDPA,
    "attn_implementation": SDPA,
    "audio_config": "only the language model is planned, and no audio encoder",
    "auto_map": "the model is that of transformers, and runs no code of the repository",
    "ep_size": "experts are all in the stage of their layer",
    "moe_layer_freq": "every layer from first_k_dense_replace on has experts",
    "num_mtp_layers": MTP,
    "num_nextn_predict_layers": MTP,
    "output_attentions": "attention weights are not returned",
    "output_hidden_states": "hidden states are not returned",
    "output_router_logits": "the loss has no term that balances experts",
    "quantization_config": "weights are planned unquantized, in the precision of the plan",
    "vision_config": "only the language model is planned, and no vision tower",
}
"""Keys of a causal language model's file whose part is left out, with what is planned instead."""

MEANS_NOTHING: Mapping[str, tuple[object, ...]] = {
    "_attn_implementation": ("sdpa",), "attn_implementation": ("sdpa",), "ep_size": (1,),
    "moe_layer_freq": (1,),
}  # fmt: skip
"""Values of them that are what is planned; empty ones and zero are for every key."""

LEFT_OUT = IGNORED - {
    "embd_pdrop", "layer_norm_eps", "max_window_layers", "resid_pdrop", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta",
} | SAID.keys() | {
    "architectures", "aux_loss_alpha", "cache_implementation", "experts_per_token",
    "initial_context_length", "model_max_length", "model_type", "scoring_func", "seq_aux",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip
"""Keys of a causal language model's file that are not handed on: those of `SAID`, and those that
change nothing of what is planned, such as those of generation."""


def read_hugging_face_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` as the JSON of a `ModelSpec`, which checks its values.

    Raises:
        InvalidInput: It describes a model that this release does not build.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in TEXT_TYPES:
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise _missing("text_config", kind)
        whole = {name: value for name, value in config.items() if name in SAID}
        config = whole | text | {"model_type": TEXT_TYPES[kind]}
        kind = TEXT_TYPES[kind]
    if isinstance(kind, str) and kind in CAUSAL_TYPES:
        return _read_causal(kind, config)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        built = [*FAMILIES, *TEXT_TYPES, *sorted(CAUSAL_TYPES)]
        near = get_close_matches(str(kind)[:80], built, n=1, cutoff=0.85)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise _refusal("model_type", f"is {_shown(kind)}{meant}; built are {', '.join(built)}")
    _check_architecture(config, family)
    values: dict[str, Any] = {}
    for name in family.sizes.split():
        if config.get(name) is None:
            raise _missing(name, kind)
        values[name] = config[name]
    for name, default in family.defaults.items():
        found = config.get(name)
        values[name] = default(config) if found is None else found
    for name, value in values.items():
        _whole(name, value)
    rates = [config[name] for name in family.dropouts if config.get(name) is not None]
    if rates:
        values["dropout"] = rates[0]
        if type(rates[0]) not in (int, float) or any(rate != rates[0] for rate in rates):
            names = ", ".join(family.dropouts)
            raise _refusal(family.dropouts[0], f"is not one rate for all dropouts ({names})")
    _check_rest(config, family, values)
    return {"family": kind, "config": values}


def _read_causal(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a causal language model's file: the sizes that all have, and all else as settings."""
    found = config.get("architectures") or []
    if not isinstance(found, list) or not all(str(one).endswith("ForCausalLM") for one in found):
        raise _refusal("architectures", f"is {_shown(found)}; built are those ...ForCausalLM")
    config = {**NOT_IN_FILES.get(kind, {}), **config}
    values: dict[str, Any] = {"model_type": kind, "num_key_value_heads": None}
    for name in CausalLMConfig.model_fields:
        found = config.get(name)
        if name in values or name == "settings":
            continue
        if found is None:
            raise _missing(name, kind)
        values[name] = _whole(name, found)
    if "num_key_value_heads" in config:
        # What null means is the same in every type; what absence means is not.
        found = config["num_key_value_heads"]
        values["num_key_value_heads"] = (
            values["num_attention_heads"] if found is None else _whole("num_key_value_heads", found)
        )
    values["settings"] = {
        name: value
        for name, value in config.items()
        if name not in values and name not in LEFT_OUT and not name.startswith("_")
    }
    return {"family": "causal_lm", "config": values, "left_out": _say_left_out(config)}


def _say_left_out(config: Mapping[str, Any]) -> list[str]:
    """Return the parts of a file that the model built from it lacks, a sentence each."""
    said = []
    for name, instead in SAID.items():
        value = config.get(name)
        if value and value not in MEANS_NOTHING.get(name, ()):
            method = value.get("quant_method") if isinstance(value, Mapping) else value
            shown = f" ({_shown(method)})" if isinstance(method, str | int) else ""
            said.append(f"{name}{shown} of config.json is left out: {instead}")
    return said


def _whole(name: str, value: object) -> int:
    # Pydantic would take true for 1, and "12" for 12.
    if type(value) is not int:
        raise _refusal(name, f"is {_shown(value)}, which is no whole number", "correct it")
    return value


def _check_architecture(config: Mapping[str, Any], family: Family) -> None:
    found = config.get("architectures")
    if found and found != [family.architecture]:
        raise _refusal("architectures", f"is {_shown(found)}; built is {family.architecture}")


def _check_rest(config: Mapping[str, Any], family: Family, values: Mapping[str, Any]) -> None:
    """Refuse every key that says something else than what is built."""
    fixed = dict(family.fixed)
    if "n_embd" in values:
        fixed["n_inner"] = 4 * values["n_embd"]
    for name, value in config.items():
        if name in values or name in ("model_type", "architectures"):
            continue
        if name in fixed:
            if value is not None and value != fixed[name]:
                raise _refusal(name, f"is {_shown(value)}; built is {_shown(fixed[name])}")
        elif name not in IGNORED and value:
            raise _refusal(name, f"is {_shown(value)}, which this release does not build")


def _labels(config: Mapping[str, Any]) -> Mapping[str, str]:
    found = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    if not isinstance(found, Mapping):
        raise _refusal("id2label", f"is {_shown(found)}, which is no object")
    return found


def _shown(value: object) -> str:
    return repr(value)[:80]


def _missing(name: str, kind: object) -> InvalidInput:
    return _refusal(name, f"is missing, and a {kind} cannot be built without", "add it to the file")


def _refusal(name: str, why: str, instead: str = INSTEAD) -> InvalidInput:
    return InvalidInput(
        f"{name[:80]!r} of the Hugging Face config {why}; {instead}", field=f"/{name[:80]}"
    )
