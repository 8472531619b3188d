"""Batches reach a GPU once, on the ranks that use them, and nobody waits for the copies."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.engine import batch_io
from stagewright.runtime.ranks.device_placement import move_to_device
from tests.torch_models import make_batch, make_case, make_plan

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_copy_to_a_gpu_is_made_from_pinned_memory_without_waiting(is_pinned):
    tensor = mock.Mock(is_cuda=False)
    tensor.is_pinned.return_value = is_pinned
    moved = move_to_device(tensor, GPU)
    source = tensor if is_pinned else tensor.pin_memory.return_value
    assert tensor.pin_memory.called != is_pinned
    source.to.assert_called_once_with(GPU, non_blocking=True)
    assert moved is source.to.return_value


@pytest.fixture
def pipeline():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    case = make_case("mlp")
    plan = make_plan(case, 1, num_microbatches=2)
    with DistributedPipeline(case.model, plan, loss_fn=case.loss_fn) as made:
        yield case, made
    dist.destroy_process_group()


@pytest.mark.distributed
def test_a_target_is_moved_once_and_inputs_only_where_they_are_used(pipeline, monkeypatch):
    """Every micro-batch's target was moved on its own, and every rank moved all inputs."""
    case, made = pipeline
    moved = []

    def move(tensor, device):
        moved.append((len(tensor), device))
        return tensor

    monkeypatch.setattr(batch_io, "move_to_device", move)
    batch, target = make_batch(case, made.plan)
    made.step(*batch, target=target)
    assert moved == [(len(target), torch.device("cpu"))]
    moved.clear()
    made._first._device = GPU
    assert len(made._first.microbatches(tuple(batch), {}, are_used=False)) == 2
    assert moved == []
    made._first.microbatches(tuple(batch), {})
    assert moved == [(len(target) // 2, GPU)] * 2
