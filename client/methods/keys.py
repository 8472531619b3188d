"""Keys of the service; they need the scope ``admin``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from ...core.service.keys import ApiKey, KeyList, NewApiKey, Quotas
from ..request_builders import get, given, json_bytes
from ..retry import exchange
from ..sans_io import Call, Steps


def keys() -> Steps[KeyList]:
    """Every key of the project, revoked ones too; without their secrets."""
    return (yield from exchange(get("api-keys"))).read(KeyList)


def create_key(
    name: str,
    *,
    scopes: Sequence[str] = ("read", "plan"),
    quotas: Quotas | None = None,
    expires_at: datetime | None = None,
) -> Steps[NewApiKey]:
    """Make a key; its secret is in this answer and nowhere else.

    It is not sent again when the answer is lost: that would make a second key. Look at `keys`.
    """
    expires = None if expires_at is None else expires_at.isoformat()
    fields = given(name=name, scopes=list(scopes), quotas=quotas, expires_at=expires)
    call = Call(
        "POST",
        get("api-keys").path,
        headers={"Content-Type": "application/json"},
        body=json_bytes(fields),
        is_repeatable=False,
    )
    return (yield from exchange(call)).read(NewApiKey)


def revoke_key(key_id: str) -> Steps[ApiKey]:
    """Revoke a key: it opens nothing from the next request on."""
    call = Call("DELETE", get("api-keys", key_id).path)
    return (yield from exchange(call)).read(ApiKey)
