"""Losses that are means or sums over samples, and those that are neither."""

import pytest
import torch
import torch.nn.functional as F

from stagewright.core.errors import InvalidInput
from stagewright.runtime.engine.loss_reduction import ReductionCheck

CPU = torch.device("cpu")


def contrast(output, target):
    """Pairs of a batch against each other, as in contrastive learning."""
    return F.cross_entropy(output @ target.T, torch.arange(len(output)))


def count_some(output, target):
    labels = torch.where(torch.arange(len(output)) < len(output) // 2 + 1, 1, -100)
    return F.cross_entropy(output, labels)


LOSSES = {
    "mean": F.mse_loss,
    "sum": lambda output, target: F.mse_loss(output, target, reduction="sum"),
    "neither": contrast,
    "uneven": count_some,
}


def look(kind, reduction, size):
    check = ReductionCheck(reduction, CPU)
    for _ in range(2):
        outputs, target = torch.randn(2, size, 4, dtype=torch.float64).unbind()
        check.look(lambda given, target: LOSSES[kind](given[0], target), [outputs, None], target)
    return check


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_is_what_it_is_said_to_be(reduction, size):
    assert look(reduction, reduction, size)._is_done
    other = "sum" if reduction == "mean" else "mean"
    with pytest.raises(InvalidInput, match=f"loss_reduction={reduction!r}$"):
        look(reduction, other, size)


@pytest.mark.parametrize("size", [1, 4])
def test_a_loss_that_couples_samples_is_refused(size):
    with pytest.raises(InvalidInput, match=r"no mean over samples.*loss_reduction='microbatch'"):
        look("neither", "mean", size)
    look("neither", "microbatch", size)


def test_a_mean_over_some_of_the_samples_is_refused():
    with pytest.raises(InvalidInput, match="no mean over samples"):
        look("uneven", "mean", 5)


def test_what_cannot_be_compared_is_taken():
    check = ReductionCheck("mean", CPU)

    def fixed(given, target):
        return given[0].reshape(4, 4).square().mean() + torch.rand(())

    check.look(fixed, [torch.randn(4, 4)], torch.randn(4))
    check = ReductionCheck("mean", CPU)
    check.look(lambda given, target: torch.rand(()), [torch.randn(4, 4)], torch.randn(4))


def test_a_reduction_that_there_is_not_is_refused():
    with pytest.raises(InvalidInput, match="loss_reduction is 'max'"):
        ReductionCheck("max", CPU)


def test_the_device_is_waited_for_once():
    check, reads = ReductionCheck("mean", CPU), []

    class Reads(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                reads.append(func)
            return func(*args, **(kwargs or {}))

    with Reads():
        for _ in range(3):
            outputs, target = torch.randn(2, 4, 4).unbind()
            check.look(lambda given, target: F.mse_loss(given[0], target), [outputs], target)
    assert not reads, "values are read one by one"
