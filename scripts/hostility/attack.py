"""One attack: what is sent, and which answers show that it failed."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REFUSED = frozenset(range(400, 500))
JSON = "application/json"
ARCHIVE = "application/octet-stream"


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
    """

    host: str
    port: int
    token: str
    other_token: str
    markers: Path

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        kind: str = JSON,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Reply:
        """One ordinary request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        sent = {"Authorization": f"Bearer {token or self.token}"}
        if body is not None:
            sent["Content-Type"] = kind
        try:
            connection.request(method, path, body, {**sent, **(headers or {})})
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, told.get("content-type", ""), answer.read(), told)
        except (ConnectionError, http.client.HTTPException):
            return Reply(0)
        finally:
            connection.close()

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
