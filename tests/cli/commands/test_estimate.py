"""`estimate`, and `plan` of models by their names."""

import json
import re
from typing import get_args, get_type_hints

import pytest

from stagewright.cli.commands import capture, estimate
from stagewright.core.models.families import ModelSpec
from stagewright.core.plan.plan import Plan
from stagewright.core.plan.table import describe_error
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.presets import PRESETS


def test_profile_is_written_and_labelled(run):
    ran = run("estimate", "resnet18", "--device", "H100", "--microbatch", "4", "-o", "found.json")
    assert ran.code == 0, ran.stderr
    found = Profile.read("found.json")
    assert found.provenance.source == "estimated"
    assert found.inputs[0].shape == (4, 3, 224, 224)
    assert found.inputs[0].dtype == "bfloat16"
    assert "ESTIMATED ResNet on NVIDIA H100 SXM" in ran.stdout
    assert "step times were up to" in ran.stdout
    assert ran.stderr.splitlines()[-1] == (
        "next: stagewright plan found.json --devices 4xH100 -o plan.json"
    )


def test_a_family_with_its_configuration(run):
    ran = run("estimate", "mlp", "--config", '{"num_layers": 3}', "-d", "cpu", "--json")
    assert ran.code == 0, ran.stderr
    found = Profile.from_json(ran.stdout)
    assert (len(found.layers), found.provenance.device) == (5, "cpu")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("resnet51", "-d", "H100"), "did you mean"),
        (("resnet18", "-d", "H1000"), "unknown device 'H1000'"),
        (("resnet18", "-d", "H100", "--precision", "int8"), "--precision takes fp32, bf16"),
        (("resnet18", "-d", "H100", "--sequence", "9"), "has no sequence length"),
        (("resnet18", "-d", "H100", "--microbatch", "0"), "it must be at least 1"),
        (("mlp", "-d", "H100", "--config", "{"), "--config is not JSON"),
        (("resnet18", "-d", "H100", "--calibrate", "none.json"), "cannot read none.json"),
    ],
)
def test_what_does_not_fit_is_a_usage_error(run, words, said):
    ran = run("estimate", *words)
    assert ran.code == 2
    assert said in ran.stderr


def test_plan_of_a_name_says_what_was_taken_and_how_to_choose(run):
    ran = run("plan", "resnet18", "--devices", "2x24GB", "-o", "plan.json")
    assert ran.code == 0, ran.stderr
    made = Plan.read("plan.json")
    assert made.estimated
    assert made.error_band is not None
    assert f"ESTIMATED profile, {describe_error(made)}" in ran.stdout
    assert (
        "assuming that 24GB means RTX4090 (other candidates: RTX3090, L4, A10G); "
        "choose with --estimate-for" in ran.stderr
    )
    assert "estimated resnet18 on NVIDIA GeForce RTX 4090" in ran.stderr


def test_the_profile_planned_from_can_be_written_and_explained(run):
    ran = run(
        "plan", "resnet18", "-d", "2xcpu", "--microbatch", "2", "--no-cache", "-o", "plan.json"
    )
    assert ran.code == 0, ran.stderr
    hint = ran.stderr.splitlines()[-2]
    words = hint.removeprefix("next: stagewright ").split()
    assert run(*words).code == 0
    assert Profile.read("profile.json").content_id() == Plan.read("plan.json").profile_id
    explained = run("explain", "plan.json", "profile.json", "-d", "2xcpu")
    assert explained.code == 0, explained.stderr


def test_plan_of_a_name_for_named_devices(run):
    ran = run(
        "plan", "resnet18", "-d", "2xL4", "--microbatch", "3", "--precision", "fp32", "--json"
    )
    assert (ran.code, ran.stderr) == (0, "")
    made = Plan.from_json(ran.stdout)
    assert (made.inputs[0].shape[0], made.inputs[0].dtype) == (3, "float32")
    assert made.stages[0].devices[0].startswith("L4:")
    assert made.options.recompute == "auto"


