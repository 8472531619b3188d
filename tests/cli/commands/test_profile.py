"""`profile` of families, of requests in files, and of people's own models."""

import sys

import pytest

from stagewright.core.profile.profile import Profile

THEIRS = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def sample():
    return torch.randn(3, 4)

def wrong_sample():
    return torch.randn(3, 5)

def target():
    return torch.tensor([0, 1, 1])

loss = torch.nn.functional.cross_entropy

def fails():
    raise KeyError("no weights")

def no_model():
    return 3

made = model()
NUMBER = 3
"""

OWN = ("theirs:model", "--sample", "theirs:sample")
QUICK = ("--budget", "0.01")


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A module ``theirs`` in the current directory."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    yield "theirs"
    sys.modules.pop("theirs", None)


def test_family_as_a_table(run):
    config = '{"num_layers": 2, "input_size": 4}'
    ran = run("profile", "--family", "mlp", "--config", config, "--input", "input=2x4", *QUICK)
    assert ran.code == 0, ran.stderr
    assert ran.stdout.startswith("layer ")
    assert ran.stderr.splitlines() == [
        "wrote profile.json",
        "next: stagewright plan profile.json --devices 2xcpu -o plan.json",
    ]
    profile = Profile.read("profile.json")
    assert profile.spec is not None
    assert profile.inputs[0].shape == (2, 4)


def test_family_with_a_target_has_a_loss_and_json_is_the_file(run):
    words = ["--input", "input=2x64", "--target", "2:int64:randint:0:10", "-o", "p.json"]
    ran = run("profile", "--family", "mlp", *words, *QUICK, "--threads", "1", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    profile = Profile.from_json(ran.stdout)
    assert profile == Profile.read("p.json")
    assert profile.loss is not None
    assert profile.provenance.num_threads == 1


def test_request_in_a_file(run, tmp_path):
    (tmp_path / "request.json").write_text(
        '{"model": {"family": "mlp", "config": {"num_layers": 1}},'
        ' "sample": {"inputs": {"input": {"shape": [2, 64]}}},'
        ' "profiling": {"budget_s": 0.01}}'
    )
    ran = run("profile", "request.json", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    assert len(Profile.from_json(ran.stdout).layers) == 1


def test_precision_and_deduplication_are_recorded(run, theirs):
    words = ["--autocast", "bf16", "--no-deduplicate", *QUICK, "--json"]
    ran = run("profile", "--family", "mlp", "--input", "input=2x64", *words)
    assert (ran.code, ran.stderr) == (0, "")
    assert Profile.from_json(ran.stdout).provenance.autocast == "bfloat16"
    own = run("profile", f"{theirs}:model", "--sample", f"{theirs}:sample", *words)
    assert Profile.from_json(own.stdout).provenance.autocast == "bfloat16"
    assert not Profile.from_json(own.stdout).provenance.compiled


def test_own_model_with_a_loss(run, theirs):
    words = ["--sample", f"{theirs}:sample", "--loss", f"{theirs}:loss"]
    ran = run("profile", f"{theirs}:model", *words, "--target", f"{theirs}:target", *QUICK)
    assert ran.code == 0, ran.stderr
    profile = Profile.read("profile.json")
    assert profile.loss is not None
    assert len(profile.layers) == 3


def test_a_model_that_was_made_already_needs_no_function(run, theirs):
    """Cause: it was called without its input, and the error spoke of a missing argument."""
    ran = run("profile", f"{theirs}:made", "--sample", f"{theirs}:sample", *QUICK)
    assert ran.code == 0, ran.stderr
    assert len(Profile.read("profile.json").layers) == 3


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a model and its sample"),
        (["theirs:model"], "theirs:model needs a sample"),
        (["theirs.py"], "such as theirs:build --sample theirs:sample"),
        (["theirs:modle", "--sample", "theirs:sample"], "did you mean 'model' or"),
        (["theirs", "--sample", "theirs:sample"], "write package.module:name"),
        (["absent:model", "--sample", "theirs:sample"], "there is no module 'absent' in "),
        (["./theirs.py:model", "--sample", "theirs:sample"], "name its module: theirs:model"),
        (["theirs:absent", "--sample", "theirs:sample"], "theirs has no 'absent'"),
        (["theirs:NUMBER", "--sample", "theirs:sample"], "theirs:NUMBER is an int"),
        (["theirs:fails", "--sample", "theirs:sample"], "calling theirs:fails failed: KeyError"),
        (
            ["theirs:no_model", "--sample", "theirs:sample"],
            "returned an int, not a torch",
        ),
        (["theirs:model", "--sample", "theirs:wrong_sample"], "3x5 and 4x8"),
        (
            ["theirs:model", "--sample", "theirs:sample", "--loss", "theirs:loss"],
            "must be given together",
        ),
        (["theirs:model", "--family", "mlp"], "cannot be combined with --family"),
        (["--family", "mlp", "--loss", "theirs:loss"], "cannot be combined with --family"),
        (["request.json"], "cannot read request.json"),
        (["request.json", "--sample", "theirs:sample"], "cannot be combined with a request"),
        (["--family", "mlp", "--input", "input=2x64", "--device", "tpu"], "/device"),
        (["--family", "mlp", "--input", "wrong=2x64"], "forward takes input, not 'wrong'"),
        (["--family", "mlp", "--input", "input=2x63"], "(micro-batch, 64)"),
        (
            [*OWN, "--input", "x=2"],
            "--input cannot be combined with a model built by your own code",
        ),
        (
            [*OWN, "--config", "{}"],
            "--config cannot be combined with a model built by your own code",
        ),
        (["--input", "input=2x64"], "--input cannot be combined with"),
        (["request.json", "--config", "{}"], "--config cannot be combined with a request"),
        ([*OWN, "--device", "cuda:999"], "cuda:999"),
        ([*OWN, "--autocast", "int8"], "autocast"),
        (["--family", "mlp", "--input", "input=2x64", "--device", "cuda:999"], "cuda:999"),
    ],
)
def test_wrong_requests_are_usage_errors(run, tmp_path, words, said):
    before = set(tmp_path.iterdir())
    ran = run("profile", *words, *QUICK)
    assert (ran.code, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before


def test_output_is_checked_before_anything_is_measured(run):
    ran = run("profile", "--family", "mlp", "--input", "input=2x64", "-o", "absent/p.json")
    assert ran.code == 2
    assert "folder absent does not exist" in ran.stderr
