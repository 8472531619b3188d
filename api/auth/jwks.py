"""JSON Web Key Set: an identity provider's public keys, fetched on demand and cached."""

from __future__ import annotations

import json
import logging
import time
import urllib.request
from collections.abc import Callable, Mapping
from threading import Lock
from typing import IO, Any

from ..errors import IdentityProviderUnreachable

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
    """Refuses redirects: they could lead away from TLS, or from the configured host."""

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
