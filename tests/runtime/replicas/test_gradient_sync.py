"""Gradients of what several ranks hold, summed; the ranks take turns in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.runtime.engine.emulated_ranks import EmulatedCollective, SynchronisationPoint
from stagewright.runtime.replicas.gradient_sync import GradientSync, SharedWeight
from stagewright.runtime.replicas.sharded import has_gradient_anywhere

RANKS = (0, 1, 2)


class Holder:
    """A rank with two weights that it shares with all others."""

    def __init__(self, meeting: SynchronisationPoint, place: int, frozen: bool) -> None:
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.ones(3), requires_grad=not frozen)
        shared = [
            SharedWeight("first", self.first, (0,), RANKS),
            SharedWeight("second", self.second, (0,), RANKS),
        ]
        self.sum = GradientSync(shared, {RANKS: EmulatedCollective(meeting, place)}, [0])


def step(holders: list[Holder], parts: list[list[Tensor]], *, sums: bool = True) -> None:
    """Every rank goes back from its parts of the loss, if it has any."""
    for holder, losses in zip(holders, parts, strict=True):
        holder.sum.begin(sums=sums)
        for number, loss in enumerate(losses):
            if sums and number == len(losses) - 1:
                holder.sum.last_backward_begins(0)
            loss.backward()
        if sums:
            holder.sum.last_backward_ended(0)
    for holder in holders:
        if sums:
            holder.sum.finish()


def three(*, frozen: bool = False) -> list[Holder]:
    meeting = SynchronisationPoint(3)
    return [Holder(meeting, place, frozen) for place in range(3)]


def test_a_weight_that_no_rank_reached_has_no_gradient():
    holders = three()
    step(holders, [[h.first.sum(), 2 * h.first.sum()] for h in holders])
    for holder in holders:
        assert torch.equal(holder.first.grad, torch.full((2,), 9.0))
        assert holder.second.grad is None


class ListIndices(TorchDispatchMode):
    """Refuses what indexing by a Python list comes down to: on a GPU, a copy that is waited for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "index" not in function._schema.name, function
        return function(*args, **(kwargs or {}))


def test_no_index_is_copied_to_the_device_for_a_weight_without_gradient(monkeypatch):
    holders = three()
    with ListIndices():
        step(holders, [[holders[0].first.sum()], [], [holders[2].second.sum()]])
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    with ListIndices():
        found = has_gradient_anywhere([True, False, False], None, torch.device("cpu"))
    assert found == [True, False, False]


def test_a_weight_that_one_rank_reached_has_one_everywhere():
    holders = three()
    step(holders, [[holders[0].first.sum()], [], [holders[2].second.sum()]])
    for holder in holders:
        assert torch.equal(holder.first.grad, torch.ones(2))
        assert torch.equal(holder.second.grad, torch.ones(3))


def test_a_weight_unfrozen_between_steps_is_summed():
    """Each replica kept its own gradient of what was unfrozen after it was made."""
    holders = three(frozen=True)
    step(holders, [[h.first.sum()] for h in holders])
    for holder in holders:
        holder.second.requires_grad_(True)
    step(holders, [[h.first.sum() + h.second.sum()] for h in holders])
    for holder in holders:
        assert torch.equal(holder.first.grad, torch.full((2,), 6.0))
        assert torch.equal(holder.second.grad, torch.full((3,), 3.0))
        holder.first.requires_grad_(False)
    step(holders, [[h.second.sum()] for h in holders])
    for holder in holders:
        assert torch.equal(holder.first.grad, torch.full((2,), 6.0))
        assert torch.equal(holder.second.grad, torch.full((3,), 6.0))


@pytest.mark.parametrize("course", [(True, False, True), (False, True), (False, False, True, True)])
def test_every_step_counts_once_wherever_it_is_summed(course):
    holders = three()
    for sums in course:
        step(holders, [[h.first.sum()] for h in holders], sums=sums)
    for holder in holders:
        assert torch.equal(holder.first.grad, torch.full((2,), 3.0 * len(course)))
