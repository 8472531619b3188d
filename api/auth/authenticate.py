"""From the ``Authorization`` header to who is asking."""

from __future__ import annotations

import re
from hmac import compare_digest
from typing import Protocol

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Scope

from ..http.problems import Problem
from ..store.projects import SECRET_PREFIX
from ..store.records import ApiKey
from ..store.store import Store
from .login_throttle import LoginThrottle, too_many
from .principal import OPERATOR, Principal
from .scopes import SAFE_METHODS, SCOPES
from .sessions import Session, Sessions

_SECRET = re.compile(SECRET_PREFIX + r"[A-Za-z0-9_-]{43}")
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


class TokenReader(Protocol):
    """Reads the tokens of an identity provider; see `oidc.OidcTokens`."""

    def principal(self, token: str) -> Principal:
        """Whose token it is. It may block.

        Raises:
            Problem: 401, 403 or 503, with what to do next.
        """


class Authenticator:
    """Tells whose bearer token a request carries.

    Args:
        token: The server's own, ASCII; `None` if it has none.
        store: Has the API keys.
        tokens: Reads an identity provider's tokens; `None` if there is no provider.
        login_throttle: Counts wrong tokens.
        sessions: Reads the cookies of browsers.
    """

    def __init__(
        self,
        token: str | None,
        store: Store,
        tokens: TokenReader | None,
        login_throttle: LoginThrottle | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        self._own_token = token
        self._sessions = Sessions() if sessions is None else sessions
        self._token = None if token is None else token.encode("ascii")
        self._looks_signed = token is not None and _JWT.fullmatch(token) is not None
        self._store = store
        self._tokens = tokens
        self._login_throttle = LoginThrottle() if login_throttle is None else login_throttle

    async def principal(self, headers: Headers, scope: Scope | None = None) -> Principal:
        """Who sent these headers.

        The server's token is compared in constant time. A key is looked up by its hash, at most
        once a second; one that this server revokes opens nothing from then on.

        An address that sent too many wrong tokens has none compared with the server's for a
        while, not even the right one: else it would be told. Keys and a provider's tokens, which
        nobody can guess, open what they open all the same.

        Args:
            headers: As they were sent.
            scope: The request, if a wrong token in it is to be counted.

        Raises:
            Problem: 401, 429, or whatever the identity provider's tokens lead to.
            StoreUnavailable: The keys cannot be read.
        """
        if scope is not None and "authorization" not in headers:
            session = self._sessions.read(headers)
            if session is not None:
                # SameSite cookies keep other sites out, but not other ports of this host. Browsers
                # name the page's origin with every change, and `OriginCheck` has compared it.
                if scope["method"] not in SAFE_METHODS and "origin" not in headers:
                    raise origin_missing()
                return await self._principal_of_session(session)
        sent = bearer_token(headers)
        wait_s = self._login_throttle.wait_s(scope)
        if self._token is not None and not wait_s and compare_digest(sent, self._token):
            return OPERATOR
        text = sent.decode("latin-1")
        if _SECRET.fullmatch(text):
            keys = self._store.keys
            key = keys.known(text) or await run_in_threadpool(keys.by_secret, text)
            if key is not None:
                return principal_of_key(key)
        elif self._tokens is not None and _JWT.fullmatch(text):
            try:
                return await run_in_threadpool(self._tokens.principal, text)
            except Problem as problem:
                is_wrong = problem.document.status == 401  # else it is signed, or not looked at
                if is_wrong or self._looks_signed:
                    self._login_throttle.failed(scope)
                raise
        if wait_s:
            raise too_many(wait_s)
        self._login_throttle.failed(scope)
        raise unauthorized(
            "this token opens nothing here: it is wrong, revoked or has expired; get a valid one, "
            "e.g. from 'stagewright keys create'",
            error="invalid_token",
        )

    async def _principal_of_session(self, session: Session) -> Principal:
        """Return who signed in, if what they signed in with is still valid.

        Raises:
            Problem: 401: the key was revoked or has expired, or the server's token has changed.
        """
        if session.principal is not None:
            return session.principal
        if session.key_id is not None:
            key = await run_in_threadpool(self._store.keys.by_id, session.key_id)
            if key is not None:
                return principal_of_key(key)
        elif self._sessions.is_of_token(session, self._own_token):
            return OPERATOR
        # Nobody guesses a signed cookie, so this does not count as a wrong token.
        raise unauthorized(
            "session ended: its token was revoked, replaced or has expired; sign in again",
            error="invalid_token",
        )


def origin_missing() -> Problem:
    """Return the problem of a browser's request that does not say which page it comes from."""
    return Problem(
        403,
        "foreign-origin",
        "requests with a session cookie need the Origin header to change anything; programs send "
        "'Authorization: Bearer <token>' instead of a cookie",
    )


def bearer_token(headers: Headers) -> bytes:
    """The one bearer token of a request.

    Raises:
        Problem: 401: there is none, or more than one header.
    """
    sent = headers.getlist("authorization")
    scheme, _, token = (sent[0] if len(sent) == 1 else "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise unauthorized(
            "send the server's token or an API key, once: 'Authorization: Bearer <token>'"
        )
    return token.strip().encode("latin-1")


def principal_of_key(key: ApiKey) -> Principal:
    """Who holds a key; scopes that this release does not know open nothing."""
    known = frozenset(scope for scope in SCOPES if scope in key.scopes)
    return Principal(id=key.id, project_id=key.project_id, scopes=known, quotas=key.quotas)


def unauthorized(detail: str, *, error: str | None = None) -> Problem:
    """That nobody proved who they are (RFC 6750, section 3)."""
    challenge = "Bearer" if error is None else f'Bearer error="{error}"'
    return Problem(401, "unauthorized", detail, headers={"WWW-Authenticate": challenge})
