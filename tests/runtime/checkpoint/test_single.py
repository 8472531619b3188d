"""One process: everything is as it was, or the error says what does not fit."""

import copy
import json
import math
import shutil
import subprocess

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput
from stagewright.runtime.checkpoint.load import latest_step, load_checkpoint
from stagewright.runtime.checkpoint.save import save_checkpoint
from stagewright.runtime.checkpoint_files.step_folder import list_steps
from stagewright.runtime.pipeline import Pipeline
from tests.torch_models import make_case, make_plan


class Small(nn.Module):
    """Tied weights, buffers that are saved and one that is not, a scalar, an empty parameter."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0))
        self.register_buffer("cache", torch.randn(2), persistent=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x))) * self.scale


def train(model, optimizer, steps, scheduler=None):
    losses = []
    for _ in range(steps):
        torch.manual_seed(len(losses))
        optimizer.zero_grad()
        dtype = next(model.parameters()).dtype
        loss = model(torch.randn(8, 4, dtype=dtype)).square().sum()
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def groups(model):
    """Two of different hyperparameters, in another order than the model's."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 0.02}]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)),
    "adamw with a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), capturable=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def same_state(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, slots in ours["state"].items():
        assert slots.keys() == theirs["state"][index].keys()
        for slot, value in slots.items():
            other_value = theirs["state"][index][slot]
            assert type(value) is type(other_value)
            if isinstance(value, torch.Tensor):
                assert value.dtype == other_value.dtype
                assert torch.equal(value, other_value)
            else:
                assert value == other_value


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(kind, tmp_path):
    model = Small()
    optimizer = OPTIMIZERS[kind](groups(model))
    train(model, optimizer, 3)
    path = save_checkpoint(tmp_path, model, optimizer, step=3)
    assert path == tmp_path / "step-000003"
    other = Small()
    resumed = OPTIMIZERS[kind](groups(other))
    loaded = load_checkpoint(tmp_path, other, resumed)
    assert (loaded.step, loaded.path, loaded.missing, loaded.unused) == (3, path, (), ())
    assert all(torch.equal(a, b) for a, b in zip(*states(model, other), strict=True))
    same_state(optimizer, resumed)
    assert train(model, optimizer, 3) == train(other, resumed, 3)


def states(*models):
    return [model.state_dict().values() for model in models]


def test_a_scheduler_goes_on_from_extra(tmp_path):
    def make():
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    model, optimizer, scheduler = make()
    train(model, optimizer, 3, scheduler)
    extra = {"scheduler": scheduler.state_dict(), "best": math.inf, "order": (3, 1), "none": None}
    save_checkpoint(tmp_path, model, optimizer, step=3, extra=extra)
    other, resumed, later = make()
    loaded = load_checkpoint(tmp_path, other, resumed)
    later.load_state_dict(loaded.extra["scheduler"])
    assert loaded.extra["best"] == math.inf
    assert (loaded.extra["order"], loaded.extra["none"]) == ([3, 1], None)
    assert train(model, optimizer, 5, scheduler) == train(other, resumed, 5, later)
    assert optimizer.param_groups[0]["lr"] == resumed.param_groups[0]["lr"]


def test_a_tensor_learning_rate_stays_the_same_tensor(tmp_path):
    model = Small()
    save_checkpoint(
        tmp_path, model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)), step=1
    )
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_state_that_was_not_there_is_gone(tmp_path):
    """A frozen layer had none when saved, and has none after."""
    model = Small()
    model.scale.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    model.scale.requires_grad_(True)
    later = torch.optim.AdamW(model.parameters(), foreach=True)
    train(model, later, 2)
    assert model.scale in later.state
    load_checkpoint(tmp_path, model, later)
    assert not later.state.get(model.scale)
    assert later.param_groups[0]["foreach"] is True  # how, not what


def test_a_pipeline_and_the_model_load_each_other(tmp_path):
    case = make_case("mlp")
    pipeline = Pipeline(case.model, make_plan(case, 2))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    pipeline(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, pipeline, optimizer, step=1)
    whole = make_case("mlp", seed=5).model
    resumed = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    load_checkpoint(tmp_path, whole, resumed)
    assert list(pipeline.state_dict()) == list(whole.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*states(pipeline, whole), strict=True))
    same_state(optimizer, resumed)


