"""A loss that reads weights which its stage does not hold is refused: their gradients were lost."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.engine.loss_graph import LossGraphCheck
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.training import Training
from stagewright.runtime.verify import verify
from tests.torch_models import Case, traced_profile

MICROBATCHES = 2


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plan_of(model, balance):
    profile = traced_profile(Case("own", None, model, torch.ones(2, 4), mse_loss))
    options = PlanOptions(num_microbatches=MICROBATCHES)
    return plan_from_balance(profile, Cluster.uniform(len(balance)), options, balance)


def penalty_on(*modules):
    def loss_fn(output, target):
        weights = [weight for module in modules for weight in module.parameters()]
        return mse_loss(output, target) + sum(weight.square().sum() for weight in weights)

    return loss_fn


BATCH = torch.randn(4, 4), torch.randn(4, 4)


def test_a_penalty_on_weights_of_another_stage_is_refused(model):
    """99 % off in processes, while this rehearsal took both for fine."""
    plan = plan_of(model, [1, 2])
    with pytest.raises(InvalidInput, match=r"reads trainable weights .* weight_decay"):
        verify(model, plan, *BATCH, penalty_on(model))


def penalty(held, output):
    parts = [weight.square().sum() for weight in held.parameters()]
    return output.square().mean() + sum(parts)


@pytest.mark.parametrize("read", [0, 2])
def test_weights_of_the_last_stage_may_be_read(model, read):
    check = LossGraphCheck(model, model[2])
    output = model(BATCH[0])
    if read == 0:
        with pytest.raises(InvalidInput, match=r"weights \(0\.bias, 0\.weight\) that the stage"):
            check.run(lambda: penalty(model[0], output), [output])
    else:
        check.run(lambda: penalty(model[2], output), [output]).backward()


def test_weights_of_which_ranks_hold_parts_may_not_be_read(model):
    """The loss would be that of this rank's part, and differ between ranks."""
    check = LossGraphCheck(model, model[2], {"2.weight"})
    output = model(torch.ones(2, 4))
    with pytest.raises(InvalidInput, match=r"2\.weight.* hold parts"):
        check.run(lambda: output.sum() + model[2].weight.norm(), [output])
    check.run(lambda: output.sum() + model[2].bias.norm(), [output])


def test_an_output_that_the_loss_changes_in_place_is_still_an_output(model):
    output = model(BATCH[0])
    check = LossGraphCheck(model, nn.Identity())
    check.run(lambda: output.mul_(2).sum(), [output]).backward()


@pytest.mark.distributed
def test_a_rank_may_read_all_that_it_holds_and_nothing_else(model, alone):
    x, target = BATCH
    plan = plan_of(model, [3])
    with DistributedPipeline(model, plan, loss_fn=penalty_on(model)) as pipeline:
        pipeline.step(x, target=target)
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    penalty_on(model)(model(x), target).backward()
    torch.testing.assert_close(expected, model[0].weight.grad)
    other = nn.Linear(4, 4)
    with (
        DistributedPipeline(model, plan, loss_fn=Hidden([other]).loss) as pipeline,
        pytest.raises(InvalidInput, match="reads trainable weights that the stage"),
    ):
        pipeline.step(x, target=target)


class Hidden:
    """Holds a module where no look at a function finds it."""

    def __init__(self, modules):
        self.modules = {"heads": tuple(modules)}

    def loss(self, output, target):
        return mse_loss(self.modules["heads"][0](output), target)


class Trainer:
    """A plain object with a head that only its loss uses."""

    def __init__(self):
        self.head, self.averaged = nn.Linear(4, 4), nn.Linear(4, 4)

    def compute_loss(self, output, target):
        return mse_loss(self.head(output), target)

    def compute_other_loss(self, output, target):
        return mse_loss(output, target)


def test_the_head_of_a_plain_trainer_is_refused_and_what_its_loss_does_not_read_is_not(model):
    """The head was never trained, without a word."""
    pipeline = Pipeline(model, plan_of(model, [1, 2]))
    with pytest.raises(InvalidInput, match=r"Linear with trainable parameters of its own"):
        Training(pipeline, loss_fn=Trainer().compute_loss)
    Training(pipeline, loss_fn=Trainer().compute_other_loss).step(BATCH[0], target=BATCH[1])
    with pytest.raises(InvalidInput, match="reads trainable weights that the stage"):
        Training(pipeline, loss_fn=Hidden([nn.Linear(4, 4)]).loss).step(BATCH[0], target=BATCH[1])


@pytest.mark.distributed
@pytest.mark.parametrize("forbid", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(model, alone, forbid):
    """Ranks returned a loss and never trained."""
    x, target = BATCH
    training = Training(Pipeline(model, plan_of(model, [1, 2])), loss_fn=mse_loss)
    with forbid(), pytest.raises(InvalidInput, match=r"torch\.no_grad\(\) or"):
        training.step(x, target=target)
    with (
        DistributedPipeline(model, plan_of(model, [3]), loss_fn=mse_loss) as pipeline,
        forbid(),
        pytest.raises(InvalidInput, match=r"torch\.no_grad\(\) or"),
    ):
        pipeline.step(x, target=target)


def test_an_optimizer_that_needs_a_closure_is_refused(model):
    """`update` raised a bare TypeError; ranks would each have searched a direction alone."""
    training = Training(Pipeline(model, plan_of(model, [1, 2])), loss_fn=mse_loss)
    with pytest.raises(InvalidInput, match="needs no closure"):
        training.optimizer(torch.optim.LBFGS)
