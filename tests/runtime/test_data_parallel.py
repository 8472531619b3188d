"""Data parallelism in one process against the unsplit model, on several devices named ``cpu``."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from stagewright.core.errors import InvalidInput
from stagewright.runtime import data_parallel
from stagewright.runtime.data_parallel import DataParallel, divide_samples

TOLERANCE = 1e-12


class Nested(nn.Module):
    """Takes nested arguments and keywords; has a tied weight and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.unused, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.threads = set()

    def forward(self, pair, *, more, factor):
        self.threads.add(threading.current_thread().name)
        hidden = torch.tanh(self.first(pair[0]) + self.frozen(pair[1]["x"]))
        return {"out": self.second(hidden) * factor + more}


def loss_fn(output, target):
    return mse_loss(output["out"], target["y"])


def make_model():
    torch.manual_seed(0)
    return Nested().double()


def draw(samples, seed):
    torch.manual_seed(seed)
    a, b, more, y = (torch.randn(samples, 6, dtype=torch.float64) for _ in range(4))
    return (a, {"x": b}), {"more": more, "factor": 3.0}, {"y": y}


@pytest.fixture(params=["shared", "copied"])
def memory(request, monkeypatch):
    """Weights that replicas share, or copies as on several GPUs."""
    if request.param == "copied":
        monkeypatch.setattr(data_parallel, "shares_memory", lambda device, other: False)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("speeds", [None, [1, 1], [3, 1], [1, 2.5, 1.5], [1, 1, 1, 1]])
def test_steps_equal_the_unsplit_model(speeds):
    model = make_model()
    unsplit = copy.deepcopy(model)
    count = len(speeds) if speeds else 2
    parallel = DataParallel(model, ["cpu"] * count, loss_fn=loss_fn, speeds=speeds)
    ours = torch.optim.AdamW(model.parameters(), lr=0.05)
    theirs = torch.optim.AdamW(unsplit.parameters(), lr=0.05)
    for step in range(6):
        pair, keywords, target = draw(10 + step, step)
        loss = parallel.step(pair, target=target, **keywords)
        expected = loss_fn(unsplit(pair, **keywords), target)
        expected.backward()
        assert abs(float(loss - expected.detach())) <= TOLERANCE
        for (name, own), other in zip(model.named_parameters(), unsplit.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None), name
            if own.grad is not None:
                assert float((own.grad - other.grad).abs().max()) <= TOLERANCE, name
        if step % 2:  # every other step only accumulates
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    output = parallel.evaluate(pair, **keywords)
    assert torch.allclose(output["out"], unsplit(pair, **keywords)["out"], rtol=0, atol=TOLERANCE)


def test_replicas_run_in_threads_and_share_weights():
    model = make_model()
    parallel = DataParallel(model, ["cpu"] * 3, loss_fn=loss_fn)
    for step in range(2):
        pair, keywords, target = draw(6, step)
        parallel.step(pair, target=target, **keywords)
    replicas = parallel._replicas
    assert replicas[1].first.weight.data_ptr() == model.first.weight.data_ptr()
    assert replicas[1].first.weight is replicas[1].second.weight
    names = {f"replica_{index}" for index in range(3)}
    assert all(replica.threads and replica.threads <= names for replica in replicas)


@pytest.mark.usefixtures("memory")
def test_replicas_follow_mode_and_frozen_weights():
    model = make_model()
    parallel = DataParallel(model, ["cpu", "cpu"], loss_fn=loss_fn)
    model.eval()
    model.frozen.requires_grad_(True)
    pair, keywords, target = draw(4, 0)
    parallel.step(pair, target=target, **keywords)
    assert not parallel._replicas[1].training
    unsplit = make_model()
    unsplit.frozen.requires_grad_(True)
    loss_fn(unsplit(pair, **keywords), target).backward()
    apart = model.frozen.weight.grad - unsplit.frozen.weight.grad
    assert float(apart.abs().max()) <= TOLERANCE


def test_shares_follow_speeds():
    for samples in range(1, 40):
        for speeds in ([1], [1, 1], [3, 1], [1, 2, 4], [0.3, 0.3, 0.4]):
            shares = divide_samples(samples, speeds)
            assert sum(shares) == samples
            for share, speed in zip(shares, speeds, strict=True):
                assert abs(share - samples * speed / sum(speeds)) < 1
    assert divide_samples(8, [3, 1]) == [6, 2]


