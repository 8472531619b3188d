"""What goes wrong before anything runs says what to do instead."""

import pytest
import torch
import torch.distributed as dist

from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.runtime.distributed import DistributedPipeline
from tests.torch_models import make_batch, make_case, make_plan

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
    with pytest.raises(PlanMismatch, match="2 stages, but 1 ranks"):
        DistributedPipeline(case.model, make_plan(case, 2), loss_fn=case.loss_fn)


def test_a_batch_must_be_the_plans_microbatches(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=case.loss_fn)
    with pytest.raises(InvalidInput, match="4 micro-batches of 4"):
        pipeline.step(torch.randn(15, 64), target=torch.zeros(15, dtype=torch.int64))
    with pytest.raises(InvalidInput, match="target"):
        pipeline.step(torch.randn(16, 64))
    pipeline.close()


def test_an_error_of_the_model_is_not_blamed_on_a_rank(alone):
    case = make_case("mlp")
    plan = make_plan(case, 1)
    pipeline = DistributedPipeline(case.model, plan, loss_fn=lambda output, target: output[:, 99])
    batch, target = make_batch(case, plan)
    with pytest.raises(IndexError):
        pipeline.step(*batch, target=target)
    pipeline.close()


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