def test_schedule_micro_batches_and_memory_are_chosen_for_an_estimate(run):
    ran = run("plan", "resnet18", "-d", "4xL4", "--json")
    assert ran.code == 0, ran.stderr
    made = Plan.from_json(ran.stdout)
    assert made.options.precision == "bf16_mixed"
    assert made.bytes_per_parameter.total == 18
    assert all(stage.reserved.context_bytes for stage in made.stages)
    said = f"{made.num_microbatches} micro-batches chosen"
    assert made.notes[0].startswith(said), made.notes
    assert made.notes[1].startswith(f"schedule {made.schedule} chosen"), made.notes


def test_shorter_samples_are_offered_where_they_fit(run):
    """Cause: --sequence was offered nowhere, then also where it could not help."""
    asked = ("plan", "gpt2", "--estimate-for", "L4", "--recompute", "never", "-m", "1")
    ran = run(*asked, "-d", "1x4GB")
    assert ran.code == 3
    said = re.search(r", or --sequence (\d+)$", ran.stderr, re.MULTILINE)
    assert said, ran.stderr
    assert run(*asked, "-d", "1x4GB", "--sequence", said[1]).code == 0
    ran = run(*asked, "-d", "1x2GB", "--sequence", "64")  # 124 M parameters at 18 bytes
    assert ran.code == 3
    assert "it would fit with" in ran.stderr
    assert "or --sequence" not in ran.stderr


WEIGHTS_TOO_LARGE = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32000,
    "max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
"""0.51 billion parameters: 8.5 GiB of weights and states before any activation."""


def test_weights_that_do_not_fit_are_told_of_precision_and_not_of_length(run, tmp_path):
    """Cause: a shorter sequence was advised where weights and optimizer alone did not fit."""
    (tmp_path / "config.json").write_text(json.dumps(WEIGHTS_TOO_LARGE))
    asked = ("plan", tmp_path, "--estimate-for", "L4", "--sequence", "16", "-m", "1")
    ran = run(*asked, "-d", "1x8GB")
    assert ran.code == 3
    assert "or --sequence" not in ran.stderr
    assert "--precision bf16:" in ran.stderr
    assert "2 devices" in ran.stderr
    assert run(*asked, "-d", "1x8GB", "--precision", "bf16").code == 0


def test_too_little_memory_is_infeasible_with_ways_out(run):
    ran = run("plan", "resnet18", "-d", "2x1MiB", "--estimate-for", "L4")
    assert ran.code == 3
    assert "no plan fits the devices' memory" in ran.stderr
    assert "--sequence" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "resnet18", "-d", "2x7GB"), "--estimate-for"),
        (
            ("plan", "resnet18", "-d", "2x24GB", "--estimate-for", "X"),
            "unknown device",
        ),
        (("plan", "resnet-18", "-d", "2x24GB"), "did you mean 'resnet18'"),
        (("plan", "missing.json", "-d", "2x24GB"), "cannot read missing.json"),
        (("plan", "resnet18", "resnet34", "-d", "2x24GB"), "one model or profiles"),
    ],
)
def test_requests_that_do_not_fit_say_what_would(run, words, said):
    ran = run(*words)
    assert ran.code == 2
    assert said in ran.stderr


def test_options_of_an_estimate_are_refused_with_a_profile(run, profile_file):
    ran = run("plan", profile_file, "-d", "2x1GiB", "--sequence", "9")
    assert ran.code == 2
    assert "--sequence requires a model name" in ran.stderr


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("bf16", "precision 'bf16' means bfloat16 throughout"),
        ("tf32", "--precision"),
    ],
)
def test_a_profile_in_another_precision_is_refused(run, profile_file, precision, said):
    ran = run("plan", profile_file, "-d", "2x1GiB", "--precision", precision)
    assert ran.code == 2
    assert said in ran.stderr


