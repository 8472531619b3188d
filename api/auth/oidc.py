"""Tokens of an OpenID Connect provider: signed JSON (JWT, RFC 7519) that says who somebody is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jwt

from ..http.problems import Problem
from ..settings.oidc import OidcSettings
from ..store.errors import RecordNotFound
from ..store.store import Store
from .authenticate import unauthorized
from .jwks import SigningKeys
from .principal import Principal
from .scopes import SCOPES

LEEWAY_S = 30
"""How far the provider's clock may be from ours."""

SCOPE_PREFIX = "stagewright:"
"""A provider's scopes are for many services."""


class OidcTokens:
    """Reads tokens; `identify.TokenReader`.

    Args:
        settings: Whose tokens, for whom.
        store: Has the projects.
        keys: The provider's public keys.
    """

    def __init__(self, settings: OidcSettings, store: Store, keys: SigningKeys) -> None:
        self._settings = settings
        self._store = store
        self._keys = keys

    def principal(self, token: str) -> Principal:
        """Whose token it is. May block: keys are fetched, and the project is looked up.

        Raises:
            Problem: 401: it is not signed by the provider, not for this service, or not valid
                now. 403: its project is not one of this service. 503: the provider's keys are
                not known.
        """
        claims = self._verified(token)
        subject = claims["sub"]
        if not re.fullmatch(r"[\x20-\x7e]{1,255}", subject):
            raise _refused("its subject is not 1 to 255 ASCII characters")
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
        """The claims, with the signature and what every token must say checked."""
        try:
            header = jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid")
            if algorithm not in self._settings.algorithms:
                allowed = ", ".join(self._settings.algorithms)
                raise _refused(f"it is not signed by one of {allowed}")
            key = self._keys.key(key_id) if isinstance(key_id, str) else None
            if key is None or key.get("alg", algorithm) != algorithm:
                raise _refused("the provider has no such key for such a signature")
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
        except Problem:
            raise
        except jwt.InvalidTokenError as error:
            raise _refused(str(error)) from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise _refused("it cannot be read") from None

    def _project(self, claims: Mapping[str, Any]) -> str:
        named = claims.get(self._settings.project_claim, self._settings.project)
        if not isinstance(named, str):
            raise Problem(
                403,
                "forbidden",
                f"this token names no project; its claim {self._settings.project_claim!r} "
                "has to hold a project's id",
            )
        try:
            return self._store.projects.get(named).id
        except RecordNotFound:
            raise Problem(
                403,
                "forbidden",
                f"this token is for the project {named[:80]!r}, which is not one of this service",
            ) from None


def _words(claim: object) -> frozenset[str]:
    """Words of a text, or the texts of a list."""
    found = claim.split() if isinstance(claim, str) else claim
    return frozenset(
        word for word in (found if isinstance(found, list) else ()) if isinstance(word, str)
    )


def _refused(why: str) -> Problem:
    return unauthorized(
        f"this token opens nothing here: {why[:200]}; get a new one from the identity provider",
        error="invalid_token",
    )
