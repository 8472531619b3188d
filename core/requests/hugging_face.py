"""A Hugging Face ``config.json``, read as a model of one of this release's families.

Every key is read, must have the value that the family is built with, or is known to change neither
shapes nor time; any other is refused by name, unless it switches something off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInput

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


_DECODER = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "max_position_embeddings"
)
_DECODER_DEFAULTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "num_key_value_heads": lambda config: config["num_attention_heads"],
    "tie_word_embeddings": lambda _: False,
}
_DECODER_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0}
_HIDDEN_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "vocab_size n_positions n_embd n_layer n_head",
        fixed={"activation_function": "gelu_new", "tie_word_embeddings": True},
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "llama": Family("LlamaForCausalLM", _DECODER, _DECODER_DEFAULTS, _DECODER_FIXED),
    "qwen2": Family("Qwen2ForCausalLM", _DECODER, _DECODER_DEFAULTS, _DECODER_FIXED),
    "mixtral": Family(
        "MixtralForCausalLM",
        _DECODER + " num_local_experts num_experts_per_tok",
        _DECODER_DEFAULTS,
        _DECODER_FIXED,
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


def read_hugging_face_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` as the JSON of a `ModelSpec`, which checks its values.

    Raises:
        InvalidInput: It describes a model that this release does not build.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise _refusal("model_type", f"is {_shown(kind)}; built are {', '.join(FAMILIES)}")
    _check_architecture(config, family)
    values: dict[str, Any] = {}
    for name in family.sizes.split():
        if config.get(name) is None:
            raise _refusal(name, f"is missing, and a {kind} cannot be built without")
        values[name] = config[name]
    for name, default in family.defaults.items():
        found = config.get(name)
        values[name] = default(config) if found is None else found
    for name, value in values.items():
        # Pydantic would take true for 1, and "12" for 12.
        if type(value) is not (bool if name == "tie_word_embeddings" else int):
            raise _refusal(name, f"is {_shown(value)}, which is no number")
    rates = [config[name] for name in family.dropouts if config.get(name) is not None]
    if rates:
        values["dropout"] = rates[0]
        if type(rates[0]) not in (int, float) or any(rate != rates[0] for rate in rates):
            names = ", ".join(family.dropouts)
            raise _refusal(family.dropouts[0], f"is not one rate for all dropouts ({names})")
    _check_rest(config, family, values)
    return {"family": kind, "config": values}


def _check_architecture(config: Mapping[str, Any], family: Family) -> None:
    found = config.get("architectures")
    if found and found != [family.architecture]:
        raise _refusal("architectures", f"is {_shown(found)}; built is {family.architecture}")


def _check_rest(config: Mapping[str, Any], family: Family, values: Mapping[str, Any]) -> None:
    """Refuse every key that says something else than what is built."""
    fixed = {**family.fixed, **_derived(values)}
    for name, value in config.items():
        if name in values or name in ("model_type", "architectures"):
            continue
        if name in fixed:
            if value is not None and value != fixed[name]:
                raise _refusal(name, f"is {_shown(value)}; built is {_shown(fixed[name])}")
        elif name == "layer_types":
            if value is None:
                continue
            if not isinstance(value, list):
                raise _refusal(name, f"is {_shown(value)}, which is no list")
            if any(layer != "full_attention" for layer in value):
                raise _refusal(name, "has layers other than 'full_attention'")
        elif name == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        elif name not in IGNORED and value:
            raise _refusal(name, f"is {_shown(value)}, which this release does not build")


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that follow from the sizes; other values make other shapes."""
    if "n_embd" in values:
        return {"n_inner": 4 * values["n_embd"]}
    if "num_key_value_heads" in values:
        return {"head_dim": values["hidden_size"] // max(values["num_attention_heads"], 1)}
    return {}


def _labels(config: Mapping[str, Any]) -> Mapping[str, str]:
    found = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    if not isinstance(found, Mapping):
        raise _refusal("id2label", f"is {_shown(found)}, which is no object")
    return found


def _shown(value: object) -> str:
    return repr(value)[:80]


def _refusal(name: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"{name[:80]!r} of the Hugging Face config {why}; {INSTEAD}", field=f"/{name[:80]}"
    )
