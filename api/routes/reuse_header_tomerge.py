"""What a request says about answers found before, and what an answer says."""

from __future__ import annotations

import hashlib

from fastapi import Request

from .idempotency import KEY_HEADER

REUSED = "Stagewright-Reused"
"""Names what of an answer had been found out before."""


def is_fresh(request: Request) -> bool:
    """Whether everything is to be found out again."""
    return "no-cache" in request.headers.get("cache-control", "").lower()


async def submit_key(request: Request) -> str | None:
    """What makes two submissions of a job one: the idempotency key, with what was sent."""
    key = request.headers.get(KEY_HEADER)
    if key is None:
        return None
    sent = hashlib.sha256(request.url.path.encode() + await request.body())
    return f"{key}:{sent.hexdigest()[:24]}"
