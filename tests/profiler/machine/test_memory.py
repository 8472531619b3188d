"""Memory that runs out on a GPU is recognised, told from another GPU's, and free again."""

import weakref

import pytest
import torch

from stagewright.core.errors import OutOfMemory
from stagewright.profiler.machine.conditions import watched
from stagewright.profiler.machine.memory import device_bytes, free_after, is_out_of_memory
from tests.profiler.cuda_stub import SLICE, Card, CudaStub


@pytest.fixture
def stub():
    with CudaStub(Card(total_memory=1000), Card(total_memory=3000)).in_force() as stub:
        yield stub


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
    ],
)
def test_memory_runs_out_in_cuda_calls_without_torchs_allocator(said):
    """They were failures of the layer: no advice, no exit code of lacking memory."""
    assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(RuntimeError("CUDA error: invalid device ordinal"))


def raised(stub, size, device):
    try:
        stub.take(size, device)
    except torch.OutOfMemoryError as error:
        return error
    return None


def test_the_gpu_that_ran_out_is_the_one_that_is_named(stub):
    """A model that was moved to the second GPU ran out on the first, whose memory was said."""
    error = raised(stub, 5000, torch.device("cuda", 1))
    assert stub.current == 0
    assert device_bytes(error) == 3000
    assert device_bytes(torch.OutOfMemoryError("no more")) == 1000
    assert device_bytes(MemoryError()) is None


def test_a_slice_has_its_own_memory():
    with CudaStub(SLICE).in_force() as stub:
        error = raised(stub, 2**40, None)
        assert device_bytes(error) == SLICE.total_memory < 5 * 2**30


class Held:
    """Something large."""


def fail(kept):
    large = Held()
    kept.append(weakref.ref(large))
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_what_a_failed_call_held_is_free_while_its_error_lives(stub):
    """Naming the layer that ran out ran out itself: the failed run's tensors were still there."""
    kept = []
    try:
        try:
            fail(kept)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("in a layer") from error
    except OutOfMemory as error:
        named = error
    assert kept[0]() is not None
    free_after(named)
    assert kept[0]() is None
    assert stub.names() == ["empty_cache"]


def test_the_cache_is_emptied_when_memory_runs_out_and_else_left_alone(stub):
    kept, cpu = [], torch.device("cpu")
    with pytest.raises(torch.OutOfMemoryError) as caught, watched(cpu):
        fail(kept)
    assert kept[0]() is None
    assert caught.value.__traceback__ is not None
    assert stub.names() == ["empty_cache"]
    with pytest.raises(ValueError, match="shapes"), watched(cpu):
        raise ValueError("shapes")
    assert stub.names() == ["empty_cache"]
