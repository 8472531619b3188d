"""`checkpoint` says what is in a folder of checkpoints, and writes one as a plain file."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from stagewright.runtime.checkpoint.save import save_checkpoint


@pytest.fixture
def folder(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "run", model, step=3)
    extra = {"epoch": 1, "best": float("inf")}
    save_checkpoint(tmp_path / "run", model, optimizer, step=4, extra=extra)
    return tmp_path / "run"


def test_inspect_is_a_row_a_tensor(run, folder):
    ran = run("checkpoint", "inspect", folder)
    assert ran.code == 0
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert lines[2:4] == [
        "0.weight = 1.weight 4x4 float32 64 B 0 momentum_buffer",
        "0.bias 4 float32 16 B 0 momentum_buffer",
    ]
    assert lines[5] == f"{folder}/step-000004: step 4, saved by 1 rank"
    assert lines[6].startswith("2 tensors in the model, 80 B; ")
    assert lines[7] == "SGD state for 2 of them"
    assert "lr 0.1, momentum 0.9" in lines[8]
    assert lines[-2:] == ["extra: epoch, best", "available steps: 3, 4"]
    assert ran.stderr == f"next: stagewright checkpoint convert {folder} model.safetensors\n"
    assert "no optimizer" in run("checkpoint", "inspect", folder, "--step", "3").stdout
    assert "no optimizer" in run("checkpoint", "inspect", folder / "step-000003").stdout


def test_inspect_as_json(run, folder):
    ran = run("checkpoint", "inspect", folder, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    assert (found["steps"], found["size_bytes"]) == ([3, 4], 160)
    assert found["tensors"]["optim.0.bias.momentum_buffer"] == {
        "shape": [4], "dtype": "float32", "size_bytes": 16
    }  # fmt: skip
    assert found["checkpoint"]["extra"] == {"epoch": 1, "best": float("inf")}


def test_inspect_needs_no_torch(folder):
    code = (
        "import sys; sys.modules['torch'] = None; from stagewright.cli.main import main; "
        f"sys.exit(main(['checkpoint', 'inspect', {str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_convert_writes_a_file(run, folder, tmp_path):
    ran = run("checkpoint", "convert", folder, "model.pt")
    assert (ran.code, ran.stdout) == (0, "model.pt: 2 tensors of step 4, 80 B\n")
    assert f"next: stagewright checkpoint inspect {folder}" in ran.stderr
    assert torch.load("model.pt", weights_only=True).keys() == {"0.weight", "0.bias", "1.weight"}
    ran = run("checkpoint", "convert", folder, "all.pt", "--with-optimizer", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == {
        "file": "all.pt", "step": 4, "tensors": 4, "size_bytes": 160
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert"], "missing output file: stagewright checkpoint convert FOLDER OUT"),
        (["inspect", "out.pt"], "OUT and --with-optimizer require convert"),
        (["convert", "none/out.pt"], "folder none does not exist"),
        (["convert", "out.txt"], "use one of .safetensors, .pt, .pth"),
        (["inspect", "--step", "9"], "has no step 9; it has 3, 4"),
    ],
)
def test_wrong_requests_are_usage_errors(run, folder, words, said):
    action, *rest = words
    ran = run("checkpoint", action, folder, *rest)
    assert (ran.code, ran.stdout) == (2, "")
    assert said in ran.stderr


def test_a_folder_without_checkpoints(run, tmp_path):
    ran = run("checkpoint", "inspect", tmp_path)
    assert ran.code == 2
    assert f"no checkpoint found in {tmp_path}" in ran.stderr
