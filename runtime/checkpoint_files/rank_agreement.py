"""Ranks that succeed together or fail together, so that none waits for one that gave up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ...core.errors import InvalidInput, RankFailed, StagewrightError

T = TypeVar("T")
R = TypeVar("R")

Outcome = tuple[T | None, Exception | None]


class Ranks:
    """The ranks of a process group, or one process alone.

    Args:
        group: The default group if `None`, where there is one.
        alone: Whether this process acts for itself, whatever groups there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.group = group
        self.together = dist.is_available() and dist.is_initialized() and not alone
        self.rank = dist.get_rank(group) if self.together else 0
        self.size = dist.get_world_size(group) if self.together else 1
        if self.rank < 0:
            raise InvalidInput("this process is not one of the group it was given")

    def each(self, action: Callable[[], T]) -> list[T]:
        """What every rank's action returns, on every rank.

        Raises:
            InvalidInput: One failed; every rank raises, naming the rank and what it could not do.
            RankFailed: One failed by a bug; that one raises its own error.
        """
        outcomes = self._gather(_attempt(action))
        self._raise_first(outcomes)
        return [cast(T, value) for value, _ in outcomes]

    def first(self, action: Callable[[], T]) -> T:
        """What the first rank's action returns, on every rank; the others do nothing.

        Raises:
            InvalidInput: It failed; see `each`.
        """
        return self.reduce(lambda: None, lambda _: action())

    def reduce(self, action: Callable[[], T], combine: Callable[[Sequence[T]], R]) -> R:
        """What the first rank makes of every rank's answer, on every rank.

        Raises:
            InvalidInput: An action or the first rank's part failed; see `each`.
        """
        mine = _attempt(action)
        gathered = self._gather_at_first(mine)
        outcomes: list[Outcome[R]] = [(None, error) for _, error in gathered]
        if self.rank == 0 and not any(error for _, error in gathered):
            outcomes[0] = _attempt(lambda: combine([cast(T, value) for value, _ in gathered]))
        if self.together:
            own = outcomes[0]
            sent = [[_portable(outcome) for outcome in outcomes]]
            dist.broadcast_object_list(sent, group=self.group, group_src=0)
            outcomes = sent[0]
            if self.rank == 0:
                outcomes[0] = own
            elif mine[1] is not None:
                outcomes[self.rank] = (None, mine[1])
        self._raise_first(outcomes)
        return cast(R, outcomes[0][0])

    def _gather(self, mine: Outcome[T]) -> list[Outcome[T]]:
        outcomes: list[Outcome[T]] = [(None, None)] * self.size
        if self.together:
            dist.all_gather_object(outcomes, _portable(mine), group=self.group)
        outcomes[self.rank] = mine
        return outcomes

    def _gather_at_first(self, mine: Outcome[T]) -> list[Outcome[T]]:
        """Every rank's outcome on the first rank; elsewhere nothing of use."""
        outcomes: list[Outcome[T]] = [(None, None)] * self.size
        if self.together:
            room = outcomes if self.rank == 0 else None
            dist.gather_object(_portable(mine), room, group=self.group, group_dst=0)
        if self.rank == 0:
            outcomes[0] = mine
        return outcomes

    def _raise_first(self, outcomes: Sequence[Outcome[object]]) -> None:
        own = outcomes[self.rank][1]
        if own is not None and not isinstance(own, StagewrightError | OSError):
            raise own
        for rank, (_, error) in enumerate(outcomes):
            if error is None:
                continue
            where = f"rank {rank}: " if self.size > 1 else ""
            if isinstance(error, RankFailed):
                raise RankFailed(f"{where}{error}", ranks=(rank,)) from own
            raise InvalidInput(f"{where}{error}") from own


@contextmanager
def plain_errors(doing: str) -> Iterator[None]:
    """Turn the many tracebacks of torch's checkpoints into one error.

    Args:
        doing: What failed if it fails, such as ``cannot read step-000100``.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise InvalidInput(f"{doing}: rank {rank}: {type(cause).__name__}: {cause}") from cause


def _attempt(action: Callable[[], T]) -> Outcome[T]:
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - raised again, here and on the other ranks
        return None, error


def _portable(outcome: Outcome[T]) -> Outcome[T]:
    """With the error that other ranks raise; the original may hold what cannot be sent."""
    error = outcome[1]
    if error is None or isinstance(error, RankFailed):
        return outcome
    if isinstance(error, StagewrightError | OSError):
        return None, InvalidInput(str(error))
    return None, RankFailed(f"{type(error).__name__}: {error}")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warning that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