def test_values_take_the_type_of_the_model(tmp_path):
    model = Small().double()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    other = Small()
    resumed = torch.optim.AdamW(other.parameters())
    load_checkpoint(tmp_path, other, resumed)
    assert torch.equal(other.first.bias, model.first.bias.float())
    state = resumed.state[other.first.bias]
    assert state["exp_avg"].dtype == torch.float32
    assert torch.equal(state["exp_avg"], optimizer.state[model.first.bias]["exp_avg"].float())
    train(other, resumed, 1)


def test_strided_parameters_keep_their_layout(tmp_path):
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    other = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    resumed = torch.optim.AdamW(other.parameters())
    load_checkpoint(tmp_path, other, resumed)
    moment = resumed.state[other.weight]["exp_avg"]
    assert moment.stride() == optimizer.state[model.weight]["exp_avg"].stride()
    same_state(optimizer, resumed)


def test_random_generators_go_on_where_asked(tmp_path):
    model = Small()
    save_checkpoint(tmp_path, model, step=1, random_state=True)
    drawn = torch.rand(3)
    torch.manual_seed(9)
    load_checkpoint(tmp_path, model)
    assert not torch.equal(torch.rand(3), drawn)
    load_checkpoint(tmp_path, model, random_state=True)
    assert torch.equal(torch.rand(3), drawn)
    save_checkpoint(tmp_path, model, step=2)
    with pytest.raises(InvalidInput, match="save with random_state=True"):
        load_checkpoint(tmp_path, model, random_state=True)


def test_names_of_compiled_and_wrapped_models_are_the_models(tmp_path):
    model = Small()
    save_checkpoint(tmp_path, torch.compile(model, backend="eager"), step=1)
    other = Small()
    load_checkpoint(tmp_path, other)
    assert torch.equal(other.first.weight, model.first.weight)


def test_steps_are_kept_replaced_and_chosen(tmp_path):
    model = Small()
    assert latest_step(tmp_path / "nothing") is None
    for step in (1, 2, 3):
        nn.init.constant_(model.scale, step)
        save_checkpoint(tmp_path, model, step=step, keep=2)
    assert list_steps(tmp_path) == (2, 3)
    assert load_checkpoint(tmp_path, model, step=2).step == 2
    assert model.scale == 2
    with pytest.raises(InvalidInput, match="has no step 1; it has 2, 3"):
        load_checkpoint(tmp_path, model, step=1)
    nn.init.constant_(model.scale, 7)
    save_checkpoint(tmp_path, model, step=2, keep=2)  # again: it is now the latest
    assert (latest_step(tmp_path), list_steps(tmp_path)) == (2, (2, 3))
    save_checkpoint(tmp_path, model, step=4, keep=2)
    assert list_steps(tmp_path) == (2, 4)
    nn.init.zeros_(model.scale)
    assert load_checkpoint(tmp_path / "step-000002", model).step == 2
    assert model.scale == 7
    leftovers = {path.name for path in tmp_path.iterdir()} - {"latest", ".lock"}
    assert leftovers == {"step-000002", "step-000004"}


def test_missing_unknown_and_misshaped_names_are_said(tmp_path):
    model = Small()
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if n != "scale"])
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer, step=1)

    class Larger(Small):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(2, 2)
            del self.norm

    other = Larger()
    before = copy.deepcopy(other.state_dict())
    resumed = torch.optim.AdamW(other.parameters())
    with pytest.raises(InvalidInput) as caught:
        load_checkpoint(tmp_path, other, resumed)
    message = str(caught.value)
    assert "not in the checkpoint: extra.weight, extra.bias;" in message
    assert "not in the model: norm.weight, norm.bias, norm.running_mean" in message
    assert "in the optimizer, but not in the one that was saved: scale" in message
    assert "pass strict=False" in message
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), other.state_dict().values(), strict=True)
    )
    loaded = load_checkpoint(tmp_path, other, resumed, strict=False)
    assert loaded.missing == ("extra.weight", "extra.bias", "optim.scale")
    assert loaded.unused[:2] == ("norm.weight", "norm.bias")
    assert torch.equal(other.first.weight, model.first.weight)
    assert torch.equal(other.extra.weight, before["extra.weight"])

    with pytest.raises(InvalidInput, match=r"first.weight is \[5, 5\] in the model, \[4, 4\]"):
        load_checkpoint(tmp_path, Small(5), strict=False)
    few = torch.optim.AdamW([model.scale])
    with pytest.raises(InvalidInput, match=r"but not in this one: empty, first.weight"):
        load_checkpoint(tmp_path, model, few)


