"""What `stagewright.build` makes trains as the unsplit model does, across processes and in one."""

import json

import pytest
import torch
from torch import nn

from stagewright import LossScale, Pipeline, Training, Weights, build
from stagewright.core.errors import InvalidInput
from stagewright.runtime.checkpoint.save import save_checkpoint
from tests.runtime.forked import run_as_on_nccl
from tests.torch_models import make_batch, make_case, make_plan

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def results(tmp_path_factory, forking_executable):
    """Every rank's account of every cell, from one run on two ranks."""
    pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path_factory.mktemp("build")
    gpt2 = make_case("gpt2", seed=5).model.double()
    safetensors.save_model(gpt2, folder / "gpt2.safetensors")
    save_checkpoint(folder / "unet", make_case("unet", seed=5).model.double(), step=1)
    run_as_on_nccl(forking_executable, "tests.runtime.build_worker", str(folder), timeout_s=120)
    lines = [
        json.loads(line)
        for rank in range(2)
        for line in (folder / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return {(line["cell"], line["rank"]): line for line in lines}


def of(results, cell):
    return results[cell, 0], results[cell, 1]


@pytest.mark.parametrize("cell", ["checkpoint", "saved", "init"])
def test_a_model_without_data_trains_as_the_whole_one(results, cell):
    first, last = of(results, cell)
    assert max(first["gradient"], last["gradient"], last["loss"]) <= 1e-9
    assert first["loss"] is None


@pytest.mark.parametrize("cell", ["checkpoint", "saved", "init"])
def test_each_rank_has_memory_for_its_own_stage_alone(results, cell):
    first, last = of(results, cell)
    assert not first["elsewhere"]
    assert not last["elsewhere"]
    for rank in (first, last):
        assert 0 < rank["held_bytes"] < 0.95 * rank["model_bytes"]
    together = first["held_bytes"] + last["held_bytes"]
    tied = 64 * 32 * 8 if cell == "checkpoint" else 0  # GPT-2's embedding is on both
    assert together == first["model_bytes"] + tied


def test_accumulated_steps_make_one_clipped_update(results):
    for rank in of(results, "accumulated"):
        assert rank["updated"] == [False, False, True] * 2
        assert max(rank["norm"], rank["weights"]) <= 1e-9


def test_a_rank_without_parameters_has_an_optimizer_too(results):
    """torch's optimizers refuse an empty list, which the documented line gave them."""
    first, last = of(results, "bare")
    assert (first["held"], last["held"]) == (2, 0)
    assert first["updated"] == last["updated"] == [True, True]
    assert first["weights"] <= 1e-5


def test_an_overflow_on_one_rank_leaves_out_the_update_on_all(results):
    for rank in of(results, "float16"):
        assert rank["sent"] == "float16"
        assert rank["updated"] == [True, False, True]
        assert rank["kept"] == [False, True, False]
        assert rank["scales"] == [65536.0, 32768.0, 32768.0]
        assert rank["skipped"] == 1
        assert rank["weights"] <= 2e-4


def test_bfloat16_needs_no_scale(results):
    for rank in of(results, "bfloat16"):
        assert rank["sent"] == "bfloat16"
        assert (rank["updated"], rank["scales"]) == ([True] * 3, [None] * 3)
        assert rank["weights"] <= 1e-2


@pytest.mark.parametrize("cell", ["reduce", "fully_shard"])
def test_replicas_without_data_skip_and_clip_together(results, cell):
    for rank in of(results, cell):
        assert rank["updated"] == [True, False, True]
        assert rank["norm"] <= 2e-3
        assert rank["weights"] <= 1e-4


def test_ranks_find_the_same_loss_scale(results):
    first, last = of(results, "limit")
    assert not first["updated"][0]
    assert first["updated"] == last["updated"]
    assert (first["scale"], first["norm"]) == (last["scale"], last["norm"])


def unsplit(model, case, batch, target):
    loss = case.loss_fn(model(*batch), target)
    loss.backward()
    return loss.detach()


def test_the_same_loop_in_one_process():
    case, whole = make_case("mlp"), make_case("mlp").model
    plan = make_plan(case, 2)
    ours = build(plan, case.model, loss_fn=case.loss_fn, max_norm=0.05, accumulate=2)
    assert isinstance(ours.pipeline, Pipeline)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    theirs = torch.optim.SGD(whole.parameters(), lr=1.0)
    for step in range(4):
        batch, target = make_batch(case, plan, seed=step)
        loss = ours.step(*batch, target=target)
        torch.testing.assert_close(loss, unsplit(whole, case, batch, target))
        assert ours.update(optimizer) == (step % 2 == 1)
        if step % 2:
            for parameter in whole.parameters():
                parameter.grad /= 2
            norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
            assert ours.norm == pytest.approx(float(norm))
            theirs.step(), theirs.zero_grad()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(ours.module.get_parameter(name), parameter)


def test_one_process_skips_what_overflows_and_a_checkpoint_keeps_the_scale():
    case = make_case("mlp")
    plan = make_plan(case, 2)
    training = build(plan, case.model, loss_fn=case.loss_fn, autocast=torch.float16, precision=None)
    optimizer = torch.optim.SGD(training.parameters(), lr=0.1)
    batch, target = make_batch(case, plan)
    training.step(*batch, target=target)
    parameter = next(training.parameters())
    parameter.grad[0] = float("nan")
    before = parameter.detach().clone()
    assert not training.update(optimizer)
    assert torch.equal(parameter, before)
    again = Training(training.pipeline, loss_fn=case.loss_fn, autocast=torch.float16)
    again.load_state_dict(json.loads(json.dumps(training.state_dict())))
    assert again.loss_scale == training.loss_scale == LossScale(value=32768.0)


def test_a_model_without_data_in_one_process():
    case = make_case("mlp")
    plan = make_plan(case, 2)
    with torch.device("meta"):
        model = make_case("mlp").model
    training = build(plan, model, loss_fn=case.loss_fn, weights=Weights(seed=2))
    batch, target = make_batch(case, plan)
    output, loss = training.evaluate(*batch, target=target)
    torch.testing.assert_close(loss, case.loss_fn(output, target))


def test_the_loss_scale_moves_as_torchs_own():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    ours = LossScale(value=8.0, growth_interval=3)
    for overflowed in [False, False, True, False, False, False, False, True, True, *[False] * 7]:
        theirs.scale(torch.ones(()))  # it makes its own scale at first use
        parameter.grad = torch.full((1,), float("inf") if overflowed else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflowed=overflowed)
        assert ours.value == theirs.get_scale()


def test_a_loss_scale_that_cannot_shrink_further_says_so():
    scale = LossScale(value=1e-7)
    with pytest.raises(InvalidInput, match="the loss itself is"):
        scale.update(overflowed=True)
    with pytest.raises(InvalidInput, match="backoff between 0 and 1"):
        LossScale(backoff=1.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weights": Weights()}, "build it under torch.device"),
        ({"strategy": "fully_shard"}, "start one process per device"),
        ({"accumulate": 0}, "at least one step"),
        ({"max_norm": 0.0}, "norm above 0"),
    ],
)
def test_what_build_cannot_do_is_refused(given, said):
    case = make_case("mlp")
    with pytest.raises(InvalidInput, match=said):
        build(make_plan(case, 2), case.model, loss_fn=case.loss_fn, **given)


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    case = make_case("mlp")
    with pytest.raises(InvalidInput, match=r"2 processes were started.*init_process_group"):
        build(make_plan(case, 2), case.model, loss_fn=case.loss_fn)


def test_steps_without_an_update_are_refused():
    case = make_case("mlp")
    plan = make_plan(case, 2)
    training = build(plan, case.model, loss_fn=case.loss_fn)
    batch, target = make_batch(case, plan)
    with pytest.raises(InvalidInput, match="needs target="):
        training.step(*batch)
    training.step(*batch, target=target)
    with pytest.raises(InvalidInput, match=r"call update\(optimizer\) after every step"):
        training.step(*batch, target=target)


def test_a_model_without_data_needs_weights():
    with torch.device("meta"):
        case = make_case("mlp")
    with pytest.raises(InvalidInput, match=r"weights=Weights\(checkpoint=path\)"):
        build(make_plan(make_case("mlp"), 2), case.model, loss_fn=case.loss_fn)
