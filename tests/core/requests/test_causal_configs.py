"""Files of causal language models are what ``transformers`` builds of them, or are refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import torch

from stagewright.core.errors import InvalidInput
from stagewright.core.models.families import CausalLMSpec
from stagewright.core.requests.default_samples import default_sample
from stagewright.core.requests.hugging_face import CAUSAL_TYPES, LEFT_OUT, NOT_IN_FILES, SAID
from stagewright.core.requests.model_input import read_model

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
QWEN3 = {**SIZES, "model_type": "qwen3", "head_dim": 16}
LATENT = {
    "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gemma2": {"head_dim": 32},
    "gpt_oss": {"head_dim": 32, "num_local_experts": 3, "num_experts_per_tok": 2},
    "ministral": {"head_dim": 16},
    "phi3": {"resid_pdrop": 0.1},
}


def written(kind: str, **changes: Any) -> dict[str, Any]:
    """What ``transformers`` writes of a configuration, with every default of its own."""
    transformers = pytest.importorskip("transformers")
    known = {**SIZES, **OWN.get(kind, {}), "pad_token_id": None, **changes}
    found = transformers.AutoConfig.for_model(kind, **known).to_dict()
    return dict(json.loads(json.dumps(found)))


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in model.named_parameters()}


def build(config: dict[str, Any]) -> torch.nn.Module:
    from stagewright.profiler.models.families import build_model

    spec = read_model(config)
    assert isinstance(spec, CausalLMSpec)
    with torch.device("meta"):
        return build_model(CausalLMSpec.model_validate_json(spec.model_dump_json()))


@pytest.mark.parametrize("kind", sorted(CAUSAL_TYPES))
def test_the_model_is_the_one_that_transformers_builds(kind):
    transformers = pytest.importorskip("transformers")
    config = written(kind)
    with torch.device("meta"):
        known = transformers.AutoConfig.for_model(**config)
        expected = transformers.AutoModelForCausalLM.from_config(known)
    made = build(config)
    assert made.training
    assert type(made) is type(expected)
    assert shapes(made) == shapes(expected)
    theirs = known.to_dict()
    differ = {name for name, value in made.config.to_dict().items() if theirs.get(name) != value}
    allowed = {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert differ <= allowed | {"transformers_version", "initializer_range", "pretraining_tp"}
    assert made.config.use_cache is False


def test_the_keys_of_older_files_are_read():
    """A file of 2024 has ``rope_theta`` and a null ``rope_scaling``; no release declares them."""
    config = {**QWEN3, "rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"}
    assert build(config).config.rope_parameters["rope_theta"] == 5e5
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert build({**config, "rope_scaling": scaled}).config.rope_parameters["factor"] == 4.0
    mistral = {**SIZES, "model_type": "mistral", "head_dim": None, "sliding_window": None}
    assert build(mistral).config.sliding_window is None, "null is a value"
    llama = {**SIZES, "model_type": "llama", "num_key_value_heads": None, "head_dim": 32}
    made = build(llama)
    assert made.get_parameter("model.layers.0.self_attn.k_proj.weight").shape == (4 * 32, 64)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3_moe", {"max_window_layers": 48, "decoder_sparse_step": 1, "mlp_only_layers": []}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096}),
        ("deepseek_v3", {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1}),
        ("gpt_oss", {"experts_per_token": 4, "initial_context_length": 4096}),
    ],
)
def test_keys_of_published_files_that_transformers_does_not_read_are_left_out(kind, more):
    """The files of Qwen3-30B-A3B, Gemma 2 and DeepSeek-V3 were refused for these."""
    config = {**SIZES, **OWN.get(kind, {}), "model_type": kind}
    assert shapes(build({**config, **more})) == shapes(build(config))


def test_nothing_is_fetched_or_run_for_a_file(monkeypatch):
    """Keys that name code, kernels or a checkpoint's storage are left out or refused."""
    transformers = pytest.importorskip("transformers")
    asked = []
    monkeypatch.setattr("socket.socket.connect", lambda *found: asked.append(found))
    evil = {
        "auto_map": {"AutoModelForCausalLM": "elsewhere.Model"},
        "quantization_config": {"quant_method": "fp8"},
        "attn_implementation": "kernels-community/flash-attn",
        "_attn_implementation": "kernels-community/flash-attn",
        "_name_or_path": "someone/else",
    }
    made = build({**QWEN3, **evil})
    assert isinstance(made, transformers.Qwen3ForCausalLM)
    assert made.config._attn_implementation == build(QWEN3).config._attn_implementation
    assert not hasattr(made.config, "quantization_config")
    assert not asked
    for name in ("_attn_implementation", "Auto", "x" * 65, "a b"):
        with pytest.raises(ValueError, match="settings"):
            CausalLMSpec.model_validate(
                {"family": "causal_lm", "config": {"settings": {name: "x"}}}
            )
    for name in ("attn_implementation", "dtype", "use_cache", "experts_implementation"):
        spec = CausalLMSpec.model_validate(
            {"family": "causal_lm", "config": {"settings": {name: "x"}}}
        )
        from stagewright.profiler.models.families import build_model

        with pytest.raises(InvalidInput, match=f"no setting '{name}'") as refused:
            build_model(spec)
        assert refused.value.field == f"/model/config/settings/{name}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "unquantized"),
        ({"quantization_config": {"load_in_8bit": True}}, "unquantized"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers (1) of config.json"),
        ({"num_mtp_layers": 2}, "multi-token prediction"),
        ({"attn_implementation": "flash_attention_2"}, "attention is that of torch"),
        ({"_attn_implementation": "eager"}, "attention is that of torch"),
        ({"auto_map": {"AutoModel": "modeling.Own"}}, "runs no code of the repository"),
        ({"output_router_logits": True}, "no term that balances experts"),
        ({"ep_size": 8}, "ep_size (8)"),
        ({"moe_layer_freq": 2}, "every layer from first_k_dense_replace on has experts"),
    ],
)
def test_keys_that_are_left_out_are_said(change, said):
    """Cause: files of quantized models were planned at four times their memory without a word."""
    spec = read_model({**QWEN3, **change})
    assert isinstance(spec, CausalLMSpec)
    (note,) = spec.left_out
    assert said in note
    assert next(iter(change)) in note
    assert CausalLMSpec.model_validate_json(spec.model_dump_json()) == spec


