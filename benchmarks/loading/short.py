"""Plans of 100 layers, alone and beside two heavy searches, in turns."""

from __future__ import annotations

import threading
import time
from typing import Any

from benchmarks.loading.heavy import Heavy, post
from benchmarks.loading.server import Server
from benchmarks.planner import uneven_profile

LAYERS, CLUSTER = 100, "8x32GB"
OPTIONS = {"num_microbatches": 32}
HEAVY_CLIENTS = 2
ROUNDS = 4
SETTLE_S = 1.0


def measure_short_plans(server: Server, requests: int) -> tuple[list[float], list[float], int]:
    """Return the seconds of plans alone and beside heavy searches, and how many of those ended.

    The light client belongs to another project than the heavy ones. Rounds alternate, so that
    whatever else the machine does falls upon both.
    """
    token = server.tokens[-1]
    stored = post(server, token, "/v1/profiles", uneven_profile(LAYERS).model_dump(mode="json"))
    body = {"profile_id": stored["id"], "cluster": CLUSTER, "options": OPTIONS}
    heavies = [Heavy(server, searches_only=True) for _ in range(HEAVY_CLIENTS)]
    alone: list[float] = []
    beside: list[float] = []
    _ask(server, token, body, HEAVY_CLIENTS)  # its process has started
    num_heavy = 0
    for _ in range(ROUNDS):
        alone += _ask(server, token, body, requests // ROUNDS)
        stop = threading.Event()
        for heavy in heavies:
            heavy.start(stop)
        time.sleep(SETTLE_S)
        beside += _ask(server, token, body, requests // ROUNDS)
        stop.set()
        num_heavy = sum(heavy.end() for heavy in heavies)
    return alone, beside, num_heavy


def _ask(server: Server, token: str, body: dict[str, Any], number: int) -> list[float]:
    took_s = []
    for _ in range(number):
        began = time.monotonic()
        post(server, token, "/v1/plans", body, {"Cache-Control": "no-cache"})
        took_s.append(time.monotonic() - began)
    return took_s
