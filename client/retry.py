"""Retry policy: which requests are safe to repeat, which are worth it, and after how long."""

from __future__ import annotations

from ..core.errors import DeadlineExceeded, StagewrightError, Unreachable
from ..core.service.problems import TYPE_PREFIX
from .errors import error_from_reply, read_problem
from .sans_io import (
    HttpReply,
    HttpRequest,
    Model,
    RetryBudget,
    Sleep,
    Steps,
    TransportFailure,
    get_retry_budget,
    send,
)

TRANSIENT = frozenset({502, 503, 504})
"""Statuses of a temporary condition."""

UNREACHED_S = 15.0
"""Longest time to retry refused connections: a restart of the service takes less."""

SETTLED = frozenset({"deadline-exceeded", "planning-ended"})
"""Problems of a transient status that would recur: the same work would take as long again."""


def ask(call: HttpRequest, model: type[Model]) -> Steps[Model]:
    """Send a request with retries and parse the reply."""
    return (yield from send_with_retries(call)).read(model)


def delete(call: HttpRequest) -> Steps[None]:
    """Send a request to delete something; what an attempt with no answer has deleted is gone."""
    yield from send_with_retries(call, may_be_gone=True)


def send_with_retries(call: HttpRequest, *, may_be_gone: bool = False) -> Steps[HttpReply]:
    """Send a request, repeating it where that is safe, until it succeeds or fails for good.

    A request is repeated only if it changes nothing, carries an idempotency key, never reached the
    service, or was rejected before any work was done (429).

    Raises:
        DeadlineExceeded: No answer came in time.
        Unreachable: No connection could be made or kept.
        StagewrightError: The service refused it or failed; `errors` maps its replies.
    """
    budget = yield from get_retry_budget()
    end = budget.clock() + budget.timeout_s
    attempt, reached_at, has_told, may_be_done = 0, budget.clock(), False, False
    while True:
        attempt += 1
        left_s = max(end - budget.clock(), 0.001)
        outcome = yield from send(call, left_s)
        if isinstance(outcome, HttpReply):
            is_gone = may_be_gone and may_be_done and outcome.status == 404
            if outcome.is_success or is_gone:
                return outcome
        away = None
        if isinstance(outcome, TransportFailure) and not outcome.was_sent:
            away = outcome
        if away is None:
            reached_at = budget.clock()
            may_be_done |= not (isinstance(outcome, HttpReply) and outcome.status == 429)
        # Two limits: the call's own, and a much shorter one while nothing listens at the address,
        # so that a wrong URL is reported soon but a restart of the service is waited out.
        last = min(end, reached_at + UNREACHED_S) if away else end
        pause_s = _pause_s(call, outcome, budget.delay_s(attempt))
        if pause_s is None or budget.clock() + pause_s >= last:
            raise final_error(call, outcome, budget)
        if away and not has_told and budget.on_wait is not None:
            budget.on_wait(f"waiting for {budget.address} ({away.reason})")
            has_told = True
        yield Sleep(pause_s)


def _pause_s(
    call: HttpRequest, outcome: HttpReply | TransportFailure, usual_s: float
) -> float | None:
    """Return the seconds to wait before repeating the call; `None` if it must not be repeated."""
    if isinstance(outcome, TransportFailure):
        return usual_s if call.is_repeatable or not outcome.was_sent else None
    wanted_s = _retry_after_s(outcome)
    if outcome.status == 429:
        return None if wanted_s is None else max(wanted_s, usual_s)
    problem = read_problem(outcome)
    kind = "" if problem is None else problem.type.removeprefix(TYPE_PREFIX)
    # The first attempt, whose connection broke, is still at work under the same idempotency key.
    is_pending = kind == "answer-pending"
    is_passing = outcome.status in TRANSIENT and kind not in SETTLED
    if call.is_repeatable and (is_pending or is_passing):
        return max(wanted_s or 0.0, usual_s)
    return None


def _retry_after_s(reply: HttpReply) -> float | None:
    """Return the Retry-After header in seconds; the service never sends the form with a date."""
    text = reply.headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdecimal() else None


def final_error(
    call: HttpRequest, outcome: HttpReply | TransportFailure, budget: RetryBudget
) -> StagewrightError:
    """Return the exception for the last attempt."""
    if isinstance(outcome, HttpReply):
        return error_from_reply(outcome, call)
    if outcome.is_timeout and outcome.was_sent:
        return DeadlineExceeded(
            f"no answer to {call} within {budget.timeout_s:g} s; increase the client's timeout_s"
        )
    advice = "" if call.is_repeatable or not outcome.was_sent else (
        "; not repeated, because the service may have carried it out"
    )  # fmt: skip
    return Unreachable(
        f"{call}: cannot reach {budget.address or 'the service'} ({outcome.reason}){advice}; check "
        "its URL (--server, url= or STAGEWRIGHT_SERVER), or start one with 'stagewright serve'"
    )
