"""Processes that stay for many cells, and are replaced when a cell spoils or blocks them."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from conformance_suite.cell import Cell, Outcome, Side
from conformance_suite.masks import merged
from conformance_suite.reference import Judgement
from conformance_suite.worker import MANNERS, Failure, serve

GRACE_S, REFUSAL_GRACE_S = 0.5, 10.0
"""How long the others may take to fail too once one has, and to refuse too once one refuses:
they capture the model for themselves, so not all refuse at once."""

PREPARING_S, JUDGING_S, MEETING_S = 120.0, 120.0, 60.0
"""Capturing and comparing are no part of what may hang, so their limits are wide."""


class Hang(Exception):
    """Nobody failed, and not everybody answered."""


class Broken(Exception):
    """A rank failed, or refused."""

    def __init__(self, failures: list[Failure], ranks: int) -> None:
        super().__init__()
        self.failures, self.ranks = failures, ranks

    @property
    def refused(self) -> bool:
        return len(self.failures) == self.ranks and all(f.refused for f in self.failures)

    @property
    def text(self) -> str:
        return min(self.failures, key=lambda failure: failure.follows).text


class Group:
    """The ranks of one side; started when first needed.

    Args:
        side: Whose code they run.
        ranks: How many.
        limit_s: How long the two steps of a cell may take.
    """

    def __init__(self, side: Side, ranks: int, limit_s: float) -> None:
        self._side, self._ranks, self._limit_s = side, ranks, limit_s
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def outcome(self, cell: Cell) -> Outcome:
        """Do one cell."""
        if not self._processes:
            self._start()
        phase = "prepare"
        try:
            self._ask(PREPARING_S, "prepare", self._side, cell)
            phase = "run"
            masks = merged(self._ask(self._limit_s, "run"))
            if MANNERS in os.environ and (blocked := _find_deadlock()):
                return Outcome("hang", blocked)
            phase = "judge"
            return verdict(self._ask(JUDGING_S, "judge", masks))
        except Hang as hang:
            self.stop()
            return Outcome("hang", f"{hang} in the {phase} phase")
        except Broken as broken:
            if phase == "prepare" and broken.refused:
                return Outcome(f"refused: {broken.text.partition(': ')[2]}")
            self.stop()
            return Outcome("error", broken.text)

    def stop(self) -> None:
        """End the processes; the next cell starts others."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        for rank in range(self._ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, self._ranks, os.getpid(), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        port = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(port)
        self._answers(MEETING_S)

    def _ask(self, limit_s: float, *order: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(order)
        return self._answers(limit_s)

    def _answers(self, limit_s: float) -> list[Any]:
        """Everybody's answer.

        Raises:
            Hang: Not all came in time, and none of those that came is a failure.
            Broken: One is.
        """
        deadline = time.monotonic() + limit_s
        answers: dict[Connection, Any] = {}
        failed = False
        while len(answers) < self._ranks and time.monotonic() < deadline:
            waiting = [pipe for pipe in self._pipes if pipe not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            for pipe in (pipe for pipe in waiting if pipe in ready):
                answers[pipe] = answer = _received(pipe)
                if isinstance(answer, Failure):
                    failed = True
                    grace_s = REFUSAL_GRACE_S if answer.refused else GRACE_S
                    deadline = min(deadline, time.monotonic() + grace_s)
        if failed:  # in the ranks' order, so that which is quoted does not depend on the race
            told = (answers[pipe] for pipe in self._pipes if pipe in answers)
            raise Broken([one for one in told if isinstance(one, Failure)], self._ranks)
        if len(answers) < self._ranks:
            silent = [rank for rank, pipe in enumerate(self._pipes) if pipe not in answers]
            raise Hang(f"ranks {', '.join(map(str, silent))} did not end")
        return [answers[pipe] for pipe in self._pipes]


def _find_deadlock() -> str:
    """Replay what the ranks of a cell launched; return who would wait for whom on NCCL."""
    from tests.nccl.process_group import find_deadlocks

    return "".join(find_deadlocks(Path(os.environ[MANNERS])))


def verdict(judgements: list[Judgement]) -> Outcome:
    """All ranks' accounts together: what differs, which names are lost, whether there is a loss."""
    found = set().union(*(account.names for account in judgements))
    wanted = judgements[0].wanted
    faults = [f"{name} is held by no stage" for name in sorted(wanted - found)]
    faults += [f"{name} is no name of the model" for name in sorted(found - wanted)]
    if not any(account.losses for account in judgements):
        faults.append("no rank knows the loss")
    off = sorted((d for account in judgements for d in account.differences), reverse=True)
    faults += [
        f"{what} is off by {by:.1g}" if by < float("inf") else f"{what} is missing or no number"
        for by, what in off
    ]
    if not faults:
        return Outcome("equal")
    more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
    return Outcome("wrong", faults[0] + more)


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return Failure("the process ended", refused=False, follows=False)
