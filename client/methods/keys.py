"""API keys of the service; managing them needs the scope ``admin``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from ...core.service.keys import ApiKey, KeyList, NewApiKey, Quotas
from ..request_builders import build_get, drop_none, json_bytes
from ..retry import send_with_retries
from ..sans_io import HttpRequest, Steps


def keys() -> Steps[KeyList]:
    """List the project's keys without their secrets, including revoked ones."""
    return (yield from send_with_retries(build_get("api-keys"))).read(KeyList)


def create_key(
    name: str,
    *,
    scopes: Sequence[str] = ("read", "plan"),
    quotas: Quotas | None = None,
    expires_at: datetime | None = None,
) -> Steps[NewApiKey]:
    """Create a key. Its secret is in this answer and nowhere else.

    If the answer is lost, the request is not repeated; see `keys` for whether it was created.
    """
    expires = None if expires_at is None else expires_at.isoformat()
    fields = drop_none(name=name, scopes=list(scopes), quotas=quotas, expires_at=expires)
    call = HttpRequest(
        "POST",
        build_get("api-keys").path,
        headers={"Content-Type": "application/json"},
        body=json_bytes(fields),
        is_repeatable=False,  # the service stores no secret, so it could not answer the same again
    )
    return (yield from send_with_retries(call)).read(NewApiKey)


def revoke_key(key_id: str) -> Steps[ApiKey]:
    """Revoke a key, which takes effect with the next request."""
    call = HttpRequest("DELETE", build_get("api-keys", key_id).path)
    return (yield from send_with_retries(call)).read(ApiKey)