def test_what_is_planned_as_written_needs_no_words():
    plain = {
        "quantization_config": None, "num_nextn_predict_layers": 0, "ep_size": 1,
        "attn_implementation": "sdpa", "output_router_logits": False, "moe_layer_freq": 1,
    }  # fmt: skip
    spec = read_model({**QWEN3, **plain})
    assert spec == read_model(QWEN3)
    assert "left_out" not in CausalLMSpec.model_validate(spec).model_dump_json()


def test_every_key_with_a_note_is_taken_out():
    assert SAID.keys() <= LEFT_OUT


@pytest.mark.parametrize("text", [None, {}, [], "x"])
def test_a_model_of_images_and_text_without_its_text_part_says_so(text):
    """Cause: "'model_type' is 'gemma3' (did you mean 'gemma3'?)"."""
    with pytest.raises(InvalidInput) as refused:
        read_model({"model_type": "gemma3", "text_config": text})
    assert "did you mean" not in str(refused.value)
    assert "is missing" in str(refused.value)


def test_parts_beside_the_text_are_said():
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    whole = {"model_type": "gemma3", "text_config": text, "quantization_config": {"bits": 4}}
    spec = read_model({**whole, "vision_config": {"hidden_size": 1152}})
    assert isinstance(spec, CausalLMSpec)
    assert "unquantized" in spec.left_out[0]
    assert "no vision tower" in spec.left_out[1]