@pytest.mark.parametrize(
    ("samples", "speeds", "message"),
    [(1, None, r"a batch of 1 samples leaves none for device 1 \(cpu\)"), (4, [99, 1], "larger")],
)
def test_a_batch_too_small_is_refused_by_device(samples, speeds, message):
    parallel = DataParallel(make_model(), ["cpu", "cpu"], loss_fn=loss_fn, speeds=speeds)
    pair, keywords, target = draw(samples, 0)
    with pytest.raises(InvalidInput, match=message):
        parallel.step(pair, target=target, **keywords)


def test_what_cannot_be_divided_or_placed_is_refused():
    model = make_model()
    parallel = DataParallel(model, ["cpu", "cpu"], loss_fn=loss_fn)
    pair, keywords, target = draw(4, 0)
    with pytest.raises(InvalidInput, match=r"first dimension.*\[4, 4, 4, 3\]"):
        parallel.step(pair, target={"y": target["y"][:3]}, **keywords)
    model.first = nn.Linear(6, 6).double()
    with pytest.raises(InvalidInput, match="other parameters"):
        parallel.step(pair, target=target, **keywords)
    for devices, speeds, message in (
        ([], None, "empty"), (["cpu"], [1, 2], "2 speeds for 1"), (["cpu"], [0], "positive"),
        (["meta"], None, "is on cpu, but the first device is meta"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=message):
            DataParallel(make_model(), devices, loss_fn=loss_fn, speeds=speeds)


def test_an_error_of_a_replica_is_raised_after_all_have_ended():
    ended = []

    def failing(output, target):
        if len(target["y"]) == 3:
            raise ZeroDivisionError("in the first replica")
        ended.append(len(target["y"]))
        return loss_fn(output, target)

    parallel = DataParallel(make_model(), ["cpu", "cpu"], loss_fn=failing, speeds=[3, 1])
    pair, keywords, target = draw(4, 0)
    with pytest.raises(ZeroDivisionError, match="in the first replica"):
        parallel.step(pair, target=target, **keywords)
    assert ended == [1]


def test_an_output_without_samples_is_refused():
    flat = nn.Sequential(nn.Linear(3, 3), nn.Flatten(0))
    parallel = DataParallel(flat, ["cpu", "cpu"], loss_fn=loss_fn)
    with pytest.raises(InvalidInput, match="tensor 0 of the output"):
        parallel.evaluate(torch.randn(4, 3))


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    parallel = DataParallel(table, ["cpu", "cpu"], loss_fn=mse_loss)
    with pytest.raises(InvalidInput, match=r"shape \(5, 3\) is sparse.*sparse=False"):
        parallel.step(torch.arange(4), target=torch.randn(4, 3))


@pytest.mark.usefixtures("memory")
def test_replicas_follow_what_a_script_changes():
    """A rate, a hook and a module put in place of another reached the first replica alone."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()).double()
    parallel = DataParallel(model, ["cpu"] * 2, loss_fn=mse_loss)
    model[1].p = 0.0
    model[2] = nn.Sigmoid()
    model[0].register_forward_hook(lambda module, given, found: found * 2)
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    batch, target = torch.randn(2, 4, 6, dtype=torch.float64).unbind()
    loss = parallel.step(batch, target=target)
    found = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    plain = copy.deepcopy(model)
    plain[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    wanted = mse_loss(plain(batch), target)
    wanted.backward()
    assert float(loss) == pytest.approx(float(wanted.detach()), abs=TOLERANCE)
    for gradient, weight in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, weight.grad, atol=TOLERANCE, rtol=0)


def test_an_error_leaves_no_half_of_a_sum():
    model = make_model()
    pair, keywords, target = draw(4, 0)
    parallel = DataParallel(model, ["cpu", "cpu"], loss_fn=loss_fn)
    parallel.step(pair, target=target, **keywords)
    before = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    parallel._loss_fn = lambda output, target: 1 / 0
    with pytest.raises(ZeroDivisionError):
        parallel.step(pair, target=target, **keywords)
    for was, weight in zip(before, model.parameters(), strict=True):
        assert (was is None) == (weight.grad is None)
        assert was is None or torch.equal(was, weight.grad)
