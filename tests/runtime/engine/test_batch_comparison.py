"""Batches of ranks whose data loaders disagree are refused; equal ones are not."""

import dataclasses
import types
from collections import UserDict

import pytest
import torch

from stagewright.core.errors import InvalidInput
from stagewright.runtime.engine.batch_comparison import BatchComparison, compute_checksum


class Publisher:
    """The part of a `FailureDetector` that is used; ``board`` is shared."""

    def __init__(self, board, rank, num_ranks):
        self.board, self.rank, self.num_ranks = board, rank, num_ranks

    def publish(self, name, value):
        self.board[name, self.rank] = value

    def read_all(self, name):
        return [self.board.get((name, rank)) for rank in range(self.num_ranks)]


def make_ranks(count=3):
    board = {}
    return [BatchComparison(Publisher(board, rank, count), count - 1) for rank in range(count)]


def take_step(ranks, batches, targets):
    for rank, batch, target in zip(ranks, batches, targets, strict=True):
        rank.publish(() if batch is None else (batch,), {}, target)
    for rank in ranks:
        rank.compare(7)


@dataclasses.dataclass
class Samples:
    values: torch.Tensor


BATCH, TARGET = torch.randn(8, 3), torch.arange(8)
SHUFFLED = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])


def test_equal_batches_pass_also_where_some_ranks_are_given_none():
    ranks = make_ranks()
    take_step(ranks, [BATCH, BATCH.clone(), BATCH], [TARGET] * 3)
    take_step(ranks, [BATCH, None, None], [None, None, TARGET])
    take_step(ranks, [BATCH, None, BATCH], [TARGET, None, TARGET])


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_with_other_samples_is_named(victim):
    batches = [BATCH[SHUFFLED] if rank == victim else BATCH for rank in range(3)]
    usual = " and ".join(str(rank) for rank in range(3) if rank != victim)
    words = f"different inputs for step 7: those of rank {victim} are not those of ranks {usual}"
    with pytest.raises(InvalidInput, match=words):
        take_step(make_ranks(), batches, [TARGET] * 3)
    targets = [TARGET[SHUFFLED] if rank == victim else TARGET for rank in range(3)]
    with pytest.raises(InvalidInput, match=f"different targets .* those of rank {victim} "):
        take_step(make_ranks(), [BATCH] * 3, targets)


def test_a_rank_of_another_step_is_not_compared():
    ranks = make_ranks()
    ranks[0].publish((BATCH,), {}, TARGET)
    for _ in range(3):  # as replicas that accumulate gradients without waiting for each other
        ranks[1].publish((BATCH[SHUFFLED],), {}, TARGET)
    ranks[2].publish((BATCH,), {}, TARGET)
    ranks[2].compare(1)


def test_checksums_follow_values_and_order_alone():
    assert compute_checksum(None) is None
    assert compute_checksum([BATCH]) == compute_checksum([BATCH.clone()])
    assert compute_checksum([BATCH]) == compute_checksum([BATCH.double()])
    assert compute_checksum([TARGET]) == compute_checksum({"labels": TARGET.to(torch.int32)})
    assert compute_checksum([BATCH]) != compute_checksum([BATCH[SHUFFLED]])
    assert compute_checksum([BATCH]) != compute_checksum([BATCH.reshape(3, 8)])
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.uint8):
        assert isinstance(compute_checksum([BATCH.to(dtype)]), int)
    assert isinstance(compute_checksum(types.SimpleNamespace()), type(None))
    assert compute_checksum(Samples(BATCH)) == compute_checksum([BATCH])
    assert compute_checksum(UserDict(a=BATCH)) == compute_checksum([BATCH])


def test_every_sample_of_a_large_batch_is_looked_at():
    images = torch.rand(16, 3, 100, 100)
    for swapped in (0, 7, 14):
        order = torch.arange(16)
        order[swapped], order[swapped + 1] = swapped + 1, swapped
        assert compute_checksum([images]) != compute_checksum([images[order]])
    channels_last = images.to(memory_format=torch.channels_last)
    assert compute_checksum([images]) == compute_checksum([channels_last])