def test_the_text_part_of_gemma3_is_read_with_the_sizes_its_files_leave_out():
    transformers = pytest.importorskip("transformers")
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    made = build({**whole, "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert sum(one.numel() for one in made.parameters()) == 3_880_263_168
    assert made.config.rope_parameters["full_attention"]["factor"] == 8.0
    for kind, sizes in NOT_IN_FILES.items():
        known = transformers.AutoConfig.for_model(kind)
        assert {name: getattr(known, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"hidden_size": None}, "/hidden_size", "is missing.*add it to the file"),
        ({"num_hidden_layers": "4"}, "/num_hidden_layers", "is no whole number"),
        ({"num_hidden_layers": True}, "/num_hidden_layers", "is no whole number"),
        ({"hidden_size": 10**9}, "/hidden_size", "is too large: at most 65536"),
        ({"num_key_value_heads": 3}, "", "must be a multiple of num_key_value_heads"),
        ({"model_type": "lama"}, "/model_type", r"'lama' \(did you mean 'llama'\?\)"),
        ({"num_hidden_layers": -3}, "/num_hidden_layers", "-3 is too small: at least 1"),
        ({"model_type": "roberta"}, "/model_type", "'roberta'; built are .*qwen3_moe"),
        ({"model_type": "kimi_k2"}, "/model_type", "stagewright capture"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "/architectures", "ForCausalLM"),
        ({"architectures": 5}, "/architectures", "ForCausalLM"),
        ({"layer_types": ["full_attention"] * 5000}, "", "layer_types has 5001 values"),
        ({"rope_theta": 1e300}, "", "rope_theta has a number beyond"),
        ({"rope_scaling": [[[[[[1]]]]]]}, "", "nested more than 4 deep"),
        ({"hidden_act": "x" * 101}, "", "hidden_act has 101 letters"),
        ({"x" * 500: 1}, "/" + "x" * 500, "should match pattern"),
        (
            {"text_config": {"model_type": "gemma3_text"}, "model_type": "gemma3"},
            "/hidden_size",
            "is missing",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_before_anything_is_built(change, field, words):
    with pytest.raises(InvalidInput, match=words) as refused:
        read_model({**QWEN3, **change})
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dims": 32}, "no setting 'head_dims'; did you mean 'head_dim'"),
        ({"model_type": "deepseek_v3", "qk_head_dim": 17}, "no setting 'qk_head_dim'"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 9},
            r"num_experts_per_tok \(9\) is more than num_experts \(4\)",
        ),
        ({"clip": 3.0}, "no setting 'clip'.*remove it"),
        ({"mtp_num_hidden_layers": 1}, "no setting 'mtp_num_hidden_layers'.*remove it"),
        ({"hidden_act": "nope"}, "it knows no 'nope'"),
        ({"head_dim": "16"}, "expected int, got str"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types`"),
        ({"rope_scaling": {"rope_type": "nope"}}, "it knows no 'nope'"),
    ],
)
def test_what_transformers_does_not_build_is_said_in_its_words(change, words):
    with pytest.raises(InvalidInput, match=words):
        build({**QWEN3, **change})


def test_heads_that_a_file_leaves_out_are_those_of_transformers():
    config = {name: value for name, value in QWEN3.items() if name != "num_key_value_heads"}
    with pytest.raises(InvalidInput, match="which transformers sets to 32"):
        build(config)
    assert build({**config, "model_type": "gemma2"}).config.num_key_value_heads == 4


def test_what_is_unknown_and_off_changes_nothing():
    assert shapes(build({**QWEN3, "clip": False, "window": None})) == shapes(build(QWEN3))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "deepseek_v3"])
def test_a_value_of_any_type_is_taken_or_refused(kind):
    names = {*SIZES, *LEFT_OUT, "settings", "layer_types", "rope_scaling", "architectures"}
    values = (5, -1, 0, 0.5, True, "x", "", [], [[]], [5], {}, {"x": {}}, None)
    for name in sorted(names):
        for value in (*values, float("inf"), float("nan"), 10**400, -(10**4000)):
            with suppress(InvalidInput):
                read_model({"model_type": kind, **SIZES, name: value})


def test_the_sample_is_within_the_models_positions():
    spec = read_model(QWEN3)
    assert isinstance(spec, CausalLMSpec)
    assert default_sample(spec).inputs["input_ids"].shape == (1, 64)
    with pytest.raises(InvalidInput, match="maximum sequence length of 64"):
        default_sample(spec, 1, 65)
