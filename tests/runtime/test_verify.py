"""``verify`` takes the plan's own step: its order, its replicas, what is in flight."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from stagewright.capture.capture import trace
from stagewright.capture.observation.observe import _ForwardWatcher
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime import random_state as recompute
from stagewright.runtime.engine.batch_io import BatchOutputs
from stagewright.runtime.engine.emulated_ranks import EmulatedRanks
from stagewright.runtime.engine.split_backward import SplitBackward
from stagewright.runtime.partition.cut import cut_for_plan
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.random_state import RandomState
from stagewright.runtime.replicas.gradient_sync import GradientSync
from stagewright.runtime.verify import _compare, verify
from stagewright.schedules.plan_schedule import schedule_of
from tests.runtime.odd_models import ReadsReference
from tests.torch_models import Case, make_batch, make_case, traced_profile

EXACT = 1e-9


class Decaying(nn.Module):
    """Changes a buffer in place that its backward reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale.mul_(0.9)
        return x * self.scale


class Centred(nn.Module):
    """Subtracts what it has seen so far, of all micro-batches in order."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen = torch.lerp(self.seen, x.detach().mean(0), 0.5)
        return x - self.seen


class Forgetful(nn.Module):
    """A weight whose gradient never comes."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x) + self.unused(x).detach()


def planned(model, balance, *, replicas=(), **options) -> Plan:
    case = Case("own", None, model, torch.randn(2, 4, dtype=torch.float64), mse_loss)
    chunks = 2 if options.get("schedule") in ("zbv", "interleaved_1f1b") else 1
    devices = sum(replicas) if replicas else len(balance) // chunks
    return plan_from_balance(
        traced_profile(case),
        Cluster.uniform(devices),
        PlanOptions(num_microbatches=4, **options),
        balance,
        replicas=replicas,
    )


def tried(model, plan):
    torch.manual_seed(1)
    samples = 2 * plan.num_microbatches
    batch = torch.randn(samples, 4, dtype=torch.float64)
    target = torch.randn(samples, 2, dtype=torch.float64)
    return verify(model, plan, batch, target, mse_loss)


def model_with(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 4), nn.Linear(4, 2)).double()


