"""Ranks that are left keep their places: a node with a lost device is planned and run as such."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.runtime import elastic
from tests.builders import chain_profile

LINK = LinkLevel(bandwidth_bytes_per_s=1e9)
WHOLE = Cluster.of_nodes(2, 2, inside=LINK, between=LINK)


def follow(rank, path, answers):
    """Rank 0 is alone on its node, which lost a device; the plan puts that node last."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    cluster = elastic.cluster_of_world(WHOLE, host="ab"[min(rank, 1)], timeout_s=30)
    made = elastic.plan_for_world(
        lambda _: plan(chain_profile([1] * 6), cluster, PlanOptions(num_stages=3))
    )
    elastic.move_ranks(made, cluster)
    before = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(before, torch.tensor([rank]))
    runs = [cluster.devices[int(old)].name for old in before]
    planned = [name for stage in made.stages for name in stage.devices]
    answers.put((runs, planned))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_each_stage_runs_on_the_device_that_it_was_planned_for(tmp_path):
    """Ranks were taken in their order, and so the links planned for were those of others."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=follow, args=(rank, tmp_path / "store", answers))
        for rank in range(3)
    ]
    for each in ranks:
        each.start()
    found = [answers.get(timeout=100) for _ in ranks]
    for each in ranks:
        each.join(30)
        assert each.exitcode == 0
    for runs, planned in found:
        assert runs == planned == ["device:2", "device:3", "device:0"]


@pytest.fixture
def world(monkeypatch):
    """Makes this process the last of so many ranks, the others having named their hosts."""

    def build(*hosts):
        store = dist.HashStore()
        for rank, host in enumerate(hosts):
            store.set(f"{elastic.PREFIX}/host of rank {rank}", host)
        monkeypatch.setattr(dist, "get_rank", lambda: len(hosts) - 1)
        monkeypatch.setattr(dist, "get_world_size", lambda: len(hosts))
        monkeypatch.setattr(elastic.distributed_c10d, "_get_default_store", lambda: store)
        return hosts[-1]

    return build


def test_node_2_has_7_of_8(world):
    whole = Cluster.parse("4x8x80GB")
    host = world(*"a" * 8, *"b" * 8, *"c" * 7, *"d" * 8)
    assert elastic.cluster_of_world(whole, host=host) == whole.without(23)


def test_with_one_link_for_all_every_place_is_as_good(world):
    whole = Cluster.uniform(3)
    assert elastic.cluster_of_world(whole, host=world(*"ab")) == whole.without(2)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [("aaab", "host a has 3 ranks"), ("abc", "3 hosts have ranks"), ("aba", "do not follow")],
)
def test_ranks_that_do_not_match_the_cluster_are_refused(world, hosts, said):
    with pytest.raises(InvalidInput, match=said):
        elastic.cluster_of_world(WHOLE, host=world(*hosts))


def test_a_plan_for_other_devices_is_refused(world):
    world(*"ab")
    made = plan(chain_profile([1] * 4), "2xcpu", PlanOptions(num_stages=2))
    with pytest.raises(InvalidInput, match="not that of the 2 ranks"):
        elastic.move_ranks(made, Cluster.uniform(2))
