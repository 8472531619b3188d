"""Asking again: when it is safe, when it may help, and after how long."""

from __future__ import annotations

from ..core.errors import DeadlineExceeded, StagewrightError, Unreachable
from ..core.service.problems import TYPE_PREFIX
from .errors import error_of, problem_of
from .sans_io import Call, Failure, Patience, Reply, Sleep, Steps, own_patience, send

TRANSIENT = frozenset({502, 503, 504})
"""Statuses that say: not now."""

UNREACHED_S = 15.0
"""How long a service may be away that refuses connections: one that is started again takes less."""

SETTLED = frozenset({"deadline-exceeded", "planning-ended"})
"""Problems with such a status that would come again: the same work would take as long."""


def exchange(call: Call) -> Steps[Reply]:
    """Do a request until it is answered for good.

    A request is sent again only where that can do no harm: it changes nothing, or carries an
    idempotency key, or never left, or was refused before anything was done (429).

    Raises:
        StagewrightError: It was refused (see `problems`), failed, or took too long.
    """
    patience = yield from own_patience()
    end = patience.clock() + patience.timeout_s
    attempt, reached_at, has_told = 0, patience.clock(), False
    while True:
        attempt += 1
        left_s = max(end - patience.clock(), 0.001)
        outcome = yield from send(call, left_s)
        if isinstance(outcome, Reply) and outcome.is_success:
            return outcome
        is_away = isinstance(outcome, Failure) and not outcome.was_sent
        if not is_away:
            reached_at = patience.clock()
        last = min(end, reached_at + UNREACHED_S) if is_away else end
        pause_s = _pause_s(call, outcome, patience.delay_s(attempt))
        if pause_s is None or patience.clock() + pause_s >= last:
            raise error_for(call, outcome, patience)
        if is_away and not has_told and patience.on_wait is not None:
            patience.on_wait(f"waiting for {patience.address} ({_reason(outcome)})")
            has_told = True
        yield Sleep(pause_s)


def _pause_s(call: Call, outcome: Reply | Failure, usual_s: float) -> float | None:
    """How long to wait before the call is sent again; `None` if it must not be."""
    if isinstance(outcome, Failure):
        return usual_s if call.is_repeatable or not outcome.was_sent else None
    wanted_s = _retry_after_s(outcome)
    if outcome.status == 429:
        return None if wanted_s is None else max(wanted_s, usual_s)
    problem = problem_of(outcome)
    kind = "" if problem is None else problem.type.removeprefix(TYPE_PREFIX)
    is_pending = kind == "answer-pending"  # an attempt whose answer was lost is still at work
    is_passing = outcome.status in TRANSIENT and kind not in SETTLED
    if call.is_repeatable and (is_pending or is_passing):
        return max(wanted_s or 0.0, usual_s)
    return None


def _retry_after_s(reply: Reply) -> float | None:
    """Seconds; the form with a date is not what this service sends."""
    text = reply.headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdecimal() else None


def _reason(outcome: Reply | Failure) -> str:
    return outcome.reason if isinstance(outcome, Failure) else str(outcome.status)


def error_for(call: Call, outcome: Reply | Failure, patience: Patience) -> StagewrightError:
    """The exception for the last attempt."""
    if isinstance(outcome, Reply):
        return error_of(outcome, call)
    if outcome.is_timeout and outcome.was_sent:
        return DeadlineExceeded(
            f"{call} was not answered within {patience.timeout_s:g} s; give the client a longer "
            "timeout_s"
        )
    advice = "" if call.is_repeatable or not outcome.was_sent else (
        "; it was not sent again, since it may have been carried out"
    )  # fmt: skip
    return Unreachable(
        f"{call}: {patience.address or 'the service'} does not answer ({outcome.reason}){advice}; "
        "is that its address (--server, url= or STAGEWRIGHT_SERVER)? 'stagewright serve' starts one"
    )
