"""Tokens of an OpenID Connect provider: signed JSON (JWT, RFC 7519) that names a subject.

The provider's public keys (a JSON Web Key Set) are fetched on demand and cached.
"""

from __future__ import annotations

import json
import logging
import re
import time
import urllib.request
from collections.abc import Callable, Mapping
from threading import Lock
from typing import IO, Any

import jwt

from ..errors import Forbidden, IdentityProviderUnreachable, Unauthorized
from ..settings.settings import OidcSettings
from ..store.errors import RecordNotFound
from ..store.store import Store
from .access import Principal
from .scopes import SCOPES

FRESH_S = 3600.0
"""Age up to which cached keys are used without asking the provider."""

USABLE_S = 24 * 3600.0
"""Age up to which they are used while the provider does not answer. Not forever, or a key that
the provider has withdrawn would stay valid."""

BETWEEN_FETCHES_S = 30.0
"""Shortest time between fetches: tokens with made-up key ids must not cause one each.

pyjwt's own ``PyJWKClient`` fetches for every unknown id and has no such limit."""

TIMEOUT_S = 5.0
MAX_BYTES = 2**20

_log = logging.getLogger(__name__)

Jwk = Mapping[str, Any]


class SigningKeys:
    """Cache of public keys by id. Thread-safe; may block."""

    def __init__(
        self,
        url: str,
        fetch: Callable[[str], bytes] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._fetch = fetch or fetch_directly
        self._now = now
        self._keys: dict[str, Jwk] = {}
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._lock = Lock()

    def key(self, key_id: str) -> Jwk | None:
        """Return the key with an id, or None if the provider has none.

        Raises:
            IdentityProviderUnreachable: The provider does not answer, and no usable key is cached.
        """
        # An unknown id may be a new key of the provider's rotation.
        if key_id not in self._keys or self._age_s(self._fetched_at) > FRESH_S:
            self._refresh()
        if self._age_s(self._fetched_at) > USABLE_S:
            raise IdentityProviderUnreachable(round(BETWEEN_FETCHES_S))
        return self._keys.get(key_id)

    def _refresh(self) -> None:
        """Fetch the keys, unless another thread is fetching or a fetch was tried just now."""
        # With cached keys a thread goes on with those instead of waiting for the fetch.
        if not self._lock.acquire(blocking=not self._keys):
            return
        try:
            if self._age_s(self._tried_at) < BETWEEN_FETCHES_S:
                return
            self._tried_at = self._now()  # before the fetch, so that a failing one counts as well
            self._keys = parse_jwks(self._fetch(self._url))
            self._fetched_at = self._tried_at
        except (OSError, ValueError, RecursionError) as error:
            _log.error("cannot fetch the identity provider's keys at %s: %s", self._url, error)
        finally:
            self._lock.release()

    def _age_s(self, since: float | None) -> float:
        return float("inf") if since is None else self._now() - since


def parse_jwks(document: bytes) -> dict[str, Jwk]:
    """Return the signature keys of a JSON Web Key Set, by id (RFC 7517), or raise `ValueError`."""
    found = json.loads(document)
    keys = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(keys, list):
        raise ValueError("not a JSON Web Key Set")
    return {
        key["kid"]: key
        for key in keys
        if isinstance(key, dict)
        and isinstance(key.get("kid"), str)
        and key.get("use", "sig") == "sig"
    }


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refusal of redirects: they could lead away from TLS, or from the configured host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, *_: Any
    ) -> None:
        raise OSError(f"it redirects ({code}); configure the address it redirects to")


def fetch_directly(url: str) -> bytes:
    """Return the bytes at an address, at most `MAX_BYTES`, or raise `OSError`."""
    with urllib.request.build_opener(_NoRedirects).open(url, timeout=TIMEOUT_S) as response:
        document: bytes = response.read(MAX_BYTES + 1)
    if len(document) > MAX_BYTES:
        raise OSError(f"the document is longer than {MAX_BYTES} bytes")
    return document


LEEWAY_S = 30
"""Tolerated difference between the provider's clock and ours."""

SCOPE_PREFIX = "stagewright:"
"""Marks our scopes among those the provider has for other services."""


class OidcTokens:
    """Verifier of tokens, which turns their claims into principals."""

    def __init__(self, settings: OidcSettings, store: Store, keys: SigningKeys) -> None:
        self._settings = settings
        self._store = store
        self._keys = keys

    def principal(self, token: str) -> Principal:
        """Return the principal of a token. May block: fetches keys and looks up the project.

        Raises:
            Unauthorized: It is not signed by the provider, not for this service, or not valid now.
            Forbidden: Its project does not exist in this service.
            IdentityProviderUnreachable: The provider's keys are not known.
        """
        claims = self._verified(token)
        subject = claims["sub"]
        if not re.fullmatch(r"[\x20-\x7e]{1,255}", subject):
            raise _invalid("its subject is not 1 to 255 printable ASCII characters")
        return Principal(
            id=f"oidc:{subject}",
            project_id=self._project(claims),
            scopes=frozenset(
                scope
                for scope in SCOPES
                if SCOPE_PREFIX + scope in _words(claims.get(self._settings.scopes_claim))
            ),
            quotas=self._settings.quotas,
        )

    def _verified(self, token: str) -> Mapping[str, Any]:
        """Return the claims after checking signature, issuer, audience and expiry."""
        try:
            header = jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid")
            # The header is the sender's text. Accepting its algorithm would let a public key serve
            # as an HMAC secret, so only the configured asymmetric ones pass.
            if algorithm not in self._settings.algorithms:
                allowed = ", ".join(self._settings.algorithms)
                raise _invalid(f"it is not signed with one of {allowed}")
            key = self._keys.key(key_id) if isinstance(key_id, str) else None
            if key is None or key.get("alg", algorithm) != algorithm:
                raise _invalid("the provider has no such key for this algorithm")
            claims: Mapping[str, Any] = jwt.decode(
                token,
                jwt.PyJWK(dict(key), algorithm),
                algorithms=[algorithm],
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
            return claims
        except jwt.InvalidTokenError as error:
            raise _invalid(str(error)) from None
        # A token is the sender's text: deep or odd JSON makes the parsers raise any of these.
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise _invalid("it cannot be parsed") from None

    def _project(self, claims: Mapping[str, Any]) -> str:
        project_id = claims.get(self._settings.project_claim, self._settings.project)
        if not isinstance(project_id, str):
            raise Forbidden(
                f"This token names no project: its claim {self._settings.project_claim!r} has to "
                "hold a project's id."
            )
        try:
            return self._store.projects.get(project_id).id
        except RecordNotFound:
            raise Forbidden(
                f"This token is for the project {project_id[:80]!r}, which does not exist here."
            ) from None


def _words(claim: object) -> frozenset[str]:
    """Return the words of a string claim, or the strings of a list claim."""
    found = claim.split() if isinstance(claim, str) else claim
    return frozenset(
        word for word in (found if isinstance(found, list) else ()) if isinstance(word, str)
    )


def _invalid(reason: str) -> Unauthorized:
    return Unauthorized(
        f"Invalid token: {reason[:200]}. Get a new one from the identity provider.",
        is_invalid_token=True,
    )
