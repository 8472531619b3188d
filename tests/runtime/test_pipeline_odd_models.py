"""Odd models in one process, every stage computed again: the model's numbers all the same."""

import copy

import pytest
import torch

from stagewright.capture.equivalence.check import relative_difference
from stagewright.runtime.pipeline import Pipeline
from tests.runtime import odd_models
from tests.runtime.test_odd_models import loss_of_anything, plan_with_every_cut


def tensors(output):
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("build", odd_models.EQUAL, ids=lambda build: build.__name__)
def test_checkpointed_stages_compute_the_model(build):
    torch.manual_seed(0)
    model = build()
    plan = plan_with_every_cut(model, torch.randn(4, 4))
    whole = copy.deepcopy(model)
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    pipeline = Pipeline(model, plan, checkpoint="always")
    expected = [whole(part.clone()) for part in batch.chunk(2)]
    found = pipeline(batch.clone())
    tolerance = 2e-2 if build is odd_models.Autocast else 1e-5
    for ours, *parts in zip(tensors(found), *map(tensors, expected), strict=True):
        theirs = torch.cat(parts) if parts[0].dim() else sum(parts) / 2
        assert relative_difference(ours, theirs) <= tolerance
    loss_of_anything(found, target).backward()
    for output, wanted in zip(expected, target.chunk(2), strict=True):
        (loss_of_anything(output, wanted) / 2).backward()
    theirs = dict(whole.named_parameters())
    for name, parameter in pipeline.named_parameters():
        wanted = theirs[name].grad
        if parameter.grad is None or wanted is None:
            rest = parameter.grad if wanted is None else wanted
            assert rest is None or not rest.any(), name
        else:
            assert relative_difference(parameter.grad, wanted) <= tolerance, name
    for (name, ours), wanted in zip(pipeline.named_buffers(), whole.buffers(), strict=True):
        assert relative_difference(ours, wanted) <= tolerance, name
