"""One attack: what is sent, and which answers show that it failed."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.limits import deadline_of, lateness
from stagewright.api.settings.settings import ServerSettings

REFUSED = frozenset(range(400, 500))
JSON = "application/json"
ARCHIVE = "application/octet-stream"
PLAN_DEADLINE_S = ServerSettings().plan_deadline_s
GIVEN_UP_S = 20.0
"""After a late answer's time: an attack that waits no longer says so itself."""


@dataclass(frozen=True)
class Reply:
    """Response of the service.

    Attributes:
        status: 0 if the connection was closed without an answer.
        kind: Content type.
    """

    status: int
    kind: str = ""
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        return json.loads(self.body)

    def says(self) -> str:
        """Its reason, on one line."""
        try:
            told = self.json()
            text = str(told.get("detail", told)) if isinstance(told, dict) else str(told)
        except ValueError:
            text = self.body.decode("utf-8", "replace")
        return " ".join(text.split())


@dataclass(frozen=True)
class Target:
    """The server under attack.

    Attributes:
        markers: A folder in which code that ran would leave a file.
        token: The operator's.
        other_token: Of a key in another project.
        late: A line for each answer that `ask` had later than its deadline allows.
    """

    host: str
    port: int
    token: str
    other_token: str
    markers: Path
    late: list[str] = field(default_factory=list)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        kind: str = JSON,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send one ordinary request, and note if its answer is late."""
        deadline_s = deadline_for(body)
        timeout_s = timeout_s or deadline_s + GIVEN_UP_S
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        begin = time.monotonic()
        sent = {"Authorization": f"Bearer {token or self.token}"}
        if body is not None:
            sent["Content-Type"] = kind
        try:
            connection.request(method, path, body, {**sent, **(headers or {})})
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, told.get("content-type", ""), answer.read(), told)
        except (ConnectionError, TimeoutError, http.client.HTTPException):
            return Reply(0)
        finally:
            connection.close()
            if line := lateness(f"{method} {path}", time.monotonic() - begin, deadline_s):
                self.late.append(line)

    def post(self, path: str, value: Any, **options: Any) -> Reply:
        return self.ask("POST", path, json.dumps(value).encode(), **options)


@dataclass(frozen=True)
class Attack:
    """One thing a stranger may try.

    Attributes:
        group: What sort of attack.
        send: Does it.
        statuses: Answers that are right; each but 0 and 2xx has to be a problem that says why.
        words: What the reason has to mention.
        is_plain: Whether the answer may come from the HTTP parser, in plain text.
        is_heavy: Whether it starts a child with torch.
    """

    group: str
    name: str
    send: Callable[[Target], Reply]
    statuses: frozenset[int] = REFUSED
    words: str = ""
    is_plain: bool = False
    is_heavy: bool = False


def deadline_for(body: bytes | None) -> float:
    """Return how long a request may take: its own deadline, or the server's."""
    try:
        own = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        own = None
    return deadline_of(own, PLAN_DEADLINE_S)


def wrong_with(attack: Attack, reply: Reply) -> str:
    """Return what is wrong with an answer; empty if it is as it has to be."""
    if reply.status not in attack.statuses:
        return f"answered {reply.status}: {reply.says()[:200]}"
    if attack.words and attack.words not in reply.says():
        return f"does not mention {attack.words!r}: {reply.says()[:200]}"
    if reply.status in REFUSED and not attack.is_plain:
        if not reply.kind.startswith("application/problem+json"):
            return f"no problem document but {reply.kind!r}"
        if not reply.says():
            return "does not say why"
    return ""


def posting(path: str, body: bytes, kind: str = JSON, **headers: str) -> Callable[[Target], Reply]:
    """Return an attack that sends one body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda target: target.ask("POST", path, body, kind=kind, headers=named)
