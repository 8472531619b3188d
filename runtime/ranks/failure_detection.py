"""Who is still there: which rank failed first, in place of what a transport says of it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from ...core.errors import RankFailed, first_line
from ...core.rank_heartbeats import FailureVerdict, Heartbeats

AGAIN = "Start all ranks again, from the last checkpoint"


class ConnectionEnded(RuntimeError):
    """Communication is over, as somebody other than the transport found out."""


class FailureDetector:
    """Heartbeats of this rank (`core.heartbeats`), and errors that name the rank that failed.

    Args:
        store: The process group's store; keys are prefixed, and it gets a connection of its own.
        rank: This rank.
        num_ranks: How many there are.
        group: The ranks' process group; each group, and each watch of one group in the order
            they are made, has keys of its own.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, group: ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.diagnosing = False
        """Whether it is finding out which rank failed."""
        self.has_failed = False
        """Whether an error ended this rank's communication."""
        name = f"stagewright-watch/{group.group_name if group else 'default'}"
        number = store.add(f"{name}/watches of rank {rank}", 1)
        own: Store = store.clone()  # type: ignore[attr-defined]
        self._beats = Heartbeats(
            PrefixStore(f"{name}/{number}", own),
            rank,
            num_ranks,
            where=f"{socket.gethostname()}, process {os.getpid()}",
            host=_launcher(),
        )

    @property
    def doing(self) -> str:
        """What this rank is at, for errors."""
        return self._beats.doing

    def says(self, doing: str) -> None:
        """What this rank does next, for errors, its own and others'."""
        self._beats.doing = doing

    @property
    def has_verdict(self) -> bool:
        """Whether some rank found out who failed."""
        return self._beats.verdict is not None

    def close(self) -> None:
        """Stop the heartbeat; a rank that ended well is not missed."""
        self._beats.close()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn a transport's error into one that names the rank that failed.

        Any other error ends the step on this rank alone; the others, which wait for it, hear of it.

        Raises:
            RankFailed: Communication failed; it names who was first to fail.
        """
        try:
            yield
        except RankFailed:
            self.has_failed = True
            raise
        except Exception as error:
            self.has_failed = True
            if not is_transport(error):
                self._beats.leave_word(f"raised {_words(error)}")
                error.add_note(f"rank {self.rank}, at {self.doing}")
                raise
            raise self.failure(error) from error

    @contextmanager
    def overheard(self) -> Iterator[None]:
        """Where a rank may refuse a step that others begin, they find its words if it ends.

        It may as well go on: then the words are forgotten.
        """
        try:
            yield
        except Exception as error:
            self.says(f"its own error, {_words(error)}")
            self._beats.show()
            raise

    def failure(self, error: BaseException) -> RankFailed:
        """What to raise in place of a transport's error.

        Takes a few seconds, see `Heartbeats.find_out`.
        """
        self.diagnosing = True
        try:
            verdict = self._beats.find_out()
        finally:
            self.diagnosing = False
        return RankFailed(
            f"{verdict.what}; rank {self.rank} was at {self.doing} ({first_line(error)}). {AGAIN}",
            ranks=verdict.ranks,
        )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def is_transport(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, came from communication rather than from the model.

    torch has classes for what NCCL and its stores say. gloo's errors are plain `RuntimeError`, and
    begin with the file of gloo's sources that they come from.
    """
    while error is not None:
        if isinstance(error, DistError | ConnectionEnded):
            return True
        if isinstance(error, RuntimeError) and _OF_GLOO.search(str(error)):
            return True
        error = error.__cause__
    return False


_OF_GLOO = re.compile(r"\[\S*gloo/\S+:\d+\]")


def _launcher() -> FailureVerdict | None:
    """Who is to blame when the store itself is gone; `None` if rank 0 hosts it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return FailureVerdict((), "the launcher, which hosts the store, stopped answering")
    return None
