"""Groups made for a pipeline wait as long as the group they are made from."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from stagewright.runtime.groups import Groups, timeout_of


@pytest.fixture
def alone():
    """A process group of this process only, with a timeout of its own."""
    waits = timedelta(seconds=17)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=waits)
    yield
    dist.destroy_process_group()


@pytest.mark.distributed
def test_new_groups_have_the_timeout_of_the_old(alone):
    """With torch's half hour a rank that hangs was waited for until it went on by itself."""
    groups = Groups(None)
    assert timeout_of(None) == timedelta(seconds=17)
    assert timeout_of(groups.everyone()) == timedelta(seconds=17)
    made = groups.of_sets([(0,)])
    assert timeout_of(made[(0,)]) == timedelta(seconds=17)
    groups.close()
