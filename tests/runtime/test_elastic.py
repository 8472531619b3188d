"""A job that loses a rank goes on by itself, from its last checkpoint, with the same numbers."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.killed_launched import Launched, wait_until
from benchmarks.killed_ranks import checkpoint_loads, made_up_profile
from examples.elastic import batch_of, build_model, make_optimizer
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput, RankFailed
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.runtime import elastic
from tests.nccl.process_group import find_deadlocks
from tests.runtime.forked import MANNERS

STEPS, SAVE_EVERY, KILLED_AT = 120, 20, 30
SIZE = 4 * 8

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def profile():
    return made_up_profile()


@pytest.fixture
def ranks(monkeypatch):
    """Makes this process take the part of any of two ranks, which share a store."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(elastic.distributed_c10d, "_get_default_store", lambda: store)
    return lambda rank: monkeypatch.setattr(dist, "get_rank", lambda: rank)


def unsplit_losses():
    model = build_model()
    optimizer, losses = make_optimizer(model), {}
    for step in range(STEPS):
        batch, target = batch_of(step, SIZE)
        loss = cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = float(loss.detach())
    return losses


@pytest.mark.distributed
@pytest.mark.parametrize("manners", ["gloo", "as on NCCL"])
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    tmp_path, profile, forked_python, monkeypatch, manners
):
    if manners == "as on NCCL":
        monkeypatch.setenv(MANNERS, str(tmp_path))
    profile.write(tmp_path / "profile.json")
    torchrun = ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    script = [
        str(tmp_path / "profile.json"), "--checkpoints", str(tmp_path / "run"), "--stages", "2",
        "--steps", str(STEPS), "--save-every", str(SAVE_EVERY),
    ]  # fmt: skip
    with Launched(torchrun, script, {}) as job:
        wait_until(lambda: any(f"step {KILLED_AT}:" in line for line in job.lines), [job], 100)
        os.kill(next(process for rank, _, process, _ in job.starts() if rank == 1), signal.SIGKILL)
        assert job.process.wait(100) == 0, "\n".join(job.lines)
        assert not job.processes()
        assert not [pid for _, _, pid, _ in job.starts() if Path(f"/proc/{pid}").exists()]
        job.kill()
    if manners == "as on NCCL":  # the ranks that went on
        assert find_deadlocks(tmp_path) == []
    resumed = {step for _, _, _, step in job.starts()[2:]}
    assert len(resumed) == 1
    assert min(resumed) >= KILLED_AT // SAVE_EVERY * SAVE_EVERY
    assert checkpoint_loads(tmp_path / "run") == STEPS
    printed = [re.match(r"step (\d+): loss (.*)", line) for line in job.lines]
    found = [(int(match[1]), float(match[2])) for match in printed if match]
    expected = unsplit_losses()
    assert {step for step, _ in found} == set(expected)
    for step, loss in found:
        assert loss == pytest.approx(expected[step], abs=1e-5), f"step {step}"


def test_all_ranks_have_the_plan_of_rank_0(profile, ranks):
    def plan_for(devices):
        return plan(profile, Cluster.uniform(devices), PlanOptions(num_stages=devices))

    ranks(0)
    made = elastic.plan_for_world(plan_for)
    ranks(1)
    assert elastic.plan_for_world(lambda devices: pytest.fail("it is not asked")) == made
    assert elastic.ranks_of(made) == made.num_stages == 2


def test_too_little_memory_is_said_on_every_rank(profile, ranks):
    def plan_for(devices):
        return plan(profile, Cluster.uniform(devices, memory_bytes=1000))

    messages = []
    for rank in (0, 1):
        ranks(rank)
        with pytest.raises(Infeasible) as caught:
            elastic.plan_for_world(plan_for)
        messages.append((str(caught.value), caught.value.constraint))
    assert messages[0] == messages[1]
    assert messages[0][1] == "memory"


def test_a_plan_for_more_devices_than_ranks_is_refused_on_every_rank(profile, ranks):
    three = plan(profile, Cluster.uniform(3), PlanOptions(num_stages=3))
    for rank in (0, 1):
        ranks(rank)
        with pytest.raises(InvalidInput, match="for 2 devices uses 3"):
            elastic.plan_for_world(lambda _: three)


def test_a_rank_0_that_gives_no_plan_is_named(ranks):
    ranks(1)
    with pytest.raises(RankFailed, match=r"rank 0 sent no plan within 0.01 s") as caught:
        elastic.plan_for_world(lambda _: None, timeout_s=0.01)
    assert caught.value.ranks == (0,)


def test_launchers_that_share_a_store_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(InvalidInput, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        elastic.join()


def test_a_spare_rank_leaves_when_the_others_have_finished(profile, ranks):
    alone = plan(profile, Cluster.uniform(1), PlanOptions(num_stages=1))
    ranks(0)
    elastic.release_spares(alone, timeout_s=0)
    ranks(1)
    elastic.wait_as_spare()
    ranks(0)
    elastic.release_spares(alone)  # returns: the spare rank has said that it left
