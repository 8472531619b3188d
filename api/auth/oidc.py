"""Tokens of an OpenID Connect provider: signed JSON (JWT, RFC 7519) that names a subject."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jwt

from ..errors import Forbidden, Unauthorized
from ..settings.settings import OidcSettings
from ..store.errors import RecordNotFound
from ..store.store import Store
from .access import Principal
from .jwks import SigningKeys
from .scopes import SCOPES

LEEWAY_S = 30
"""Tolerated difference between the provider's clock and ours."""

SCOPE_PREFIX = "stagewright:"
"""Marks our scopes among those the provider has for other services."""


class OidcTokens:
    """Verifies tokens and turns their claims into principals."""

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
