"""A recorded step is one whole step, whatever else ran while it was recorded."""

import pytest
import torch
import torch.distributed as dist

from stagewright.core.errors import InvalidInput
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.trace import find_last_run, record
from tests.torch_models import make_batch, make_case, make_plan


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_evaluations_and_failed_steps_are_passed_over(alone):
    """The last actions of anything were taken for a step."""
    case = make_case("mlp")
    plan = make_plan(case, 1, num_microbatches=2)
    batch, target = make_batch(case, plan)
    with DistributedPipeline(case.model, plan, loss_fn=case.loss_fn) as pipeline:
        with record(pipeline) as trace:
            pipeline.evaluate(*batch)
        with pytest.raises(InvalidInput, match="no whole step was recorded"):
            trace.timeline()
        with record(pipeline) as trace:
            pipeline.step(*batch, target=target)
            pipeline.evaluate(*batch)
            with pytest.raises((InvalidInput, RuntimeError)):
                pipeline.step(*batch, target=torch.zeros(len(target), 7))
        events = trace.timeline().events
    assert [(event.kind.value, event.microbatch) for event in events] == [
        ("F", 0), ("B", 0), ("F", 1), ("B", 1),
    ]  # fmt: skip


def test_the_last_whole_run_is_found():
    assert find_last_run("abcabdab", "ab") == 6
    assert find_last_run("abcabd", "abc") == 0
    assert find_last_run("ab", "abc") is None
    assert find_last_run("", "a") is None


def test_a_pipeline_in_one_process_is_refused():
    """Cause: an AttributeError, at the end of the step."""
    case = make_case("mlp")
    pipeline = Pipeline(case.model, make_plan(case, 1, num_microbatches=2))
    with pytest.raises(InvalidInput, match="a Pipeline cannot be recorded"), record(pipeline):
        pass
