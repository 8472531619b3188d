"""Heavy requests, again and again, while something else is measured."""

from __future__ import annotations

import itertools
import json
import threading
import urllib.error
import urllib.request
from typing import Any

from benchmarks.loading.server import Server
from benchmarks.planner import uneven_profile

LAYERS, CLUSTER = 1000, "64x8x32GB"
OPTIONS = {"num_microbatches": 1024, "max_replicas": None, "recompute": "auto"}
DRAWN_CLUSTER, DRAWN_OPTIONS = "4xcpu", {"num_microbatches": 4096}
DRAWN_ACTIONS = 2 * 4 * 4096
"""A forward and a backward of each micro-batch on each stage."""

UPLOADED_LAYERS = 5_500
"""A body of about 4 MB."""

TIMEOUT_S = 120
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(
    server: Server, token: str, path: str, body: Any, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return what the server answers to a body.

    Raises:
        OSError: It does not answer, or refuses.
    """
    return ask(server, token, path, json.dumps(body).encode(), headers)


def ask(
    server: Server,
    token: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return what the server answers; a GET without a body.

    Raises:
        OSError: It does not answer, or refuses.
    """
    request = urllib.request.Request(
        f"http://{server.host}:{server.port}{path}",
        body,
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
    """Asks for large things, each anew, one after the other: a search, a timeline, a profile.

    They are what is dear in different places: a search and a drawing in the planning processes,
    a body of 4 MB where requests are read.

    Attributes:
        num_wrong: How many were not answered as they have to be.
        wrong: What they were answered instead.
    """

    def __init__(self, server: Server, *, searches_only: bool = False) -> None:
        self._searches_only = searches_only
        self._server, self._token = server, server.tokens[0]
        profile = uneven_profile(LAYERS).model_dump(mode="json")
        stored = post(server, self._token, "/v1/profiles", profile)
        self._body = {"profile_id": stored["id"], "cluster": CLUSTER, "options": OPTIONS}
        drawn = {**self._body, "cluster": DRAWN_CLUSTER, "options": DRAWN_OPTIONS}
        self._drawn = post(server, self._token, "/v1/plans", drawn)["id"]
        self._profile = uneven_profile(UPLOADED_LAYERS)
        self._uploaded = self._profile.content_id()
        self._text = self._profile.to_json().encode()
        self._done = 0
        self.num_wrong = 0
        self.wrong: list[str] = []

    def start(self, stop: threading.Event) -> None:
        """Begin; there is always one of them being answered until `stop` is set."""
        self._thread = threading.Thread(target=self._ask, args=(stop,))
        self._thread.start()

    def end(self) -> int:
        """Wait for the last answer; return the number of answers."""
        self._thread.join()
        return self._done

    def _ask(self, stop: threading.Event) -> None:
        mixed = (self._upload, self._timeline, self._trace, self._search)
        every = itertools.cycle((self._search,) if self._searches_only else mixed)
        while not stop.is_set():
            work = next(every)
            try:
                wrong = work()
            except (OSError, ValueError) as error:
                told = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                wrong = f"{error} {told}"
            if wrong:
                self.num_wrong += 1
                self.wrong.append(f"heavy {work.__name__.strip('_')}: {wrong}"[:500])
                return
            self._done += 1

    def _search(self) -> str:
        anew = {"Cache-Control": "no-cache"}
        found = post(self._server, self._token, "/v1/plans", self._body, anew)
        return "" if found["status"] == "planned" else str(found)

    def _timeline(self) -> str:
        found = ask(self._server, self._token, f"/v1/plans/{self._drawn}?format=timeline")
        return "" if len(found["events"]) >= DRAWN_ACTIONS else f"{len(found['events'])} events"

    def _trace(self) -> str:
        path = f"/v1/plans/{self._drawn}?format=chrome_trace"
        events = ask(self._server, self._token, path)["traceEvents"]
        return "" if len(events) >= DRAWN_ACTIONS else f"{len(events)} events"

    def _upload(self) -> str:
        found = ask(self._server, self._token, "/v1/profiles", self._text)
        return "" if found["id"] == self._uploaded else str(found)
