"""Settings of the identity provider whose tokens a server accepts."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from ...core.document import Record
from ..store.records import Quotas
from .types import Words

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""Algorithms that may be configured, all asymmetric. Never ``none``, and never HMAC, whose secret
would be the public key that anyone can fetch."""

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class OidcSettings(Record):
    """Issuer, audience, keys and claims of an OpenID Connect provider's tokens."""

    issuer: str = Field(min_length=1, description="Exact value required of `iss`.")
    audience: str = Field(
        min_length=1,
        description="Value required in `aud`: the provider's name for this service.",
    )
    jwks_url: str = Field(
        description="Address of the provider's public keys: `jwks_uri` of its "
        "`/.well-known/openid-configuration`; https, or http on this machine."
    )
    algorithms: Words = Field(
        ("RS256", "ES256", "EdDSA"), min_length=1, description="Accepted signature algorithms."
    )
    scopes_claim: str = Field(
        "scope",
        min_length=1,
        description="The claim with `stagewright:read`, `stagewright:plan` and so on, as a list "
        "or words.",
    )
    project_claim: str = Field(
        "stagewright_project",
        min_length=1,
        description="The claim with the project's id, as shown by `keys list --json`.",
    )
    project: str | None = Field(
        None, description="Project of tokens without that claim; by default they are refused."
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="Quota per subject; unlimited by default."
    )
    unfinished_jobs: int | None = Field(
        None, ge=0, description="Quota per subject; unlimited by default."
    )

    @field_validator("algorithms")
    @classmethod
    def _are_safe(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if set(given) - set(ALGORITHMS):
            raise ValueError(f"takes some of {','.join(ALGORITHMS)}, not {','.join(given)!r}")
        return given

    @field_validator("jwks_url")
    @classmethod
    def _is_safe(cls, given: str) -> str:
        url = urlsplit(given)
        if not url.hostname or not (
            url.scheme == "https" or (url.scheme == "http" and url.hostname in LOOPBACK)
        ):
            raise ValueError(f"is an https address, not {given!r}")
        return given

    @property
    def quotas(self) -> Quotas:
        return Quotas(
            max_requests_per_minute=self.requests_per_minute,
            max_unfinished_jobs=self.unfinished_jobs,
        )
