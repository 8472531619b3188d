"""A Hugging Face ``config.json`` is the model that ``transformers`` builds of it, or is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from stagewright.core.errors import InvalidInput
from stagewright.core.models.families import ModelSpec
from stagewright.core.requests.hugging_face import FAMILIES, IGNORED, read_hugging_face_config
from stagewright.core.requests.model_input import expand_model, read_model

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 32},
    "bert": {"hidden_size": 48, "num_attention_heads": 4, "hidden_dropout_prob": 0.1},
    "t5": {"d_model": 48, "d_kv": 8, "d_ff": 96, "num_layers": 3, "num_heads": 4},
    "vit": {"hidden_size": 48, "num_attention_heads": 4, "image_size": 64},
}
COMMON = {"intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """What ``transformers`` writes, with every default of its own."""
    transformers = pytest.importorskip("transformers")
    known = transformers.AutoConfig.for_model(family)
    common = {name: value for name, value in COMMON.items() if hasattr(known, name)}
    config = transformers.AutoConfig.for_model(family, **{**common, **SMALL[family], **changes})
    found: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return found


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_one_that_transformers_builds(family):
    transformers = pytest.importorskip("transformers")
    from stagewright.profiler.models.families import build_model

    config = config_of(family)
    spec = read_model(config)
    theirs = getattr(transformers, FAMILIES[family].architecture)
    with torch.device("meta"):
        expected = theirs(type(transformers.AutoConfig.for_model(family)).from_dict(config))
        assert shapes(build_model(spec)) == shapes(expected)
    rates = {m.p for m in expected.modules() if isinstance(m, torch.nn.Dropout)} - {0.0}
    assert not rates or getattr(spec.config, "dropout", 0.0) in rates


@pytest.mark.parametrize(
    ("family", "change", "name"),
    [
        ("gpt2", {"n_inner": 100}, "n_inner"),
        ("gpt2", {"attn_pdrop": 0.5}, "resid_pdrop"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("gpt2", {"n_layer": None}, "n_layer"),
        ("gpt2", {"n_layer": True}, "n_layer"),
        ("gpt2", {"n_layer": "12"}, "n_layer"),
        ("gpt2", {"n_layer": 10**9}, "n_layer"),
        ("gpt2", {"n_embd": 50}, ""),
        ("gpt2", {"resid_pdrop": [0.1]}, "resid_pdrop"),
        ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}, "architectures"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("t5", {"feed_forward_proj": "gated-gelu"}, "feed_forward_proj"),
        ("vit", {"qkv_bias": False}, "qkv_bias"),
        ("vit", {"id2label": 7}, "id2label"),
        ("bert", {"model_type": "mamba"}, "model_type"),
        ("bert", {"model_type": ["bert"]}, "model_type"),
        ("bert", {"x" * 500: 1}, "x" * 80),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(family, change, name):
    with pytest.raises(InvalidInput, match="Hugging Face config") as refused:
        read_model({**config_of(family), **change})
    assert refused.value.field == (f"/{name}" if name else "")
    instead = ("stagewright capture", "add it to the file", "correct it")
    assert any(words in str(refused.value) for words in instead) or name in ("", "n_layer")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_of_any_type_is_taken_or_refused(family):
    """A number for ``layer_types`` was a TypeError, answered with a 500."""
    known = FAMILIES[family]
    sizes = {name: 8 for name in known.sizes.split()}
    names = {*sizes, *known.defaults, *known.fixed, *known.dropouts, *IGNORED}
    names |= {"model_type", "architectures", "n_inner", "id2label", "unknown"}
    values = (5, -1, 0, 0.5, True, False, "x", "", [], [[]], [5], {}, {"x": {}}, None)
    for name in sorted(names):
        for value in (*values, float("inf"), float("nan"), 10**400, -(10**4000)):
            with suppress(InvalidInput):
                expand_model({"model": {"model_type": family, **sizes, name: value}})
                read_model({"model_type": family, **sizes, name: value})


def test_keys_that_change_nothing_may_say_anything():
    config = config_of("gpt2") | {"torch_dtype": "bfloat16", "eos_token_id": [1, 2]}
    config |= {"architectures": ["GPT2LMHeadModel"], "use_cache": True, "unknown_feature": False}
    spec = TypeAdapter(ModelSpec).validate_python(read_hugging_face_config(config))
    assert spec.config.n_layer == 3
