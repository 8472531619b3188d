"""Authentication: from the ``Authorization`` header to a principal.

Wrong tokens are counted by the network address they come from, which then has to wait.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from hmac import compare_digest
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Scope

from ..errors import (
    Forbidden,
    IdentityProviderUnreachable,
    MissingOrigin,
    TooManyWrongTokens,
    Unauthorized,
)
from ..store.projects import SECRET_PREFIX
from ..store.records import ApiKey
from ..store.store import Store
from .access import OPERATOR, SAFE_METHODS, Principal
from .scopes import SCOPES
from .sessions import Session, Sessions

if TYPE_CHECKING:  # needs pyjwt, which only servers with an identity provider install
    from .oidc import OidcTokens

_SECRET = re.compile(SECRET_PREFIX + r"[A-Za-z0-9_-]{43}")
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")

WRONG_AT_ONCE = 10
"""Wrong tokens an address may send without waiting."""

SECONDS_EACH = 6.0
"""Wait for each further wrong token: 10 a minute, 14,400 a day."""

MAX_ADDRESSES = 10_000
"""Addresses remembered; beyond that the one quiet for longest is forgotten."""

NETWORK_BITS = 64
"""Prefix of an IPv6 address that counts as one sender: its owner has all addresses below it."""


class Authenticator:
    """Resolver of the principal that a request's bearer token belongs to."""

    def __init__(
        self,
        token: str | None,
        store: Store,
        oidc: OidcTokens | None,
        login_throttle: LoginThrottle | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        self._own_token = token
        self._sessions = Sessions() if sessions is None else sessions
        self._token = None if token is None else token.encode("ascii")
        self._token_looks_like_jwt = token is not None and _JWT.fullmatch(token) is not None
        self._store = store
        self._oidc = oidc
        self._throttle = LoginThrottle() if login_throttle is None else login_throttle

    async def principal(self, headers: Headers, scope: Scope | None = None) -> Principal:
        """Return the principal of a request.

        API keys are looked up by their hash and cached for a second; a key revoked through this
        server is refused at once.

        Args:
            headers: Of the request.
            scope: Of the request, if a wrong token is to be counted.

        Raises:
            Unauthorized, Forbidden, MissingOrigin, TooManyWrongTokens: The request is refused.
            IdentityProviderUnreachable: The token cannot be verified at present.
            StoreUnavailable: The keys cannot be read.
        """
        if scope is not None and "authorization" not in headers:
            session = self._sessions.read(headers)
            if session is not None:
                # SameSite cookies keep other sites out, but not other ports of this host. Browsers
                # name the page's origin with every change, and `RequestChecks` has compared it.
                if scope["method"] not in SAFE_METHODS and "origin" not in headers:
                    raise MissingOrigin
                return await self._principal_of_session(session)
        sent = bearer_token(headers)
        # A throttled address must not learn that it has found the server's token at last, so the
        # comparison is skipped. Keys and a provider's tokens are too long to guess and stay valid.
        wait_s = self._throttle.wait_s(scope)
        if self._token is not None and not wait_s and compare_digest(sent, self._token):
            return OPERATOR
        text = sent.decode("latin-1")
        if _SECRET.fullmatch(text):
            keys = self._store.keys
            # The cache is read here, on the event loop: a thread costs more than the look-up.
            key = keys.known(text) or await run_in_threadpool(keys.by_secret, text)
            if key is not None:
                return principal_of_key(key)
        elif self._oidc is not None and _JWT.fullmatch(text):
            return await self._principal_of_jwt(self._oidc, text, scope)
        if wait_s:
            raise TooManyWrongTokens(wait_s)
        self._throttle.record_failure(scope)
        raise Unauthorized(
            "Invalid token: unknown, revoked or expired. Create a key with 'stagewright keys "
            "create'.",
            is_invalid_token=True,
        )

    async def _principal_of_session(self, session: Session) -> Principal:
        """Return who signed in, if the credentials used then are still valid."""
        if session.principal is not None:
            return session.principal
        if session.key_id is not None:
            key = await run_in_threadpool(self._store.keys.by_id, session.key_id)
            if key is not None:
                return principal_of_key(key)
        elif self._sessions.is_of_token(session, self._own_token):
            return OPERATOR
        # A signed cookie cannot be guessed, so this does not count as a wrong token.
        raise Unauthorized(
            "Session ended: its token was revoked, replaced or has expired. Sign in again.",
            is_invalid_token=True,
        )

    async def _principal_of_jwt(
        self, oidc: OidcTokens, token: str, scope: Scope | None
    ) -> Principal:
        try:
            return await run_in_threadpool(oidc.principal, token)
        except Unauthorized:
            self._throttle.record_failure(scope)
            raise
        except (Forbidden, IdentityProviderUnreachable):
            # Signed for another project, or not verified: no guess. But where the server's own
            # token has the form of a JWT, this might be a guess at it.
            if self._token_looks_like_jwt:
                self._throttle.record_failure(scope)
            raise


def bearer_token(headers: Headers) -> bytes:
    """Return the one bearer token of a request; raise `Unauthorized` without it or with several."""
    sent = headers.getlist("authorization")
    scheme, _, token = (sent[0] if len(sent) == 1 else "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized(
            "Send the server's token or an API key, once: 'Authorization: Bearer <token>'."
        )
    return token.strip().encode("latin-1")


def principal_of_key(key: ApiKey) -> Principal:
    """Return the principal of an API key, without scopes that this release does not know."""
    known = frozenset(scope for scope in SCOPES if scope in key.scopes)
    return Principal(id=key.id, project_id=key.project_id, scopes=known, quotas=key.quotas)


class LoginThrottle:
    """Leaky bucket of wrong tokens for each address; used on the event loop's thread only."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # By address, when its bucket will have leaked dry. Ordered by the last failure, so that
        # the first entry is the one to forget.
        self._empty_at: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, scope: Scope | None) -> int:
        """Return how long the sender of a request has to wait before its next guess, or 0."""
        if not self._empty_at or scope is None:
            return 0
        over_s = self._empty_at.get(_sender(scope), 0.0) - self._now()
        return max(0, math.ceil(over_s - (WRONG_AT_ONCE - 1) * SECONDS_EACH))

    def record_failure(self, scope: Scope | None) -> None:
        """Count a wrong token."""
        sender = "" if scope is None else _sender(scope)
        if not sender:
            return
        start = max(self._now(), self._empty_at.pop(sender, 0.0))
        self._empty_at[sender] = start + SECONDS_EACH
        if len(self._empty_at) > MAX_ADDRESSES:
            self._empty_at.popitem(last=False)


def _sender(scope: Scope) -> str:
    """Return the address or IPv6 network to charge, or "" if there is none."""
    client = scope.get("client")
    if client is None:
        return ""
    name = str(client[0])
    try:
        address = ip_address(name)
    except ValueError:
        return name
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(IPv6Network((address, NETWORK_BITS), strict=False))
    return name
