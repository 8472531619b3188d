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

    issuer: str = Field(min_length=1, description="What `iss` has to be, to the letter.")
    audience: str = Field(
        min_length=1,
        description="What `aud` has to be or hold: the name the provider has for this service.",
    )
    jwks_url: str = Field(
        description="Where the provider's public keys are: `jwks_uri` of its "
        "`/.well-known/openid-configuration`; https, or http on this machine."
    )
    algorithms: Words = Field(
        ("RS256", "ES256", "EdDSA"), min_length=1, description="Signatures taken."
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
        description="The claim with the id of the project, as `keys list --json` shows it.",
    )
    project: str | None = Field(
        None, description="The project of tokens without that claim; without it they are refused."
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="Quota of each subject; none is no limit."
    )
    unfinished_jobs: int | None = Field(
        None, ge=0, description="Quota of each subject; none is no limit."
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
