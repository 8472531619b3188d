"""Which identity provider's tokens a server takes, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from ...core.errors import InvalidInput
from ..store.records import Quotas

PREFIX = "STAGEWRIGHT_OIDC_"

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""What may be allowed: signatures with a private key that the provider alone has. Never ``none``,
and never HMAC, whose key would be what anybody can fetch."""

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True)
class OidcSettings:
    """How tokens of an OpenID Connect provider are taken.

    Attributes:
        issuer: What ``iss`` has to be, to the letter.
        audience: What ``aud`` has to be or hold: the name the provider has for this service.
        jwks_url: Where the provider's public keys are; https, or http on this machine.
        algorithms: Signatures accepted, out of `ALGORITHMS`.
        scopes_claim: Holds ``stagewright:read`` and so on: words in a text, or a list.
        project_claim: Holds the id of the caller's project.
        project: The project of tokens without that claim; `None` refuses them.
        requests_per_minute: Of each subject; `None` is no limit.
        unfinished_jobs: Of each subject; `None` is no limit.

    Raises:
        InvalidInput: A value does not fit.
    """

    issuer: str
    audience: str
    jwks_url: str
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    scopes_claim: str = "scope"
    project_claim: str = "stagewright_project"
    project: str | None = None
    requests_per_minute: int | None = None
    unfinished_jobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("issuer", "audience", "scopes_claim", "project_claim"):
            if not getattr(self, name):
                raise InvalidInput(f"{PREFIX}{name.upper()} is empty")
        if not self.algorithms or set(self.algorithms) - set(ALGORITHMS):
            raise InvalidInput(
                f"{PREFIX}ALGORITHMS takes some of {','.join(ALGORITHMS)}, "
                f"not {','.join(self.algorithms)!r}"
            )
        url = urlsplit(self.jwks_url)
        if not url.hostname or not (
            url.scheme == "https" or (url.scheme == "http" and url.hostname in LOOPBACK)
        ):
            raise InvalidInput(f"{PREFIX}JWKS_URL is an https address, not {self.jwks_url!r}")

    @property
    def quotas(self) -> Quotas:
        return Quotas(
            max_requests_per_minute=self.requests_per_minute,
            max_unfinished_jobs=self.unfinished_jobs,
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> OidcSettings | None:
        """What ``STAGEWRIGHT_OIDC_ISSUER`` and its like say; `None` if nothing.

        Raises:
            InvalidInput: They do not fit together.
        """
        known = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        given = {name: text for name, text in environment.items() if name.startswith(PREFIX)}
        if not given:
            return None
        if unknown := sorted(given.keys() - known.keys()):
            raise InvalidInput(f"{unknown[0]} is not known; known are {', '.join(known)}")
        for field in ("issuer", "audience", "jwks_url"):
            if PREFIX + field.upper() not in given:
                raise InvalidInput(f"{PREFIX}{field.upper()} is missing beside {min(given)}")
        return cls(**{known[name]: _value(known[name], text) for name, text in given.items()})  # type: ignore[arg-type]


def _value(field: str, text: str) -> str | int | tuple[str, ...]:
    if field == "algorithms":
        return tuple(name.strip() for name in text.split(","))
    if field in ("requests_per_minute", "unfinished_jobs"):
        if (
            not text.isdecimal()
            or len(text) > 9
            or (field.startswith("requests") and int(text) < 1)
        ):
            raise InvalidInput(f"{PREFIX}{field.upper()} is a whole number, not {text!r}")
        return int(text)
    return text
