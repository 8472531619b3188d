"""Whatever makes ranks wait on a device ends where the watcher can end it, before its use.

Events stand in for a GPU whose stream waits for a lost rank: the watcher fires when the host waits.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stagewright.core.errors import RankFailed
from stagewright.core.rank_heartbeats import FailureVerdict
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.engine.finite_check import FiniteCheck
from stagewright.runtime.trace import Trace
from tests.torch_models import make_batch, make_case, make_plan


@pytest.fixture
def case():
    return make_case("mlp")


@pytest.fixture
def pipeline(case, monkeypatch):
    """A rank alone, whose device it must wait for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = DistributedPipeline(case.model, make_plan(case, 1), loss_fn=case.loss_fn)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(found, "_watcher", mock.Mock())
    verdict = FailureVerdict((1,), "rank 1 stopped answering")
    monkeypatch.setattr(found._detector, "find_out", lambda: verdict)
    yield found
    found._watcher = None
    found.close()
    dist.destroy_process_group()


def catch_waits(monkeypatch, synchronise):
    """Call a function wherever the host waits for the device."""
    event = mock.Mock(return_value=mock.Mock(synchronize=synchronise))
    monkeypatch.setattr(torch.cuda, "Event", event)
    read = torch.Tensor.__float__

    def wait_and_read(self):
        synchronise()
        return read(self)

    monkeypatch.setattr(torch.Tensor, "__float__", wait_and_read)


def lose_a_rank(pipeline):
    """Abort communication, as the watcher does."""
    pipeline._detector.was_aborted = True


USES = {
    "clip": lambda pipeline, batch, _: pipeline.clip_grad_norm_(1e-6),
    "evaluate": lambda pipeline, batch, _: pipeline.evaluate(*batch),
    "step": lambda pipeline, batch, target: pipeline.step(*batch, target=target),
    "scaled step": lambda pipeline, batch, target: pipeline.step(
        *batch, target=target, loss_scale=2.0
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_rank_lost_behind_the_host_s_back_is_an_error(case, pipeline, monkeypatch, use):
    """The norm was read, and garbage applied, after the watcher had stopped looking."""
    batch, target = make_batch(case, pipeline.plan)
    pipeline.step(*batch, target=target)
    before = [parameter.grad.clone() for parameter in pipeline.module.parameters()]
    catch_waits(monkeypatch, lambda: lose_a_rank(pipeline))
    pipeline.check_finite = use != "step"
    with pytest.raises(RankFailed, match="rank 1 stopped answering"):
        USES[use](pipeline, batch, target)
    if use == "clip":
        found = [parameter.grad for parameter in pipeline.module.parameters()]
        assert all(map(torch.equal, found, before))


@pytest.mark.parametrize("checks", [True, False])
def test_batches_are_compared_after_the_wait_for_other_ranks(case, pipeline, monkeypatch, checks):
    """Before it a rank may not have published its own yet, and would be left out."""
    told = []
    catch_waits(monkeypatch, lambda: told.append("wait"))
    monkeypatch.setattr(FiniteCheck, "find", lambda *_: told.append("wait"))
    monkeypatch.setattr(pipeline._batches, "compare", lambda _: told.append("compare"))
    pipeline.check_finite = checks
    batch, target = make_batch(case, pipeline.plan)
    pipeline.step(*batch, target=target)
    assert told == ["wait", "compare"]


@pytest.mark.parametrize("name", ["broadcast", "all_gather_object"])
def test_a_recording_waits_where_a_lost_rank_is_an_error(pipeline, monkeypatch, name):
    trace = Trace(pipeline)
    monkeypatch.setattr(dist, name, lambda *_, **__: lose_a_rank(pipeline))
    use = trace.timeline if name == "all_gather_object" else lambda: Trace(pipeline)
    with pytest.raises(RankFailed, match="rank 1 stopped answering"):
        use()


def test_ranks_meet_on_the_gpu_of_each(pipeline, monkeypatch):
    """NCCL would take the current one, and several ranks the same."""
    meet = mock.Mock()
    monkeypatch.setattr(dist, "barrier", meet)
    monkeypatch.setattr(pipeline, "device", torch.device("cuda", 1))
    pipeline.barrier()
    assert meet.call_args.kwargs == {"device_ids": [1]}
