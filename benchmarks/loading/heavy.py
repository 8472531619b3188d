"""A heavy search, again and again, while something else is measured."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from typing import Any

from benchmarks.loading.server import Server
from benchmarks.planner import uneven_profile

LAYERS, CLUSTER = 1000, "64x8x32GB"
OPTIONS = {"num_microbatches": 1024, "max_replicas": None, "recompute": "auto"}
TIMEOUT_S = 120
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(
    server: Server, token: str, path: str, body: Any, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """What the server answers to a body.

    Raises:
        OSError: It does not answer, or refuses.
    """
    request = urllib.request.Request(
        f"http://{server.host}:{server.port}{path}",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            **(headers or {}),
        },
    )
    with DIRECT.open(request, timeout=TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


class Heavy:
    """Asks for the same large plan, found out anew each time, one after the other.

    Attributes:
        num_wrong: How many were not answered with a plan.
        wrong: What they were answered instead.
    """

    def __init__(self, server: Server) -> None:
        self._server, self._token = server, server.tokens[0]
        profile = uneven_profile(LAYERS).model_dump(mode="json")
        stored = post(server, self._token, "/v1/profiles", profile)
        self._body = {"profile_id": stored["id"], "cluster": CLUSTER, "options": OPTIONS}
        self._done = 0
        self.num_wrong = 0
        self.wrong: list[str] = []

    def start(self, stop: threading.Event) -> None:
        """Begin; there is always one being searched for until `stop` is set."""
        self._thread = threading.Thread(target=self._ask, args=(stop,))
        self._thread.start()

    def end(self) -> int:
        """How many plans were found, the last one included, which is waited for."""
        self._thread.join()
        return self._done

    def _ask(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                anew = {"Cache-Control": "no-cache"}
                found = post(self._server, self._token, "/v1/plans", self._body, anew)
            except (OSError, ValueError) as error:
                told = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                self.num_wrong += 1
                self.wrong.append(f"a heavy plan: {error} {told}"[:500])
                return
            self._done += 1
            if found["status"] != "planned":
                self.num_wrong += 1
                self.wrong.append(f"a heavy plan: {str(found)[:300]}")
                return
