"""Stages compiled by torch, with `torch.nn.Module.compile`, compute what they did before."""

import copy

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager

from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.pipeline import Pipeline
from tests.runtime.equality_worker import plan_of
from tests.torch_models import make_batch, make_case, make_plan, traced_profile

pytestmark = [
    pytest.mark.timeout(180),
    # Both arise inside torch's own tracing.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def compiled():
    """A backend for ``compile``, and what it was given."""
    torch._dynamo.reset()
    found = []

    def backend(graph, inputs, **options):
        found.append(graph)
        return aot_eager(graph, inputs, **options)

    yield backend, found
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["never", "always"])
def test_in_one_process(compiled, mode):
    backend, graphs = compiled
    case = make_case("mlp")
    plan = make_plan(case, 2)
    batch, target = make_batch(case, plan)
    whole = copy.deepcopy(case.model)
    pipeline = Pipeline(case.model, plan, checkpoint=mode)
    for stage in pipeline.stages:
        stage.compile(backend=backend)
    case.loss_fn(pipeline(*batch), target).backward()
    case.loss_fn(whole(*batch), target).backward()
    assert len(graphs) >= 2
    for one, other in zip(pipeline.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_across_processes(compiled, recompute):
    """One process of two stages stands for several: what is compiled knows nothing of others."""
    backend, graphs = compiled
    case = make_case("mlp")
    variant = {
        "schedule": "interleaved_1f1b", "stages": 2, "chunks": 2, "recompute": recompute,
    }  # fmt: skip
    plan = plan_of(variant, traced_profile(case), torch.float32)
    batch, target = make_batch(case, plan)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = []
    try:
        for is_compiled in (False, True):
            made = DistributedPipeline(copy.deepcopy(case.model), plan, loss_fn=case.loss_fn)
            for stage in made.stages.values() if is_compiled else ():
                stage.compile(backend=backend)
            loss = made.step(*batch, target=target)
            found.append([loss, *(each.grad for each in made.module.parameters())])
            made.close()
    finally:
        dist.destroy_process_group()
    assert len(graphs) >= 2
    torch.testing.assert_close(found[1], found[0])
