"""The public keys of an identity provider, fetched when needed and kept."""

from __future__ import annotations

import json
import logging
import time
import urllib.request
from collections.abc import Callable, Mapping
from threading import Lock
from typing import IO, Any

from ..http.problems import Problem

FRESH_S = 3600.0
"""How long keys are taken without a look at the provider."""

USABLE_S = 24 * 3600.0
"""How long they are if the provider does not answer; a key it withdrew must not open for ever."""

BETWEEN_FETCHES_S = 30.0
"""Whoever makes up key ids must not make this server fetch without end."""

TIMEOUT_S = 5.0
MAX_BYTES = 2**20

_log = logging.getLogger(__name__)

Jwk = Mapping[str, Any]


class SigningKeys:
    """Finds a public key by its id. It may be called from several threads, and may block.

    Args:
        url: Where the provider's JSON Web Key Set is.
        fetch: Reads it: the bytes at an address.
        now: A clock that never goes back, in seconds.
    """

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
        """The key with that id; `None` if the provider has none.

        Raises:
            Problem: 503: the provider does not answer, and its keys are not known.
        """
        if key_id not in self._keys or self._age_s(self._fetched_at) > FRESH_S:
            self._refresh()
        if self._age_s(self._fetched_at) > USABLE_S:
            raise Problem(
                503,
                "identity-provider-unreachable",
                "the identity provider's keys cannot be fetched; ask again a little later",
                headers={"Retry-After": f"{BETWEEN_FETCHES_S:.0f}"},
            )
        return self._keys.get(key_id)

    def _refresh(self) -> None:
        """Fetch, unless somebody does or just did; those who have keys do not wait for it."""
        if not self._lock.acquire(blocking=not self._keys):
            return
        try:
            if self._age_s(self._tried_at) < BETWEEN_FETCHES_S:
                return
            self._tried_at = self._now()
            self._keys = parse(self._fetch(self._url))
            self._fetched_at = self._tried_at
        except (OSError, ValueError, RecursionError) as error:
            _log.error("keys of the identity provider at %s: %s", self._url, error)
        finally:
            self._lock.release()

    def _age_s(self, since: float | None) -> float:
        return float("inf") if since is None else self._now() - since


def parse(document: bytes) -> dict[str, Jwk]:
    """The keys for signatures of a JSON Web Key Set, by id (RFC 7517).

    Raises:
        ValueError: It is none.
    """
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
    """Another address, perhaps without TLS, is not the one configured."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, *_: Any
    ) -> None:
        raise OSError(f"it answers with a redirect ({code}); configure the address it leads to")


def fetch_directly(url: str) -> bytes:
    """What is at an address, up to `MAX_BYTES`.

    Raises:
        OSError: It does not answer, or answers with something else.
    """
    with urllib.request.build_opener(_NoRedirects).open(url, timeout=TIMEOUT_S) as response:
        document: bytes = response.read(MAX_BYTES + 1)
    if len(document) > MAX_BYTES:
        raise OSError(f"it is longer than {MAX_BYTES} bytes")
    return document