@pytest.mark.parametrize("command", [estimate.command, capture.command])
def test_help_lists_every_family(command):
    """``capture`` listed four of ten."""
    entries = get_type_hints(command, include_extras=True).values()
    texts = [str(one.help) for entry in entries for one in getattr(entry, "__metadata__", ())]
    specs = get_args(get_args(ModelSpec)[0])
    names = [get_args(spec.model_fields["family"].annotation)[0] for spec in specs]
    assert f"{', '.join(names[:-1])} or {names[-1]}." in [
        text.rpartition(": ")[2] for text in texts
    ]


def test_a_gpu_without_bfloat16_is_a_usage_error(run):
    ran = run("estimate", "mlp", "--config", "{}", "-d", "V100", "--precision", "bf16")
    assert ran.code == 2
    assert "does not support bfloat16; it supports float32, float16" in ran.stderr


def test_without_transformers_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    ran = run("plan", "gpt2", "-d", "2x24GB")
    assert ran.code != 0
    assert "pip install -e '.[hf]'" in ran.stderr


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 32, "use_cache": True,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_unknown_names_lead_to_the_list_of_all(run):
    ran = run("plan", "gpt2-xxl", "-d", "2xH100")
    assert ran.code == 2
    assert "did you mean 'gpt2-xl'" in ran.stderr
    assert "'stagewright estimate --models' lists all" in ran.stderr
    assert len(ran.stderr) < 200
    listed = run("estimate", "--models")
    assert listed.code == 0
    assert all(f"\n{name} " in listed.stdout for name in PRESETS)


def test_a_config_of_hugging_face_is_planned_as_it_is(run, tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found = [
        Plan.from_json(run("plan", where, "-d", "2xL4", "--json").stdout)
        for where in (folder, folder / "config.json")
    ]
    assert found[0] == found[1]
    assert found[0].model == "LlamaForCausalLM"
    assert run("estimate", folder, "--device", "L4", "-o", "profile.json").code == 0
    assert Profile.read("profile.json").inputs[0].shape == (1, 32)


def test_what_a_config_has_and_a_plan_has_not_is_said(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "awq"}}))
    said = "quantization_config ('awq') of config.json is left out: weights are planned unquantized"
    made = Plan.from_json(run("plan", path, "-d", "16xL4", "--json").stdout)
    assert any(note.startswith(said) for note in made.notes)
    assert any("'16xL4' is taken as '2x8xL4'" in note for note in made.notes)
    shown = run("plan", path, "-d", "16xL4").stdout
    assert said in " ".join(shown.split())
    assert said in " ".join(run("estimate", path, "-d", "L4").stdout.split())


def test_configs_that_are_not_built_are_refused_by_file(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": "unheard_of"}))
    ran = run("plan", path, "-d", "2xL4")
    assert ran.code == 2
    assert f"{path}: 'model_type'" in ran.stderr
    path.write_text(json.dumps({**CONFIG, "model_type": "qwen3", "hidden_act": "unheard_of"}))
    for words in (("plan", "-d", "2xL4"), ("estimate", "-d", "L4"), ("capture",), ("profile",)):
        ran = run(words[0], path, *words[1:])
        assert (ran.code, f"{path}: transformers builds no" in ran.stderr) == (2, True), ran.stderr
    # Of Ministral's heads transformers computes nothing where the file has null.
    sizes = {"model_type": "ministral", "head_dim": None, "rms_norm_eps": 1e-5}
    path.write_text(json.dumps(CONFIG | sizes))
    ran = run("plan", path, "-d", "2xL4")
    assert (ran.code, "give one to head_dim" in ran.stderr) == (2, True), ran.stderr
    ran = run("plan", tmp_path / "empty", "-d", "2xL4")
    assert (ran.code, "cannot read" in ran.stderr) == (2, True)
    (tmp_path / "empty").mkdir()
    ran = run("plan", tmp_path / "empty", "-d", "2xL4")
    assert (ran.code, "has no config.json" in ran.stderr) == (2, True)
    ran = run("plan", path, "profile.json", "-d", "2xL4")
    assert (ran.code, "not both" in ran.stderr) == (2, True)
