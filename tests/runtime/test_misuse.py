"""What goes wrong before anything runs says what to do instead."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stagewright.capture.sample import tensor_spec
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.engine.microbatch import split_batch
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.replicas.clip_grad import sum_of_squares
from stagewright.runtime.training import Training
from stagewright.schedules.make_schedule import make_schedule
from tests.torch_models import Case, make_batch, make_case, make_plan

pytestmark = pytest.mark.distributed


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torch_distributed_must_be_initialised():
    case = make_case("mlp")
    with pytest.raises(InvalidInput, match="torchrun --nproc-per-node 2"):
        DistributedPipeline(case.model, make_plan(case, 2), loss_fn=case.loss_fn)


def test_the_number_of_ranks_must_be_the_number_of_stages(alone):
    case = make_case("mlp")
    with pytest.raises(PlanMismatch, match="2 stages on 2 devices, but 1 rank started"):
        DistributedPipeline(case.model, make_plan(case, 2), loss_fn=case.loss_fn)


def test_a_plan_is_for_one_precision(alone):
    """It was pages of tracebacks of torch.export, which blamed a module and asked to rewrite it."""
    case = make_case("unet")
    plan = make_plan(case, 1)
    with pytest.raises(PlanMismatch) as raised:
        DistributedPipeline(case.model.double(), plan, loss_fn=case.loss_fn)
    assert "inputs of float32, but this model's weights are float64" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_the_target_is_given_by_name(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    batch, target = make_batch(case, plan)
    with DistributedPipeline(case.model, plan, loss_fn=case.loss_fn) as pipeline:
        with pytest.raises(InvalidInput, match=r"takes 1 input .* but got 2.*target="):
            pipeline.step(*batch, target)
        with pytest.raises(InvalidInput, match="got 3 by position and none by keyword"):
            pipeline.step(*batch, target, target)


def test_a_misspelt_choice_is_refused(alone):
    case = make_case("mlp")
    asked = {"loss_fn": case.loss_fn, "batch_statistics": "defered"}
    with pytest.raises(InvalidInput, match="batch_statistics is 'defered'; give one of"):
        DistributedPipeline(case.model, make_plan(case, 1), **asked)


class OwnNorm(nn.BatchNorm1d):
    """Traced into operations, since it may be anything."""


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), OwnNorm(4)

    def forward(self, x):
        return self.norm(self.first(x)) + x


def test_statistics_that_nothing_can_defer_are_not_lost(alone):
    """Running statistics of a norm of the user's own stayed as they were, in silence."""
    case = Case("residual", make_case("mlp").spec, Residual(), (torch.rand(4, 4),), None)
    plan = make_plan(case, 1)
    with pytest.raises(PlanMismatch, match=r"norm \(OwnNorm\) was captured as single operations"):
        DistributedPipeline(case.model, plan, loss_fn=torch.sum, batch_statistics="deferred")


def test_a_model_changed_after_construction_is_named(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=case.loss_fn)
    batch, target = make_batch(case, plan)
    pipeline.step(*batch, target=target)
    name, child = next(iter(case.model.named_children()))
    case.model._modules[name] = nn.Sequential(child)
    words = f"'{name}' was a {type(child).__name__}, now it is a Sequential"
    with pytest.raises(PlanMismatch, match=words):
        pipeline.step(*batch, target=target)
    with pytest.raises(PlanMismatch, match=words):
        pipeline.evaluate(*batch)


def test_a_batch_must_be_the_plans_microbatches(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=case.loss_fn)
    with pytest.raises(InvalidInput, match="4 micro-batches of 4"):
        pipeline.step(torch.randn(15, 64), target=torch.zeros(15, dtype=torch.int64))
    with pytest.raises(InvalidInput, match="target"):
        pipeline.step(torch.randn(16, 64))
    pipeline.close()


