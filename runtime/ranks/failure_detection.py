"""Heartbeat-based failure detector: finds the rank that failed first.

When a rank dies its neighbours fail next, and then theirs, so a transport's own error names the
wrong rank, or none. Errors raised here name the one whose heartbeat stopped first.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import DistError, distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from ...core.errors import RankFailed, first_line
from ...core.rank_heartbeats import FailureVerdict, Heartbeats, StoreSilent
from .process_groups import group_timeout

RESTART = "Start all ranks again, from the last checkpoint"


class ConnectionEnded(RuntimeError):
    """Communication ended for a reason found outside the transport."""


class FailureDetector:
    """This rank's heartbeat, and errors that name the rank that failed first.

    The store is the process group's. Keys get a prefix, and the heartbeat a connection of its own.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, group: ProcessGroup | None = None
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._group = group
        self.is_diagnosing = False
        """Whether it is finding out which rank failed, which takes a few seconds."""
        self.has_failed = False
        """Whether an error ended this rank's communication."""
        self.was_aborted = False
        """Whether communicators were aborted, so that tensors may hold garbage."""
        self.patience = 1.0
        """Factor on the longest time at one activity."""
        self._uses = 0
        self._activity_began_s = time.monotonic()
        # Keys of one pipeline must not be taken for those of another on the same store: they hold
        # the group's name, and a count of the detectors made for it, which ranks make in step.
        name = f"stagewright-watch/{group.group_name if group else 'default'}"
        number = store.add(f"{name}/watches of rank {rank}", 1)
        # A connection carries one request at a time. While this rank blocks in the store, for
        # instance in a rendezvous, a shared connection would carry no heartbeat.
        own: Store = store.clone()  # type: ignore[attr-defined]
        self._beats = Heartbeats(
            PrefixStore(f"{name}/{number}", own),
            rank,
            num_ranks,
            where=f"{socket.gethostname()}, process {os.getpid()}",
            host=_store_host(),
        )

    @property
    def current_activity(self) -> str:
        """Return what this rank is doing, in words for error messages."""
        return self._beats.activity

    def set_activity(self, activity: str) -> None:
        """Set what this rank does next, for its own errors and those of other ranks."""
        if self.was_aborted:
            return  # what it was at when it lost the others says more
        self._beats.activity = activity
        self._activity_began_s = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Return the time this rank has been at one activity; 0 outside of communication."""
        return time.monotonic() - self._activity_began_s if self._uses else 0.0

    @property
    def is_blocked(self) -> bool:
        """Return True inside of communication that has not failed, or not returned."""
        return bool(self._uses) and not self.has_failed

    @property
    def has_verdict(self) -> bool:
        """Return True once any rank has found out which one failed."""
        return self._beats.verdict is not None

    @property
    def has_lost_store(self) -> bool:
        """Return True once the store, through which ranks hear of each other, is gone."""
        return self._beats.has_lost_store

    def finish(self) -> None:
        """Let the other ranks finish, too, unless one has failed; then `close`."""
        if not self.has_failed and not self.has_verdict:
            self._beats.say_farewell()
        self.close()

    def close(self) -> None:
        """Stop the heartbeat; a rank that closes is not reported as failed."""
        self._beats.close()

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Replace a transport's error by one that names the rank that failed.

        Any other error ends the step on this rank alone. It is reported to the other ranks, which
        wait for this one.

        Raises:
            RankFailed: Communication failed; the message names the rank that failed first.
        """
        self._uses += 1
        try:
            self._check_not_aborted()
            yield
            self._check_not_aborted()
        except RankFailed:
            self.has_failed = True
            raise
        except Exception as error:
            self.has_failed = True
            # Garbage in tensors may have raised anything, a `NonFinite` for example.
            if not (self.was_aborted or is_transport_error(error)):
                self._beats.leave_word(f"raised {_describe(error)}")
                self._note_place(error)
                raise
            raise self.diagnose(error) from error
        finally:
            self._uses -= 1

    def _check_not_aborted(self) -> None:
        if self.was_aborted:
            raise ConnectionEnded("communication was aborted")

    def announce_end(self, error: BaseException) -> None:
        """Tell the other ranks the error that ends this one, unless they know of it."""
        if not self.has_failed:
            self._note_place(error)
            self._beats.leave_word(f"raised {_describe(error)}")

    @contextmanager
    def announce_errors(self) -> Iterator[None]:
        """Show an error of this rank as its activity before raising it.

        For checks before a step, which may fail on this rank alone while others begin the step.
        If this rank ends, they report the error; if it goes on, its next activity replaces it.
        """
        try:
            yield
        except Exception as error:
            self._note_place(error)
            self.set_activity(f"its own error, {_describe(error)}")
            self._beats.show()
            raise

    def _note_place(self, error: BaseException) -> None:
        error.add_note(f"rank {self.rank}, at {self.current_activity}")

    def publish(self, name: str, value: str) -> None:
        """Show a value of this rank to the others, under a name."""
        self._beats.publish(f"{name} of {self.rank}", value)

    def wait_for(self, name: str, rank: int) -> str:
        """Return the value that a rank publishes under a name, once it is there.

        Raises:
            ConnectionEnded: It did not come within the group's timeout, or a rank failed or died.
        """
        timeout = group_timeout(self._group) or distributed_c10d.default_pg_timeout
        found = self._beats.wait_for(f"{name} of {rank}", timeout.total_seconds(), rank)
        if found is None:
            raise ConnectionEnded(f"rank {rank} did not publish its {name}")
        return found

    def read_all(self, name: str) -> list[str | None]:
        """Return what every rank published under a name; `None` for those that did not yet."""
        return self._beats.read([f"{name} of {rank}" for rank in range(self.num_ranks)])

    def await_verdict(self, timeout_s: float) -> bool:
        """Return True as soon as a rank has found out which one failed, False if none does."""
        return self._beats.await_verdict(timeout_s) is not None

    def check_verdict(self) -> None:
        """Raise `ConnectionEnded` if a rank is known to have failed."""
        if self.has_verdict:
            raise ConnectionEnded("a rank had failed before")

    def diagnose(self, error: BaseException) -> RankFailed:
        """Return the error to raise in place of a transport's error.

        Takes a few seconds, see `Heartbeats.find_out`.
        """
        verdict = self.find_out()
        return RankFailed(
            f"{verdict.what}; rank {self.rank} was at {self.current_activity} "
            f"({first_line(error)}). {RESTART}",
            ranks=verdict.ranks,
        )

    def find_out(self) -> FailureVerdict:
        """Determine which rank failed first; see `Heartbeats.find_out`."""
        self.is_diagnosing = True
        try:
            return self._beats.find_out()
        finally:
            self.is_diagnosing = False

    def find_silent_ranks(self) -> None:
        """Reach a verdict if a rank's heartbeat has stopped, and none if all are alive."""
        self._beats.find_silent()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def is_transport_error(error: BaseException | None) -> bool:
    """Return True if an error, or one of its causes, comes from communication.

    torch has exception classes for errors of NCCL and of its stores. gloo's are plain
    `RuntimeError`, recognised by the path of the gloo source file that their message begins with.
    """
    while error is not None:
        if isinstance(error, DistError | StoreSilent | ConnectionEnded):
            return True
        if isinstance(error, RuntimeError) and _GLOO_SOURCE.search(str(error)):
            return True
        error = error.__cause__
    return False


_GLOO_SOURCE = re.compile(r"\[\S*gloo/\S+:\d+\]")


def _store_host() -> FailureVerdict | None:
    """Return the verdict for a store that is gone; `None` if rank 0 hosts the store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return FailureVerdict((), "the launcher, which hosts the store, stopped answering")
    return None