def test_two_tensors_do_not_become_one(tmp_path):
    untied = Small()
    untied.last.weight = nn.Parameter(torch.randn(4, 4))
    save_checkpoint(tmp_path, untied, step=1)
    with pytest.raises(InvalidInput, match=r"first.weight and last.weight are one tensor in the"):
        load_checkpoint(tmp_path, Small())
    tied = Small()
    save_checkpoint(tmp_path, tied, step=2)
    load_checkpoint(tmp_path, untied)
    assert torch.equal(untied.last.weight, tied.first.weight)


def test_what_cannot_be_saved_is_said_before_anything_is_written(tmp_path):
    model = Small()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(InvalidInput, match=r"extra\['lr'\]\['f'\], a function"):
        save_checkpoint(tmp_path, model, step=1, extra={"lr": {"f": train}})
    with pytest.raises(InvalidInput, match="string keys"):
        save_checkpoint(tmp_path, model, step=1, extra={"milestones": {3: 1}})
    with pytest.raises(InvalidInput, match="step is -1"):
        save_checkpoint(tmp_path, model, step=-1)
    with pytest.raises(InvalidInput, match="keep 1 or more"):
        save_checkpoint(tmp_path, model, step=1, keep=0)
    with pytest.raises(InvalidInput, match=r"of shape \(\) that the model does not"):
        save_checkpoint(tmp_path, Small(), adam, step=1)
    lbfgs = torch.optim.LBFGS(model.parameters())
    lbfgs.state[model.scale]["old_dirs"] = []
    with pytest.raises(InvalidInput, match="'old_dirs' of scale as a list"):
        save_checkpoint(tmp_path, model, lbfgs, step=1)
    with pytest.raises(InvalidInput, match="meta device; allocate memory first"):
        save_checkpoint(tmp_path, Small().to("meta"), step=1)
    with pytest.raises(InvalidInput, match="expected a pipeline or a module, got dict"):
        save_checkpoint(tmp_path, {}, step=1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="file"):
        save_checkpoint(tmp_path / "file", model, step=1)


def test_what_cannot_be_loaded_is_said_before_anything_is_changed(tmp_path):
    model = Small()
    with pytest.raises(InvalidInput, match="no checkpoint found in"):
        load_checkpoint(tmp_path, model)
    with pytest.raises(InvalidInput, match="does not exist"):
        load_checkpoint(tmp_path / "none", model)
    save_checkpoint(tmp_path, model, step=1)
    with pytest.raises(InvalidInput, match="was saved without an optimizer"):
        load_checkpoint(tmp_path, model, torch.optim.Adam(model.parameters()))
    save_checkpoint(tmp_path, model, torch.optim.Adam(groups(model)), step=2)
    with pytest.raises(InvalidInput, match="is of Adam, the optimizer is SGD"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(InvalidInput, match=r"saved with different (lr|weight_decay): "):
        load_checkpoint(tmp_path, model, torch.optim.Adam(model.parameters()))
    rate = torch.tensor(5.0)
    with pytest.raises(InvalidInput):
        load_checkpoint(tmp_path, model, torch.optim.Adam(model.parameters(), lr=rate))
    assert rate == 5


def test_a_damaged_step_is_passed_over_and_named(tmp_path, caplog):
    model = Small()
    for step in (1, 2):
        save_checkpoint(tmp_path, model, step=step)
    data = next((tmp_path / "step-000002").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-10])
    assert load_checkpoint(tmp_path, model).step == 1
    assert "the latest step 2 is damaged; using step 1" in caplog.text
    with pytest.raises(InvalidInput, match=r"step-000002 is damaged: __0_0.distcp has \d+ of"):
        load_checkpoint(tmp_path, model, step=2)
    (tmp_path / "step-000001" / "checkpoint.json").unlink()
    with pytest.raises(InvalidInput, match="no checkpoint found"):
        load_checkpoint(tmp_path, model)
    save_checkpoint(tmp_path, model, step=2)  # takes the damaged one's place
    assert load_checkpoint(tmp_path, model).step == 2