@pytest.mark.parametrize(
    ("samples", "advice"),
    [
        (20, "Pass 16 samples, or plan with 5 micro-batches$"),
        (17, "Pass 16 samples$"),
        (4, "Pass 16 samples, or plan with 1 micro-batch. If it is the last batch"),
        (15, "Pass 16 samples. If it is the last batch"),
    ],
)
def test_a_batch_of_another_size_is_told_both_numbers_and_the_ways_out(samples, advice, alone):
    case = make_case("mlp")
    pipeline = DistributedPipeline(case.model, make_plan(case, 1), loss_fn=case.loss_fn)
    target = torch.zeros(samples, dtype=torch.int64)
    with pytest.raises(InvalidInput) as raised:
        pipeline.step(torch.randn(samples, 64), target=target)
    told = str(raised.value).partition("\n")[0]
    assert told.startswith(
        f"input 'input' has shape ({samples}, 64); this plan's batch is (16, 64)"
    )
    assert re.search(advice, told)
    pipeline.close()
    fixed = [tensor_spec("input", torch.randn(4, 64))]
    with pytest.raises(InvalidInput, match=f"a batch of {samples} is not .* pass 16 samples, or"):
        split_batch((torch.randn(samples, 64),), 4, fixed, ["input"])


def test_an_error_of_the_model_is_not_blamed_on_a_rank(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=lambda output, target: output[:, 99])
    batch, target = make_batch(case, plan)
    with pytest.raises(IndexError):
        pipeline.step(*batch, target=target)
    pipeline.close()


def test_words_of_a_transport_in_a_model_s_error_blame_no_rank_either(alone):
    """An error that held the word connection was taken for a lost rank."""

    def loss_fn(output, target):
        raise RuntimeError("skip connection 3 has 5 channels, expected 4")

    case = make_case("mlp")
    plan = make_plan(case, 1)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=loss_fn)
    batch, target = make_batch(case, plan)
    with pytest.raises(RuntimeError, match="skip connection 3"):
        pipeline.step(*batch, target=target)
    pipeline.close()


def test_a_loss_is_one_number(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=lambda output, target: output[:, 0])
    batch, target = make_batch(case, plan)
    with pytest.raises(InvalidInput, match=r"loss_fn returned \(4,\).*take the mean"):
        pipeline.step(*batch, target=target)
    pipeline.close()


def test_what_only_evaluates_does_not_train(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=None)
    batch, target = make_batch(case, plan)
    with pytest.raises(InvalidInput, match="only evaluates"):
        pipeline.step(*batch, target=target)
    output, loss = pipeline.evaluate(*batch)
    torch.testing.assert_close(output, case.model(*batch))
    assert loss is None
    pipeline.close()


def test_a_schedule_of_ones_own_fits_the_plan_and_can_finish(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    other = make_schedule("gpipe", 1, 2)
    with pytest.raises(PlanMismatch, match="1 stages and 2 micro-batches, the plan 1 and 4"):
        DistributedPipeline(case.model, plan, loss_fn=case.loss_fn, schedule=other)
    backwards = make_schedule("gpipe", 1, 4)
    reverse = backwards.model_copy(update={"ranks": (backwards.ranks[0][::-1],)})
    with pytest.raises(InvalidInput, match="0B3"):
        DistributedPipeline(case.model, plan, loss_fn=case.loss_fn, schedule=reverse)


def test_a_function_is_no_model(alone):
    case = make_case("mlp")
    with pytest.raises(InvalidInput, match=r"is a function, not an nn\.Module"):
        DistributedPipeline(case.model.forward, make_plan(case, 1), loss_fn=case.loss_fn)


def test_one_stage_trains_alone(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=case.loss_fn)
    batch, target = make_batch(case, plan)
    loss = pipeline.step(*batch, target=target)
    with torch.no_grad():
        expected = case.loss_fn(case.model(*batch), target)
    assert loss is not None
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    pipeline.close()


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x), (x > 0).sum()


def test_counts_are_not_averaged(alone):
    """A count of 18 samples came back as 4.5."""
    model, x = Counts(), torch.randn(8, 4)
    plan = make_plan(Case("counts", make_case("mlp").spec, model, x[:2], None), 2)
    words = "output 1 is one int64 for each of 4 micro-batches"
    with pytest.raises(InvalidInput, match=words):
        Pipeline(model, plan)(x)
    one_rank = make_plan(Case("counts", make_case("mlp").spec, model, x[:2], None), 1)
    pipeline = DistributedPipeline(model, one_rank, loss_fn=None)
    with pytest.raises(InvalidInput, match=words):
        pipeline.evaluate(x)
    pipeline.close()
    outputs, number = Pipeline(model, plan.model_copy(update={"num_microbatches": 1}))(x[:2])
    assert number.dtype is torch.int64
    assert len(outputs) == 2


