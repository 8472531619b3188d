"""Browser sessions: signed cookies that name who signed in and hold no secret."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

from itsdangerous import BadData, URLSafeSerializer
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from ...core.document import Record
from ...core.errors import InvalidInput
from ..settings.settings import OidcSettings
from .access import Principal

LIFETIME_S = 12 * 3600

MAX_ENDED = 100
"""Sessions of one holder that were ended early and are remembered one by one."""

MAX_HOLDERS = 10_000
"""Holders of such sessions that are remembered."""

MIN_KEY_CHARACTERS = 32
"""A key that can be guessed, which needs no server to try, lets its finder sign in as anyone."""

_log = logging.getLogger(__name__)


class Session(Record):
    """Contents of a session's cookie; one of key, server's token and principal is set.

    Attributes:
        id: Random, so that this session can be ended and no other.
        ends_at_s: Unix time.
        key_id: The API key that signed in.
        key_project_id: The project of that key.
        token_mac: Keyed hash of the server's own token, if that signed in.
        principal: The holder of an identity provider's token, if that signed in.
    """

    id: str
    ends_at_s: float
    key_id: str | None = None
    key_project_id: str | None = None
    token_mac: str | None = None
    principal: Principal | None = None

    @property
    def holder(self) -> str:
        return self.key_id or (self.principal.owner if self.principal else "the server's token")

    @property
    def project_id(self) -> str:
        """The project whose sessions it counts among; the server's own token has none."""
        return self.principal.project_id if self.principal else self.key_project_id or ""


class Sessions:
    """Issuer and reader of session cookies. Servers with one key accept each other's cookies.

    Args:
        key: Signs the cookies; if not given, a random one, and sessions end with the process.
        oidc: The identity provider. Its settings decide what a token may do, so a session does not
            outlive them.
        now: Unix time, in seconds.

    Raises:
        InvalidInput: The key is too short.
    """

    def __init__(
        self,
        key: str | None = None,
        oidc: OidcSettings | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        if key is None:
            key = secrets.token_urlsafe(32)
            _log.info("session_key is not set: sessions of browsers end with this process")
        elif len(key) < MIN_KEY_CHARACTERS:
            raise InvalidInput(
                f"session_key has {len(key)} characters and needs at least {MIN_KEY_CHARACTERS}; "
                "make one with: openssl rand -hex 32"
            )
        self._key = key.encode()
        self._now = now
        context = "" if oidc is None else oidc.model_dump_json()
        self._serializer = URLSafeSerializer(
            self._key,
            salt=f"stagewright.session {context}",
            signer_kwargs={"key_derivation": "hmac", "digest_method": hashlib.sha256},
        )
        self._ended = EndedSessions(now)

    def open(self, principal: Principal, token: str) -> str:
        """Return the cookie of a new session for a principal who has just shown this token."""
        end_s = self._now() + LIFETIME_S
        session = Session(id=secrets.token_urlsafe(16), ends_at_s=end_s)
        if principal.id is None:
            changes: dict[str, object] = {"token_mac": self._mac(token)}
        elif principal.id.startswith("oidc:"):
            # No store can be asked about it later, so the session ends with the token.
            end_s = min(end_s, _expiry_of(token))
            changes = {"principal": principal, "ends_at_s": end_s}
        else:
            changes = {"key_id": principal.id, "key_project_id": principal.project_id}
        document = session.model_copy(update=changes).model_dump(mode="json", exclude_none=True)
        return self._signed(document)

    def _signed(self, document: dict[str, object]) -> str:
        value = self._serializer.dumps(document)
        return value if isinstance(value, str) else value.decode("ascii")

    def read(self, headers: Headers) -> Session | None:
        """Return the session of a request's cookie; `None` without one that is valid now."""
        value = cookie_parser(headers.get("cookie", "")).get(cookie_name(headers), "")
        try:
            session = Session.model_validate(self._serializer.loads(value))
        except (BadData, ValidationError):  # tampered with, or of another key
            return None
        is_over = session.ends_at_s <= self._now() or self._ended.has(session)
        return None if is_over else session

    def close(self, session: Session | None) -> None:
        """End a session, if there is one: copies of its cookie are refused from now on."""
        if session is not None:
            self._ended.add(session)

    def is_of_token(self, session: Session, token: str | None) -> bool:
        """Return True if the server's own token opened the session and is still the same."""
        return (
            session.token_mac is not None
            and token is not None
            and hmac.compare_digest(session.token_mac, self._mac(token))
        )

    def _mac(self, token: str) -> str:
        # Keyed: a plain hash in the cookie would let its holder try out guesses of the token.
        return hmac.new(self._key, b"token " + token.encode(), hashlib.sha256).hexdigest()


class EndedSessions:
    """Sessions ended early; a signature cannot be taken back, so they are remembered.

    Of a holder who ended more than `MAX_ENDED`, the one that would expire first is forgotten, and
    all older sessions of this holder count as ended, and no one else's. Beyond `MAX_HOLDERS`, one
    of the project that has most of them is forgotten, the one whose sessions expire first, and all
    sessions of that project that are as old count as ended: keys can be made and revoked without
    end, and a project that does so must not sign out another.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # By project and holder, and then by id, when they would expire; and until when all of a
        # holder, or of a project (with the holder ""), count as ended.
        self._ended: dict[tuple[str, str], dict[str, float]] = {}
        self._floors: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def has(self, session: Session) -> bool:
        """Return True if a session was ended."""
        whose = session.project_id, session.holder
        floor = max(self._floors.get(whose, 0.0), self._floors.get((whose[0], ""), 0.0))
        return session.ends_at_s <= floor or session.id in self._ended.get(whose, ())

    def add(self, session: Session) -> None:
        """Remember that a session was ended."""
        with self._lock:
            whose = session.project_id, session.holder
            ended = self._ended.setdefault(whose, {})
            ended[session.id] = session.ends_at_s
            if len(ended) > MAX_ENDED:
                self._floors[whose] = ended.pop(min(ended, key=ended.__getitem__))
            if len(self._ended) > MAX_HOLDERS:
                self._drop_holder()

    def _drop_holder(self) -> None:
        """Forget those whose sessions have expired; if there are none, one of the largest project.

        Called with the lock.
        """
        now = self._now()
        last = {whose: max(ended.values()) for whose, ended in self._ended.items()}
        over = [whose for whose, end in last.items() if end <= now]
        if not over:
            ((largest, _),) = Counter(project for project, _ in last).most_common(1)
            first = min((one for one in last if one[0] == largest), key=last.__getitem__)
            floor = max(self._floors.get((largest, ""), 0.0), last[first])
            self._floors[largest, ""] = floor
            over = [first]
        for whose in over:
            del self._ended[whose]
            self._floors.pop(whose, None)
        self._floors = {whose: end for whose, end in self._floors.items() if end > now}


def cookie_name(headers: Headers) -> str:
    """Return the name of the session cookie for the host that a browser asks.

    Browsers send cookies to every port of a host name, so each port has a name of its own.
    """
    try:
        port = urlsplit(f"//{headers.get('host', '')}").port
    except ValueError:
        port = None
    return f"stagewright_{port or 0}"


def _expiry_of(token: str) -> float:
    """Return when a JWT expires; its signature and claims have been verified."""
    payload = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return float(claims["exp"])
