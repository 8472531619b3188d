"""Deferred batch normalisation."""

import copy

import pytest
import torch
from torch import nn

from stagewright.torchgpipe import GPipe
from stagewright.torchgpipe.batchnorm import DeferredBatchNorm


def chunked(module, x, chunks):
    return torch.cat([module(part) for part in x.chunk(chunks)])


def images(count=16):
    return torch.rand(count, 3, 12, 12) * torch.tensor([1.0, 2, 3])[:, None, None] + 1


def close(one, other, atol=1e-3):
    torch.testing.assert_close(one, other, atol=atol, rtol=0)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("chunks", [1, 4])
def test_statistics_are_those_of_whole_batches(chunks, momentum):
    norm = nn.BatchNorm2d(3, momentum=momentum)
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(norm), chunks)
    for _ in range(3):
        x = images()
        norm(x)
        chunked(deferred, x, chunks)
    close(deferred.running_mean, norm.running_mean)
    close(deferred.running_var, norm.running_var, atol=5e-3)
    assert deferred.num_batches_tracked == norm.num_batches_tracked
    assert deferred.sum.abs().max() == 0
    x = images()
    close(deferred.eval()(x), norm.eval()(x), atol=1e-2)


@pytest.mark.parametrize("input_has_gradient", [True, False])
def test_outputs_and_gradients_are_those_of_micro_batches(input_has_gradient):
    norm = nn.BatchNorm2d(3)
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(norm), 4)
    inputs = [images().requires_grad_(input_has_gradient)]
    inputs.append(inputs[0].detach().clone().requires_grad_(input_has_gradient))
    outputs = [chunked(m, x, 4) for m, x in zip((norm, deferred), inputs, strict=True)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.pow(3).mean().backward()
    torch.testing.assert_close(deferred.weight.grad, norm.weight.grad)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    assert deferred.sum.grad_fn is None


def test_what_is_converted():
    plain = nn.BatchNorm2d(3, track_running_stats=False)
    assert DeferredBatchNorm.convert_deferred_batch_norm(plain, 4) is plain
    deferred = DeferredBatchNorm(3, chunks=4)
    assert DeferredBatchNorm.convert_deferred_batch_norm(deferred, 4) is deferred
    assert DeferredBatchNorm.convert_deferred_batch_norm(deferred, 5) is not deferred
    nested = nn.Sequential(nn.Sequential(nn.BatchNorm1d(3).double()), nn.BatchNorm2d(3).eval())
    weight = nested[0][0].weight
    assert DeferredBatchNorm.convert_deferred_batch_norm(nested, 2) is nested
    assert isinstance(nested[0][0], DeferredBatchNorm)
    assert nested[0][0].weight is weight
    assert nested[0][0].sum.dtype == torch.double
    assert not nested[1].training


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("size", [16, 13, 2])
def test_in_a_pipeline_also_for_indivisible_and_tiny_batches(size, checkpoint):
    """torchgpipe waits for the rest of a tiny batch until the next one, and is out of step then."""
    norm = nn.BatchNorm2d(3)
    model = GPipe(nn.Sequential(copy.deepcopy(norm)), [1], devices=["cpu"], chunks=4,
                  checkpoint=checkpoint, deferred_batch_norm=True)  # fmt: skip
    for _ in range(2):
        x = images(size)
        norm(x)
        model(x).mean().backward()
    close(model[0].running_mean, norm.running_mean)
    close(model[0].running_var, norm.running_var, atol=5e-3)
    assert model[0].num_batches_tracked == 2
    model.eval()
    before = model[0].running_mean.clone()
    model(x)
    assert torch.equal(model[0].running_mean, before)


def test_a_batch_that_fails_is_forgotten():
    model = GPipe(nn.Sequential(nn.BatchNorm2d(3), nn.Linear(12, 1)), [1, 1],
                  devices=["cpu"] * 2, chunks=4, deferred_batch_norm=True)  # fmt: skip
    model(images())
    before = model[0].running_mean.clone()
    with pytest.raises(RuntimeError):
        model(images()[..., :11])
    assert model[0].tracked == 0
    assert torch.equal(model[0].running_mean, before)
    model(images())
    assert model[0].num_batches_tracked == 2