REFUSED = r"is damaged|not a valid|no checkpoint found"


def flipped(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)


def test_a_flipped_byte_anywhere_is_refused_before_anything_is_changed(tmp_path):
    """Of 30 places 8 loaded other weights, and 4 failed with the model half overwritten."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    path = save_checkpoint(tmp_path, model, optimizer, step=1)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for part in range(8):
            flipped(file, part * (len(whole) - 1) // 7)
            for step in (None, 1):
                with pytest.raises(InvalidInput, match=REFUSED):
                    load_checkpoint(tmp_path, model, optimizer, step=step)
            file.write_bytes(whole)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert load_checkpoint(tmp_path, model, optimizer).step == 1


def test_sums_are_those_of_b2sum(tmp_path):
    path = save_checkpoint(tmp_path, Small(), step=1)
    command = ["b2sum", "--check", "--strict", "B2SUMS"]
    if shutil.which("b2sum") is None:
        pytest.skip("needs b2sum")
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert sorted(done.stdout.split()[::2]) == [".metadata:", "__0_0.distcp:", "checkpoint.json:"]


def test_a_pipeline_goes_on_counting_its_steps(tmp_path):
    """Keyed dropout follows them; a `Pipeline` neither saved nor restored them."""
    case = make_case("mlp")
    plan = make_plan(case, 2)
    pipeline = Pipeline(case.model, plan, keyed_dropout=1)
    pipeline.steps = 11
    save_checkpoint(tmp_path, pipeline, step=3)
    pipeline.steps = 0
    load_checkpoint(tmp_path, pipeline)
    assert pipeline.steps == 11
    save_checkpoint(tmp_path, case.model, step=4)  # a module counts none: the run's steps
    load_checkpoint(tmp_path, pipeline)
    assert pipeline.steps == 4


def test_state_beside_parameters_and_buffers_is_named(tmp_path, caplog):
    class Counter(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

    save_checkpoint(tmp_path, nn.Sequential(nn.Linear(2, 2), Counter(2, 2)), step=1)
    assert "the extra state of 1 (get_extra_state) is not saved; pass it in extra" in caplog.text


def test_more_numbers_than_bytes_are_refused(tmp_path):
    path = save_checkpoint(tmp_path, nn.Linear(2, 2), step=1)
    record = json.loads((path / "checkpoint.json").read_text())
    record["model"]["weight"]["shape"] = [2**20, 2**20]
    (path / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(InvalidInput, match=r"tensors have 4398046511112 bytes, but its files \d+"):
        load_checkpoint(tmp_path, nn.Linear(2, 2), step=1)


def test_names_in_a_record_lead_nowhere_else(tmp_path):
    model = Small()
    path = save_checkpoint(tmp_path, model, step=1)
    record = json.loads((path / "checkpoint.json").read_text())
    record["files"] = {"../outside": 0}
    (path / "checkpoint.json").write_text(json.dumps(record))
    (tmp_path / "outside").touch()
    with pytest.raises(InvalidInput, match=r"damaged: ../outside is missing"):
        load_checkpoint(tmp_path, model, step=1)
    (tmp_path / "latest").write_text("../../etc")
    with pytest.raises(InvalidInput, match="no checkpoint found"):
        load_checkpoint(tmp_path, model)


@pytest.mark.gpu
def test_from_one_device_to_another(tmp_path):
    """A fused optimizer keeps its counter on the GPU, an ordinary one on the CPU."""
    model = Small().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model(torch.randn(8, 4, device="cuda")).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    on_cpu = Small()
    resumed = torch.optim.AdamW(on_cpu.parameters())
    load_checkpoint(tmp_path, on_cpu, resumed)
    assert torch.equal(on_cpu.first.weight, model.first.weight.cpu())
    assert resumed.state[on_cpu.scale]["step"].device.type == "cpu"
    train(on_cpu, resumed, 1)
    save_checkpoint(tmp_path, on_cpu, resumed, step=2)
    load_checkpoint(tmp_path, model, optimizer)
    state = optimizer.state[model.scale]
    assert {value.device.type for value in state.values()} == {"cuda"}
    optimizer.step()
