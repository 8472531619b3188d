"""A rank measures links from the GPU that its launcher gave it."""

import pytest
import torch

from stagewright.core.errors import InvalidInput, RankFailed
from stagewright.profiler.links.rank_group import RankGroup, _device
from stagewright.profiler.links.records import LinkOptions
from tests.profiler.cuda_stub import Card, CudaStub


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with CudaStub(Card()).in_force() as stub:
        yield stub


def test_the_local_rank_counts_where_all_gpus_are_seen(stub):
    stub.cards *= 4
    assert _device(None) == torch.device("cuda", 3)


def test_a_rank_that_sees_its_own_gpu_alone_takes_it(stub, monkeypatch):
    """It was refused, though the runtime takes it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert _device(None) == torch.device("cuda", 0)


@pytest.mark.parametrize("visible", ["", "0,1"])
def test_more_ranks_than_gpus_are_refused(stub, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(InvalidInput, match="rank 3 would need cuda:3, but its machine has 1"):
        _device(None)
    assert _device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), RuntimeError),
        (RuntimeError("Connection closed by peer"), RankFailed),
    ],
)
def test_lack_of_memory_is_not_blamed_on_the_other_ranks(error, raised):
    group = object.__new__(RankGroup)
    group.rank, group.options, group._beats = 0, LinkOptions(), None
    group._on_silence = lambda message: None
    expected = pytest.raises(Exception, match=r"memory|rank 0 waited for rank 1")
    with expected as caught, group.waiting_for([1], "to answer"):
        raise error
    assert type(caught.value) is raised
