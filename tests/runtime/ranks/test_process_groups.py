"""Groups made for a pipeline wait as long as the group they are made from."""

import json
import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from stagewright.core.errors import InvalidInput
from stagewright.runtime.ranks import process_groups as groups_module
from stagewright.runtime.ranks.process_groups import (
    WATCHDOG,
    ProcessGroups,
    group_timeout,
    init_process_group,
)
from tests.runtime.forked import run_worker


@pytest.fixture
def alone():
    """A process group of this process only, with a timeout of its own."""
    waits = timedelta(seconds=17)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=waits)
    yield
    dist.destroy_process_group()


def test_a_script_started_without_a_launcher_is_told_of_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInput, match=r"RANK, .*torchrun --nproc-per-node"):
        init_process_group(backend="gloo")


@pytest.mark.distributed
def test_new_groups_have_the_timeout_of_the_old(alone):
    """With torch's half hour a rank that hangs was waited for until it went on by itself."""
    groups = ProcessGroups(None)
    assert group_timeout(None) == timedelta(seconds=17)
    assert group_timeout(groups.create_group_of_all()) == timedelta(seconds=17)
    made = groups.create_groups([(0,)])
    assert group_timeout(made[(0,)]) == timedelta(seconds=17)
    groups.close()


@pytest.mark.distributed
@pytest.mark.parametrize("before", [None, "1"])
def test_torch_does_not_end_the_process_for_groups_made_here(alone, monkeypatch, before):
    """Its watchdog raises in a thread of its own, ahead of the error that names the lost rank."""
    seen = []
    create = dist.new_group

    def new_group(*args, **options):
        seen.append([os.environ[name] for name in WATCHDOG])
        return create(*args, **options)

    monkeypatch.setattr(dist, "new_group", new_group)
    for name in WATCHDOG:
        if before is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, before)
    groups = ProcessGroups(None)
    groups.create_group_of_all()
    groups.close()
    assert seen == [["0", "0"]]
    assert [os.environ.get(name) for name in WATCHDOG] == [before] * 2


@pytest.mark.distributed
def test_a_given_group_and_bound_devices_are_refused(alone, monkeypatch):
    """Members would split NCCL's communicator, for which it waits for all ranks there are."""
    given = ProcessGroups(dist.group.WORLD)
    monkeypatch.setattr(groups_module, "is_bound_to_devices", lambda: True)
    with pytest.raises(InvalidInput, match="init_process_group without device_id"):
        given.create_group_of_all()
    groups = ProcessGroups(None)
    groups.create_group_of_all()
    groups.close()


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_overlapping_sets_of_a_given_group_find_each_other(forking_executable):
    """torch's names hold how many groups a rank has, so that two ranks waited under two names.

    And they came again for later groups, which found the addresses of those that were destroyed.
    """
    output = run_worker(forking_executable, "tests.runtime.groups_worker", timeout_s=110)
    told = {found.pop("rank"): found for found in map(json.loads, output.splitlines())}
    assert [found.pop("names") for found in told.values()] == [6, 6, 6]
    assert told[0] == {"(0, 1)": 11, "(0, 2)": 101, "everyone": 111}
    assert told[1] == {"(0, 1)": 11, "(1, 2)": 110, "everyone": 111}
    assert told[2] == {"(0, 2)": 101, "(1, 2)": 110, "everyone": 111}