class Weighted(nn.Module):
    """A loss that learns the weights of its terms."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(4))

    def forward(self, output, target):
        return ((output - target).square() * self.weights).mean()


LEARNED = Weighted()


class Held:
    """A callable that is no module, and holds one."""

    def __init__(self, criterion):
        self.criterion = criterion

    def __call__(self, output, target):
        return self.criterion(output, target)


def call(criterion, output, target):
    return criterion(output, target)


def through_another(output, target):
    return through_a_global(output, target)


def through_a_global(output, target):
    return LEARNED(output, target)


def test_a_loss_with_weights_of_its_own_is_refused(alone):
    """They were in no optimizer, and never trained."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4)
    plan = make_plan(Case("plain", make_case("mlp").spec, model, x[:2], None), 1)
    for loss in (Weighted(), Weighted().forward, functools.partial(Weighted())):
        with pytest.raises(InvalidInput, match=r"Weighted with trainable.*own \(weights\)"):
            DistributedPipeline(model, plan, loss_fn=loss)
        with pytest.raises(InvalidInput, match="no optimizer"):
            Training(Pipeline(model, plan), loss_fn=loss)
    weighted, calls = Weighted(), [0]
    for loss in (
        lambda output, target: weighted(output, target),
        lambda output, target: LEARNED(output, target),
        through_another,
        Held(weighted),
        functools.partial(call, weighted),
    ):
        with pytest.raises(InvalidInput, match="no optimizer"):
            Training(Pipeline(model, plan), loss_fn=loss)

    def plain(output, target):
        calls[0] += 1
        return nn.functional.mse_loss(output, target) + 0 * model[0].weight.sum()

    Training(Pipeline(model, plan), loss_fn=plain).step(x, target=x)
    assert calls == [1]
    frozen = Weighted().requires_grad_(False)
    Training(Pipeline(model, plan), loss_fn=frozen).step(x, target=x)


def test_gradients_of_inputs_are_refused_in_processes(alone):
    """``x.grad`` stayed ``None`` without a word."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4, requires_grad=True)
    plan = make_plan(Case("plain", make_case("mlp").spec, model, x.detach()[:2], None), 1)
    with DistributedPipeline(model, plan, loss_fn=nn.MSELoss()) as pipeline:
        with pytest.raises(InvalidInput, match=r"shape \(8, 4\) requires a gradient.*detach\(\)"):
            pipeline.step(x, target=torch.zeros(8, 4))
        pipeline.evaluate(x)
    Pipeline(model, plan)(x).sum().backward()
    assert x.grad is not None


def test_sharded_weights_are_clipped_by_their_whole_norm_or_refused(alone):
    """Each rank clipped by the norm of its own shards, so that ranks scaled by different factors.

    With one rank the mesh's sum is the shard's own; `gathered` counts that it was asked for.
    """
    mesh = init_device_mesh("cpu", (1,))
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4)
    plan = make_plan(Case("plain", make_case("mlp").spec, model, x[:2], None), 1)
    weight = distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)])
    model[0].weight = nn.Parameter(weight)
    with pytest.raises(InvalidInput, match=r"'0\.weight' is a DTensor.*fully_shard"):
        DistributedPipeline(model, plan, loss_fn=nn.MSELoss())
    gradient = distribute_tensor(torch.full((4, 4), 2.0), mesh, [Shard(0)])
    model[0].weight.grad = gradient
    gathered = []
    with pytest.MonkeyPatch.context() as patch:
        whole = DTensor.full_tensor
        patch.setattr(DTensor, "full_tensor", lambda t: (gathered.append(t.shape), whole(t))[1])
        squares = sum_of_squares([model[0].weight], {}, torch.device("cpu"), sums_shards=True)
    assert float(squares) == 64
    assert gathered == [()]
