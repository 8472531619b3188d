"""Routes for signing in, which exchanges a token for a session cookie, and for signing out."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, RedirectResponse

from ..auth.access import is_page
from ..auth.middleware import AuditWriter
from ..auth.sessions import LIFETIME_S, Sessions, cookie_name
from ..errors import AccessDenied, MissingOrigin
from ..http.problems import Problem, problem_of_error
from ..routes.dependencies import TheAuthenticator, from_state
from .templates import render

MAX_FIELDS = 8

MAX_NEXT_CHARACTERS = 2000
"""Longest address to return to: the form holds it, and long forms are refused."""

REFUSED = (401, 403)
"""Statuses that go into the audit log, here as in `AuthMiddleware`."""


TheSessions = Annotated[Sessions, from_state("sessions")]
TheAudit = Annotated[AuditWriter, from_state("audit")]

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/sign-in")
def ask_token(sessions: TheSessions, request: Request, next: str = "/plans") -> str:
    return _page(sessions, request, _own_path(next))


@router.post("/sign-in")
async def sign_in(
    sessions: TheSessions, authenticator: TheAuthenticator, audit: TheAudit, request: Request
) -> Response:
    if "origin" not in request.headers:
        raise MissingOrigin
    sent = _form(await request.body())
    token = (sent.get("token") or [""])[0].strip()
    wanted = _own_path((sent.get("next") or ["/plans"])[0])
    try:
        raw = [(b"authorization", f"Bearer {token}".encode())]
        principal = await authenticator.principal(Headers(raw=raw), request.scope)
    except AccessDenied as error:
        problem = problem_of_error(error)
        if problem.document.status in REFUSED:
            await audit.write_denied(request.scope, None, problem.kind)
        wrong = problem.document.detail if token else "Paste the token first."
        page = _page(sessions, request, wanted, wrong)
        response = HTMLResponse(page, problem.document.status)
        if wait := (problem.headers or {}).get("Retry-After"):
            response.headers["Retry-After"] = wait
        return response
    await audit.write_sign_in(request.scope, principal)
    sessions.close(sessions.read(request.headers))
    # Always a new cookie: one that an attacker planted beforehand must not become this session.
    signed_in = RedirectResponse(wanted, 303)
    _set(signed_in, request, sessions.open(principal, token), LIFETIME_S)
    return signed_in


@router.post("/sign-out")
def sign_out(sessions: TheSessions, request: Request) -> Response:
    sessions.close(sessions.read(request.headers))
    response = RedirectResponse("/sign-in", 303)
    _set(response, request, "", 0)
    return response


def _page(sessions: Sessions, request: Request, wanted: str, wrong: str = "") -> str:
    session = "none" if sessions.read(request.headers) is None else "open"
    return render("sign-in.html", here=None, next=wanted, wrong=wrong, session=session)


def _form(body: bytes) -> dict[str, list[str]]:
    """Parse the form, whose length `LoadLimits` has checked."""
    try:
        return parse_qs(body.decode("utf-8", "replace"), max_num_fields=MAX_FIELDS)
    except ValueError:
        raise Problem(
            422, "invalid-input", "the sign-in form has the fields 'token' and 'next' only"
        ) from None


def _set(response: Response, request: Request, value: str, lifetime_s: int) -> None:
    """Set the session cookie; a lifetime of 0 deletes it."""
    response.set_cookie(
        cookie_name(request.headers),
        value,
        max_age=lifetime_s,
        expires=lifetime_s,
        path="/",
        secure=request.headers.get("origin", request.url.scheme).startswith("https"),
        httponly=True,
        samesite="strict",  # "lax" would let links of other sites open pages as this user
    )


def _own_path(wanted: str) -> str:
    """Return a path on this server to go on to: without its query if that is long, else /plans."""
    # Never a URL from outside: a link to the sign-in form would else send people anywhere.
    try:
        parts = urlsplit(wanted)
    except ValueError:
        return "/plans"
    ours = not parts.scheme and not parts.netloc and is_page(parts.path) and "\\" not in wanted
    if not ours or not wanted.startswith("/") or wanted.startswith("//"):
        return "/plans"
    if len(wanted) > MAX_NEXT_CHARACTERS:
        return parts.path if len(parts.path) <= MAX_NEXT_CHARACTERS else "/plans"
    return wanted
