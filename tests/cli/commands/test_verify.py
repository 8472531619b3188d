"""``verify``: equal is said, and what differs ends with exit code 2 and in words."""

import importlib
import json

import pytest

from stagewright.capture.capture import trace
from stagewright.cli.main import main
from stagewright.cli.support import launch_ranks
from stagewright.runtime.partition import boundary
from tests.runtime.tensor_parallel.plans import Mix, write_plan
from tests.torch_models import make_case, make_plan


def test_a_family_needs_nothing_but_its_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    make_plan(make_case("unet"), 3).write(path)
    assert main(["verify", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert found["worst"] <= 1e-9
    assert len(found["gradients"]) > 10


@pytest.mark.parametrize("loss", [(), ("--loss", "own:loss", "--target", "own:target")])
def test_a_model_of_ones_own_is_named(tmp_path, capsys, monkeypatch, loss):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def model():\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))\n"
        "def sample():\n    return torch.randn(3, 4)\n"
        "def target():\n    return torch.randint(0, 2, (3,))\n"
        "def short():\n    return torch.randint(0, 2, (2,))\n"
        "loss = nn.functional.cross_entropy\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    own = ["own:model", "--sample", "own:sample"]
    assert main(["profile", *own, "--budget", "1", "-o", "profile.json"]) == 0
    assert main(["plan", "profile.json", "--devices", "2xcpu", "-o", "plan.json"]) == 0
    capsys.readouterr()
    assert main(["verify", "plan.json", *own, *loss]) == 0
    assert capsys.readouterr().out.startswith("equal: worst difference")
    assert main(["verify", "plan.json", *own, "--loss", "own:loss", "--target", "own:short"]) == 2
    told = capsys.readouterr().err
    assert "the loss own:loss failed on a micro-batch, with output (3, 2) and target (2,)" in told
    assert main(["verify", "plan.json"]) == 2
    assert "stagewright verify PLAN package.module:function" in capsys.readouterr().err


def test_a_difference_is_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        boundary._Enter,
        "backward",
        staticmethod(lambda ctx, *gradients: (gradients[0] * 1.001, None)),
    )
    path = tmp_path / "plan.json"
    make_plan(make_case("mlp"), 2).write(path)
    assert main(["verify", str(path)]) != 0
    found = capsys.readouterr()
    assert "NOT EQUAL" in found.out
    assert "is not due to rounding" in found.err


SPLIT = """
import os
import torch
from torch import nn
from stagewright.runtime.tensor_parallel import exchange

def model():
    first = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)
    return nn.Sequential(*first, nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))

def sample():
    return torch.randn(3, 4)

def wrong():
    if "RANK" in os.environ:  # the sum of the ranks' products is left out
        exchange._Add.forward = staticmethod(lambda ctx, value, *_: value.clone())
    return model()
"""


@pytest.fixture
def split_plan(tmp_path, monkeypatch):
    """A plan of `SPLIT` on three ranks, two of which share the first layers."""
    (tmp_path / "split_own.py").write_text(SPLIT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("split_own")
    plan = write_plan(trace(module.model(), module.sample(), check=False), Mix(("t2", "t1")))
    plan.write(tmp_path / "plan.json")
    return ["plan.json", "split_own:model", "--sample", "split_own:sample"]


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_split_layers_are_verified_by_processes(split_plan, capsys, forked_python):
    assert main(["verify", *split_plan, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert found["worst"] <= 1e-12
    assert set(found["gradients"]) == {
        f"{layer}.{kind}" for layer in (0, 2, 4, 5) for kind in ("weight", "bias")
    }
    wrong = [word.replace("split_own:model", "split_own:wrong") for word in split_plan]
    assert main(["verify", *wrong, "--json"]) == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert not found["equal"]
    assert found["gradients"]["0.weight"] > 0.01
    assert "largest: " in json.loads(printed.err)["detail"]


def test_a_machine_without_memory_for_the_processes_is_refused(split_plan, capsys, monkeypatch):
    monkeypatch.setattr(launch_ranks, "free_memory_bytes", lambda: 2**29)
    assert main(["verify", *split_plan]) == 3
    told = capsys.readouterr().err
    assert "takes 3 processes" in told
    assert "this machine has 512.0 MiB free" in told
