"""A checkpoint of any plan as a file that plain torch and safetensors read."""

import importlib.util
import json

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from stagewright.core.errors import InvalidInput
from stagewright.runtime.checkpoint.convert import convert_checkpoint
from stagewright.runtime.checkpoint.save import save_checkpoint


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    return model, torch.optim.AdamW(
        [{"params": [model[0].weight]}, {"params": [*model[1].parameters()], "lr": 0.5}]
    )


@pytest.fixture
def saved(tmp_path):
    model, optimizer = tied()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "run", model, optimizer, step=7, extra={"epoch": 2})
    return tmp_path / "run", model, optimizer


def test_a_state_dict_loads_strictly(saved, tmp_path):
    folder, model, _ = saved
    record = convert_checkpoint(folder, tmp_path / "model.pt")
    assert record.step == 7
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == model.state_dict().keys()
    assert found["0.weight"].data_ptr() == found["2.weight"].data_ptr()
    other, _ = tied()
    other.load_state_dict(found)
    assert torch.equal(other[2].weight, model[0].weight)
    assert other[1].num_batches_tracked == 1


def test_an_optimizer_is_as_torch_has_it(saved, tmp_path):
    folder, model, optimizer = saved
    convert_checkpoint(folder, tmp_path / "all.pt", with_optimizer=True)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (found["step"], found["extra"]) == (7, {"epoch": 2})
    other, resumed = tied()
    other.load_state_dict(found["model"])
    set_optimizer_state_dict(other, resumed, optim_state_dict=found["optimizer"])
    assert [group["lr"] for group in resumed.param_groups] == [0.001, 0.5]
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if ours in optimizer.state:
            for slot, value in optimizer.state[ours].items():
                assert torch.equal(value, resumed.state[theirs][slot]), slot


def test_safetensors_hold_each_tensor_once(saved, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    folder, model, optimizer = saved
    convert_checkpoint(folder, tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == model.state_dict().keys() - {"2.weight"}
        assert json.loads(file.metadata()["aliases"]) == {"2.weight": "0.weight"}
        assert torch.equal(file.get_tensor("0.weight"), model[0].weight)
    convert_checkpoint(folder, tmp_path / "all.safetensors", with_optimizer=True)
    with safetensors.safe_open(tmp_path / "all.safetensors", "pt") as file:
        moment = file.get_tensor("optim.1.weight.exp_avg")
        assert torch.equal(moment, optimizer.state[model[1].weight]["exp_avg"])
        assert json.loads(file.metadata()["checkpoint"])["optimizer"]["kind"] == "AdamW"


def test_what_cannot_be_written_is_said(saved, tmp_path, monkeypatch):
    folder, model, _ = saved
    with pytest.raises(InvalidInput, match=r"use one of .safetensors, .pt, .pth"):
        convert_checkpoint(folder, tmp_path / "model.onnx")
    with pytest.raises(InvalidInput, match=r"cannot write .*none/model.pt"):
        convert_checkpoint(folder, tmp_path / "none" / "model.pt")
    save_checkpoint(folder, model, step=8)
    with pytest.raises(InvalidInput, match="step-000008 was saved without an optimizer"):
        convert_checkpoint(folder, tmp_path / "model.pt", with_optimizer=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=r"pip install safetensors, or write .*model.pt"):
        convert_checkpoint(folder, tmp_path / "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
