"""Actions in which all ranks succeed or all ranks fail, so that none waits for another."""

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


class RankAgreement:
    """Ranks of a process group, or a single process, that act together.

    The group is the default group, if there is one, unless given; ``alone`` ignores process groups.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.group = group
        self.together = dist.is_available() and dist.is_initialized() and not alone
        self.rank = dist.get_rank(group) if self.together else 0
        self.size = dist.get_world_size(group) if self.together else 1
        if self.rank < 0:
            raise InvalidInput("this process is not a member of the given group")

    def each(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank and return all results on every rank.

        Raises:
            StagewrightError: An action failed; all ranks raise it, and it names the rank.
            RankFailed: An action failed by a bug; its rank raises the original error.
        """
        outcomes = self._gather(_attempt(action), everywhere=True)
        self._raise_first_error(outcomes)
        return [cast(T, value) for value, _ in outcomes]

    def first(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 and return its result on every rank; see `each` for errors."""
        return self.reduce(lambda: None, lambda _: action())

    def reduce(self, action: Callable[[], T], combine: Callable[[Sequence[T]], R]) -> R:
        """Run an action on every rank and combine the results on rank 0, for all; see `each`."""
        # An error is a value until both collectives are done: a rank that raised before them would
        # leave the others waiting.
        mine = _attempt(action)
        gathered = self._gather(mine, everywhere=False)
        outcomes: list[Outcome[R]] = [(None, error) for _, error in gathered]
        if self.rank == 0 and not any(error for _, error in gathered):
            outcomes[0] = _attempt(lambda: combine([cast(T, value) for value, _ in gathered]))
        if self.together:
            own = outcomes[0]
            sent = [[_to_sendable(outcome) for outcome in outcomes]]
            dist.broadcast_object_list(sent, group=self.group, group_src=0)
            outcomes = sent[0]
            # A rank keeps its own outcome, whose error may not have survived pickling.
            if self.rank == 0:
                outcomes[0] = own
            elif mine[1] is not None:
                outcomes[self.rank] = (None, mine[1])
        self._raise_first_error(outcomes)
        return cast(R, outcomes[0][0])

    def _gather(self, mine: Outcome[T], *, everywhere: bool) -> list[Outcome[T]]:
        """Gather every rank's outcome, everywhere or on rank 0; others then get placeholders."""
        outcomes: list[Outcome[T]] = [(None, None)] * self.size
        if self.together and everywhere:
            dist.all_gather_object(outcomes, _to_sendable(mine), group=self.group)
        elif self.together:
            room = outcomes if self.rank == 0 else None
            dist.gather_object(_to_sendable(mine), room, group=self.group, group_dst=0)
        outcomes[self.rank] = mine
        return outcomes

    def _raise_first_error(self, outcomes: Sequence[Outcome[object]]) -> None:
        # A bug's own traceback is worth more than the summary of all ranks.
        own = outcomes[self.rank][1]
        if own is not None and not isinstance(own, StagewrightError | OSError):
            raise own
        for rank, outcome in enumerate(outcomes):
            error = _to_sendable(outcome)[1]
            if isinstance(error, RankFailed):
                error.ranks = (rank,)
            if isinstance(error, StagewrightError):
                raise (error.at(f"rank {rank}") if self.size > 1 else error) from own


@contextmanager
def simplify_errors(doing: str) -> Iterator[None]:
    """Turn torch's `CheckpointException`, of many tracebacks, into one error about ``doing``."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        # Torch wraps this one, too; Ctrl-C must not become an error of the checkpoint.
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise InvalidInput(f"{doing}: rank {rank}: {type(cause).__name__}: {cause}") from cause


def _attempt(action: Callable[[], T]) -> Outcome[T]:
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - raised again, here and on the other ranks
        return None, error


def _to_sendable(outcome: Outcome[T]) -> Outcome[T]:
    """Replace an error by one that can be pickled and that other ranks may raise."""
    error = outcome[1]
    if error is None or isinstance(error, StagewrightError):
        return outcome
    if isinstance(error, OSError):
        return None, InvalidInput(str(error))
    return None, RankFailed(f"{type(error).__name__}: {error}")


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Suppress torch's warning that a single process saves without torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