VARIANTS = {
    "gpipe": {"schedule": "gpipe", "balance": [2, 3]},
    "recomputed": {"schedule": "1f1b", "balance": [2, 3], "recompute": "always"},
    "uneven replicas": {"schedule": "1f1b", "balance": [2, 3], "replicas": [2, 1]},
    "replicas alone": {"schedule": "gpipe", "balance": [5], "replicas": [3]},
    "two parts": {"schedule": "zero_bubble", "balance": [2, 3]},
    "two stages a rank": {"schedule": "zbv", "balance": [1, 1, 2, 1]},
    "interleaved": {"schedule": "interleaved_1f1b", "balance": [1, 1, 2, 1]},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_dropout_and_statistics_agree_under_every_kind_of_schedule(name):
    model = model_with(nn.BatchNorm1d(4), nn.Dropout(0.5))
    found = tried(model, planned(model, **VARIANTS[name]))
    assert len(found.gradients) == 8
    assert len(found.buffers) == 3
    assert found.equal(EXACT), found


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_loss_that_draws_random_numbers_agrees(recompute):
    """Its draws follow the module's, also where the recomputation comes long after the forward."""

    def noisy(output, target):
        return mse_loss(output + torch.randn_like(output), target)

    model = model_with(nn.Dropout(0.5))
    plan = planned(model, [1, 3], schedule="gpipe", recompute=recompute)
    torch.manual_seed(1)
    batch, target = torch.randn(8, 4).double(), torch.randn(8, 2).double()
    found = verify(model, plan, batch, target, noisy)
    assert found.equal(EXACT), found


class Replaced(nn.Module):
    """Centres by a buffer that it writes through ``.data``, and counts in one made when called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("calls", None)

    def forward(self, x):
        h = x - self.seen.clone()
        self.seen.data.lerp_(x.detach().mean(0), 0.5)
        self.calls = torch.ones(()) if self.calls is None else self.calls + 1
        return h * self.calls


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("layer", [Centred, Replaced])
def test_a_recomputation_finds_the_buffers_of_its_forward(layer, schedule):
    """It found those of the last micro-batch, and gradients were up to 0.2 off."""
    model = model_with(layer())
    found = tried(model, planned(model, [1, 3], schedule=schedule, recompute="always"))
    assert found.equal(EXACT), found


def test_split_layers_are_left_to_processes():
    model = model_with()
    plan = planned(model, [1, 2])
    first = plan.stages[0].model_copy(update={"tensor": 2, "devices": ("a", "b")})
    split = plan.model_copy(update={"stages": (first, *plan.stages[1:])})
    with pytest.raises(PlanMismatch, match=r"splits its layers over 2 .*verify_distributed"):
        tried(model, split)


def test_tied_weights_of_several_ranks_agree():
    case = make_case("gpt2")
    plan = plan_from_balance(
        profile := traced_profile(case),
        Cluster.uniform(3),
        PlanOptions(num_microbatches=4, schedule="1f1b"),
        [2, len(profile.layers) - 2],
        replicas=[1, 2],
    )
    batch, target = make_batch(case, plan)
    found = verify(case.model, plan, batch, target, case.loss_fn, dtype=torch.float64)
    assert found.equal(EXACT), found


def test_a_buffer_that_several_micro_batches_in_flight_cannot_share_is_told_of():
    """It was called equal: each micro-batch went back before the next came."""
    model = model_with(Decaying())
    with pytest.raises(PlanMismatch, match=r"backward of micro-batch 0 on stage 0.*buffer\.clone"):
        tried(model, planned(model, [2, 2], schedule="gpipe"))
    plan = planned(model, [2, 2], schedule="gpipe")
    alone = plan.model_copy(update={"num_microbatches": 1})
    assert tried(model, alone).equal(EXACT)


def test_ranks_reach_no_weight_of_another_rank_by_reference(monkeypatch):
    """The rehearsal shared one process's objects, and called equal what lost a gradient."""
    model = model_with()
    model.insert(1, ReadsReference(model[0]))
    assert tried(model, planned(model, [1, 3])).equal(EXACT)
    monkeypatch.setattr(_ForwardWatcher, "access", lambda *given: None)  # capture is blind
    found = tried(model, planned(model, [1, 3]))
    assert found.gradients["0.weight"] > 0.1, found


def test_a_buffer_that_replicas_move_apart_is_refused():
    model = model_with(Centred())
    assert tried(model, planned(model, [2, 2])).equal(EXACT)
    with pytest.raises(InvalidInput, match=r"changes the buffer '1\.seen'.*max_replicas=1"):
        tried(model, planned(model, [2, 2], replicas=[2, 1]))


def test_torch_s_synchronised_normalisation_is_refused():
    plan = planned(model_with(nn.BatchNorm1d(4)), [2, 2])
    with pytest.raises(InvalidInput, match=r"1 is an nn\.SyncBatchNorm"):
        tried(model_with(nn.SyncBatchNorm(4)), plan)
    model = model_with()
    with pytest.raises(InvalidInput, match="for replicas"):
        Pipeline(model, planned(model, [1, 2]), batch_statistics="synchronised")


def test_a_batch_changed_in_place_is_every_micro_batches_own():
    """Micro-batches are views of one batch: the second forward spoilt the first one's backward."""

    class Doubling(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    torch.manual_seed(0)
    model = nn.Sequential(Doubling(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    batch = torch.randn(8, 4, dtype=torch.float64)
    before = batch.clone()
    plan = planned(model, [2, 1], schedule="gpipe", recompute="always")
    found = verify(model, plan, batch, torch.randn(8, 2, dtype=torch.float64), mse_loss)
    assert found.equal(EXACT), found
    assert torch.equal(batch, before)


def test_none_is_not_zero(monkeypatch):
    """Weight decay moves a weight whose gradient is zero, and leaves one that has none."""
    model = model_with(Forgetful())
    plan = planned(model, [2, 2], replicas=[2, 1])
    found = tried(model, plan)
    assert found.equal(EXACT), found
    assert not any("unused" in name for name in found.gradients)
    finish = GradientSync.finish

    def with_zeros(self):
        finish(self)
        for weight in self._weights:
            if weight.tensor.grad is None:
                weight.tensor.grad = torch.zeros_like(weight.tensor)

    monkeypatch.setattr(GradientSync, "finish", with_zeros)
    assert tried(model, plan).gradients["1.unused.weight"] == float("inf")


def test_forwards_alone_are_evaluated():
    model = model_with(nn.BatchNorm1d(4), nn.Dropout(0.5))
    plan = planned(model, [2, 3], objective="latency")
    assert plan.schedule == "forward_only"
    found = tried(model, plan)
    assert found.gradients == {}
    assert found.equal(EXACT), found


def test_a_nest_of_targets_is_split():
    model = model_with()
    plan = planned(model, [1, 2])
    batch = torch.randn(8, 4)
    target = {"wanted": torch.randn(8, 2), "weight": 3.0}

    def loss(output, target):
        return mse_loss(output, target["wanted"]) * target["weight"]

    assert verify(model, plan, batch, target, loss, dtype=torch.float64).equal(EXACT)


@pytest.mark.parametrize(
    ("name", "where", "what"),
    [
        ("two parts", SplitBackward, "run_weight_part"),
        ("uneven replicas", GradientSync, "finish"),
    ],
)
def test_what_a_schedule_needs_beyond_forwards_and_backwards_is_tried(
    monkeypatch, name, where, what
):
    monkeypatch.setattr(where, what, lambda self: None)
    model = model_with(nn.Tanh(), nn.Tanh())
    assert not tried(model, planned(model, **VARIANTS[name])).equal(1e-3)


def test_a_recomputation_with_other_masks_is_noticed(monkeypatch):
    monkeypatch.setattr(recompute.RandomState, "restore", lambda self, device: None)
    model = model_with(nn.Dropout(0.5), nn.Tanh())
    plan = planned(model, [2, 3], schedule="gpipe", recompute="always")
    assert not tried(model, plan).equal(1e-3)


def test_weights_unfrozen_behind_the_last_cut_may_not_go_without_gradient():
    """The stage behind them sent none, and they stayed as they were."""
    model = model_with()
    model[0].requires_grad_(False)
    plan = planned(model, [1, 2])
    assert tried(model, plan).equal(EXACT)
    rehearsal, batches, targets, draws = rehearsed(model, plan)
    rehearsal.modules[0].requires_grad_(True)
    with pytest.raises(InvalidInput, match="rebuild the pipeline after unfreezing"):
        rehearsal.train(batches, targets, draws)


def rehearsed(model, plan):
    """A rehearsal of the plan, and a step for it."""
    pieces = cut_for_plan(model, plan)
    cpu = torch.device("cpu")
    last = BatchOutputs(pieces.captured, mse_loss, plan.num_microbatches, cpu, pieces.stages[-1])
    made = EmulatedRanks(pieces, plan, schedule_of(plan), loss=last.compute_loss_share, device=cpu)
    batches = [(part,) for part in torch.randn(8, 4, dtype=torch.float64).chunk(4)]
    targets = list(torch.randn(8, 2, dtype=torch.float64).chunk(4))
    return made, batches, targets, dict.fromkeys(range(4), RandomState.now(cpu))


class Attention(nn.Module):
    """Attention, to which a bias of its keys makes no difference."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.stack([x, x.flip(1), 2 * x.sin()], 1)
        scores = self.queries(x) @ self.keys(x).transpose(1, 2)
        return self.out(scores.softmax(-1) @ x).mean(1)


def test_gradients_that_are_zero_but_for_rounding_are_equal():
    """A depth model's were called 0.94 apart."""
    torch.manual_seed(0)
    model = Attention().double()
    layers = len(trace(model, torch.randn(2, 4).double(), check=False).layers)
    found = tried(model, planned(model, [layers], replicas=[3]))
    assert found.equal(EXACT), found
    gradient = torch.tensor([1e-18])
    whole, copy = nn.Linear(1, 1), nn.Linear(1, 1)
    whole.weight.grad, whole.bias.grad = torch.ones(1, 1), gradient
    copy.weight.grad, copy.bias.grad = torch.ones(1, 1), -gradient
    assert _compare(whole, [copy], 1.0, 1.0).worst <= EXACT
    copy.bias.grad = torch.tensor([1e-6])
    assert _compare(whole, [copy], 1.0, 1.0).gradients["bias"] == pytest.approx(0.01)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last((x @ self.weight).imag)


def test_complex_weights_are_verified_with_their_imaginary_part():
    """Cause: the conversion to double precision made complex weights and inputs real ones."""
    case = Case("complex", None, Complex(), torch.randn(2, 4, dtype=torch.cfloat), mse_loss)
    profile = traced_profile(case)
    plan = plan_from_balance(
        profile, Cluster.uniform(1), PlanOptions(num_microbatches=2), [len(profile.layers)]
    )
    batch, target = torch.randn(4, 4, dtype=torch.cfloat), torch.randn(4, 4)
    assert verify(case.model, plan, batch, target, mse_loss, dtype=torch.float64).equal(EXACT)
