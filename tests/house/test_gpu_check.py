"""The GPU check runs here too, on the CPU and on tiny models, by the path it takes on a GPU."""

import json
import subprocess

import pytest
import torch

from benchmarks.gpu_models import MODELS
from benchmarks.gpu_report import MODEL_NAMES, faults, medians, missing, page, verdict
from stagewright.core.profile.profile import Profile


@pytest.fixture
def check(repository, forked_python):
    def run(*arguments):
        command = [forked_python, str(repository / "scripts/gpu_check"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    return run


def comparison(relative_error):
    return {"predicted": 1 + relative_error, "measured": 1.0, "relative_error": relative_error}


def report(device="cuda", *, time=0.01, memory=-0.02, passed=3, failed=0):
    stage = {
        "stages": 2,
        "stage": 0,
        "layers": 3,
        "in_flight": 2,
        "time": comparison(time),
        "memory": comparison(memory),
    }
    models = [
        {"model": name, "parameters": 10, "whole": comparison(0.0), "stages": [stage]}
        for name in MODEL_NAMES
    ]
    return {
        "device": device,
        "device_name": device,
        "torch": "2",
        "small": False,
        "tests": {"passed": passed, "failed": failed, "skipped": 0},
        "models": models,
        "median_errors": medians(models),
    }


def test_errors_above_five_per_cent_do_not_pass():
    assert faults(report()) == []
    assert "stage_time is 6.0%" in faults(report(time=0.06))[0]
    assert "stage_memory is 7.0%" in faults(report(memory=-0.07))[0]
    assert faults(report("cpu", time=0.5, memory=0.5)) == []


def test_failed_and_missing_tests_do_not_pass():
    assert faults(report(failed=1)) == ["1 gpu tests failed"]
    assert faults(report(passed=0)) == ["no gpu test ran"]


def test_a_model_that_was_not_measured_does_not_pass():
    found = report("cpu")
    found["models"].append({"model": "other", "error": "took longer than 5 s (--limit)"})
    assert faults(found) == ["other: took longer than 5 s (--limit)"]
    assert "Not measured: took longer than 5 s" in page(found)


def test_the_whole_check_passes_and_a_part_of_it_does_not():
    """One model alone once wrote "Passed."."""
    assert verdict(report()) == "Passed."
    assert page(report()).endswith("\nPassed.\n")
    alone = report()
    del alone["models"][1:]
    assert missing(alone) == list(MODEL_NAMES[1:])
    assert verdict(alone).startswith("Incomplete: 1 of 4 models measured")
    assert "Passed" not in page(alone)
    untested = {**report(), "tests": None}
    assert verdict(untested).startswith("Incomplete")
    assert verdict({**report(), "small": True}) != "Passed."
    assert "not judged" in verdict(report("cpu"))
    assert verdict(report(time=0.06)).startswith("Not passed: ")


def test_the_check_is_about_every_model_there_is():
    assert set(MODEL_NAMES) == set(MODELS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_ends_with_3(check, tmp_path):
    done = check("--output", tmp_path)
    assert done.returncode == 3
    assert "GPU node" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_model_that_takes_too_long_is_named_and_the_rest_is_kept(check, tmp_path):
    options = ("--device", "cpu", "--small", "--skip-tests", "--models", "vit-large")
    before = {"device": "cpu", "device_name": "cpu", "torch": torch.__version__, "small": True}
    model = report("cpu")["models"][0]
    (tmp_path / "gpu_check.json").write_text(
        json.dumps({**before, "tests": None, "models": [model]})
    )
    done = check(*options, "--limit", 0.1, "--output", tmp_path, "--profiles", tmp_path)
    assert done.returncode == 1
    assert "vit-large: took longer than 0 s (--limit)" in done.stderr
    models = json.loads((tmp_path / "gpu_check.json").read_text())["models"]
    assert [found["model"] for found in models] == [MODEL_NAMES[0], "vit-large"]


def test_one_model_goes_all_the_way(check, tmp_path):
    options = ("--device", "cpu", "--small", "--skip-tests", "--models", "gpt2-medium")
    done = check(*options, "--budget", 0.1, "--output", tmp_path, "--profiles", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert json.loads(done.stdout) == found
    (model,) = found["models"]
    assert [(row["stages"], row["stage"]) for row in model["stages"]] == [
        (2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3),
    ]  # fmt: skip
    assert all(abs(row["memory"]["relative_error"]) < 0.1 for row in model["stages"])
    assert all(row["time"]["measured"] > 0 for row in model["stages"])
    profile = Profile.read(tmp_path / "gpt2-medium-small-cpu.json")
    assert len(profile.layers) == model["layers"]
    assert "## gpt2-medium" in (tmp_path / "gpu_check.md").read_text()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_small_models_are_the_shape_of_the_large_ones(name):
    with torch.device("meta"):
        large = MODELS[name](False).model
    millions = {"gpt2-medium": 355, "resnet50": 25.6, "llama-1b": 1236, "vit-large": 304}
    parameters = sum(parameter.numel() for parameter in large.parameters())
    assert parameters / 1e6 == pytest.approx(millions[name], rel=0.01)
    small = MODELS[name](True).model
    kinds = {type(module) for module in large.modules()}
    assert {type(module) for module in small.modules()} == kinds
