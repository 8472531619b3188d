"""Clients that take all there is of something and keep it: streams, sessions, bodies, the end."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlencode

from benchmarks.planner import uneven_profile
from scripts.limits import LATE_S
from stagewright.api.auth.sessions import MAX_ENDED
from stagewright.api.http.examples import example_profile
from stagewright.api.jobs.service import MAX_KEY_STREAMS, MAX_STREAMS
from stagewright.api.middleware.load_limits import KEY_BYTES, MAX_BODY_S

from . import history
from .attack import JSON, Attack, Reply, Target
from .server import attacked

WRONG = 599
"""A status that no attack allows."""

ANSWERED_WITHIN_S = 10.0
OTHERS_WAIT_S = 3.0
SIGN_INS = 1_005
"""So many once signed everybody out."""

UNFINISHED = 15 * 2**20
"""Bytes of a body of 16 MiB that arrive."""

LINES_OF_A_KEY = 10
ENDED_WITHIN_S = 20.0
"""The grace period of 5 s, and the end of all processes."""


def attacks() -> Iterator[Attack]:
    refused = frozenset({429})
    yield Attack("stream", "21 streams of one key", _streams_of_a_key, refused, "may watch")
    yield Attack("stream", "280 streams of 14 keys", _streams_of_all, refused, "all clients")
    yield Attack("stream", "20 clients that never read", _never_reading, frozenset({200}))
    yield Attack("session", "sign-ins without end", _sign_ins, frozenset({200}))
    yield Attack("upload", "40 bodies cut off, of 4 keys", _cut_off, refused, "in flight")
    yield Attack(
        "upload", "a body that stops coming", _stops_coming, frozenset({408}), "arrive", False, True
    )
    yield Attack("read", "60 drawings of one read key", _drawings, refused, "under way")
    yield Attack(
        "deadline", "a second for a search without end", _hurried, frozenset({201, 422}), "", False,
        True,
    )  # fmt: skip
    yield Attack(
        "end", "SIGTERM during searches", _signal_during_searches, frozenset({201, 503}), "",
        False, True,
    )  # fmt: skip


def _streams_of_a_key(target: Target) -> Reply:
    with _unfinished_job(target, target.token) as events, ExitStack() as stack:
        replies = [_open(stack, target, events, target.token) for _ in range(MAX_KEY_STREAMS + 1)]
        wrong = _others_wait(target)
    is_held = [reply.status for reply in replies[:-1]] == [200] * MAX_KEY_STREAMS
    return wrong or (replies[-1] if is_held else _wrong("one of the first was refused"))


def _streams_of_all(target: Target) -> Reply:
    """Ask for 140 streams in each of two projects, which may have half of all each."""
    replies: list[Reply] = []
    with ExitStack() as stack:
        for token in (target.token, target.other_token):
            events = stack.enter_context(_unfinished_job(target, token))
            num_keys = 3 * MAX_STREAMS // (4 * MAX_KEY_STREAMS)
            for key in [_key(target, token) for _ in range(num_keys)]:
                replies += [_open(stack, target, events, key) for _ in range(MAX_KEY_STREAMS)]
        wrong = _others_wait(target)
    num_held = sum(reply.status == 200 for reply in replies)
    if num_held > MAX_STREAMS:
        return _wrong(f"{num_held} streams were open at once")
    end_s = time.monotonic() + ANSWERED_WITHIN_S
    with _unfinished_job(target, target.token) as events:
        while _once(target, events).status != 200:  # none of them is counted any more
            if time.monotonic() > end_s:
                return _wrong("streams that ended are still counted")
            time.sleep(0.1)
    return wrong or next(reply for reply in replies if reply.status != 200)


def _never_reading(target: Target) -> Reply:
    """Ask for a picture of a plan fifty times on each line, and read none until the end."""
    head = _head(target, "GET", f"/v1/plans/{history.plan(target)}?format=svg", target.token)
    with ExitStack() as stack:
        lines = [stack.enter_context(_line(target, receives=4096)) for _ in range(20)]
        for line in lines:
            line.sendall(head * 50)
        time.sleep(1.0)
        return _others_wait(target) or _answer(lines[0])


def _drawings(target: Target) -> Reply:
    """Ask for large drawings and exports with a key that only reads, and leave half of them."""
    options = {"num_microbatches": 800, "num_stages": 16}
    made = target.post(
        "/v1/plans",
        {
            "profile": uneven_profile(64, 0).model_dump(mode="json"),
            "cluster": "16x24GB",
            "options": options,
        },
    )
    small = {"profile": example_profile(), "cluster": "2x24GB"}
    others = target.post("/v1/plans", small, token=target.other_token)
    if (made.status, others.status) != (201, 201):
        return _wrong(f"there are no plans to draw: {made.says()[:100]}")
    key = _key(target, target.token, "read")
    path = f"/v1/plans/{made.json()['id']}"
    forms = ("?format=svg", "?format=chrome_trace", "/exports/vllm", "/exports/torch")
    with ExitStack() as stack:
        lines = [stack.enter_context(_line(target)) for _ in range(60)]
        for number, line in enumerate(lines):
            line.sendall(_head(target, "GET", path + forms[number % len(forms)], key))
        for line in lines[::2]:
            line.close()
        begin = time.monotonic()
        drawn = target.ask(
            "GET", f"/v1/plans/{others.json()['id']}?format=svg", token=target.other_token
        )
        took_s = time.monotonic() - begin
        if drawn.status != 200 or took_s > ANSWERED_WITHIN_S:
            return _wrong(f"another project waits {took_s:.1f} s for a {drawn.status}")
        replies = [_answer(line, within_s=0.5) for line in lines[1::2]]
    found = {reply.status for reply in replies}
    if not found <= {0, 200, 422, 429}:  # 0: it is still drawn
        return _wrong(f"answered {sorted(found)}")
    return next((reply for reply in replies if reply.status == 429), replies[0])


def _sign_ins(target: Target) -> Reply:
    """Sign in and out again and again, with a key whose project has another session, too."""
    assert SIGN_INS > MAX_ENDED
    key = _key(target, target.other_token)
    line = http.client.HTTPConnection(target.host, target.port, timeout=ANSWERED_WITHIN_S)
    with closing(line):
        others = [_signed_in(line, token) for token in (target.token, target.other_token)]
        for _ in range(SIGN_INS):
            _browse(line, "POST", "/sign-out", cookie=_signed_in(line, key))
        pages = [_browse(line, "GET", "/plans", cookie=cookie) for cookie in others]
    return next((_wrong("a session was ended") for page in pages if page.status != 200), pages[0])


def _cut_off(target: Target) -> Reply:
    """Send all of many bodies but their last MiB."""
    keys = [target.token, *(_key(target, target.other_token) for _ in range(3))]
    with ExitStack() as stack:
        lines = [
            stack.enter_context(_unfinished_body(target, token, UNFINISHED))
            for token in keys
            for _ in range(LINES_OF_A_KEY)
        ]
        wrong = _others_wait(target)
        replies = [reply for line in lines if (reply := _answer(line, within_s=0.5)).status]
    num_held = len(lines) - len(replies)
    if num_held > len(keys) * KEY_BYTES // UNFINISHED:
        return _wrong(f"{num_held} bodies were held at once")
    return wrong or next((reply for reply in replies if reply.status != 429), replies[0])


def _stops_coming(target: Target) -> Reply:
    """Wait for the answer to a body that the client does not finish."""
    with _unfinished_body(target, target.token, 100) as line:
        return _answer(line, within_s=MAX_BODY_S + LATE_S)


def _hurried(target: Target) -> Reply:
    """Ask for a long search within a second; `Target.ask` says if the answer is late."""
    history.plan(target)  # a server's first search also waits for its processes to start
    return target.post("/v1/plans", {**_long_search(0), "deadline_s": 1.0})


def _signal_during_searches(target: Target) -> Reply:
    """End a server of its own during two long searches: each is answered, or is to come again."""
    bodies = [_long_search(seed) for seed in range(2)]
    small = {"profile": example_profile(), "cluster": "2x24GB"}
    with tempfile.TemporaryDirectory(prefix="stagewright-hostile-") as name:
        with attacked(Path(name)) as scene, ThreadPoolExecutor() as pool:
            asked = [pool.submit(scene.target.post, "/v1/plans", body) for body in bodies]
            while b"solver_running 2.0" not in scene.target.ask("GET", "/metrics").body:
                if any(future.done() for future in asked):
                    return _wrong("a search was too short to be cut off")
                time.sleep(0.05)
            scene.process.terminate()
            time.sleep(0.5)
            asked.append(pool.submit(scene.target.post, "/v1/plans", small))
            replies = [future.result() for future in asked]
            try:
                scene.process.wait(ENDED_WITHIN_S)
            except subprocess.TimeoutExpired:
                return _wrong(f"the server lives {ENDED_WITHIN_S:g} s after the signal")
        target.late.extend(scene.target.late)
    if scene.process.returncode:
        return _wrong(f"the server ended with {scene.process.returncode}")
    wrongs = scene.watched.wrongs()
    for reply in replies[: len(bodies)]:
        is_told = reply.kind == "application/problem+json" and "retry-after" in reply.headers
        if reply.status != 201 and not (reply.status == 503 and is_told):
            wrongs.append(f"answered {reply.status} {reply.kind} without a time to come back")
    if replies[-1].status not in (0, 201, 503):  # it may listen no more
        wrongs.append(f"after the signal, answered {replies[-1].status}")
    return _wrong("; ".join(wrongs)) if wrongs else replies[0]


def _long_search(seed: int) -> dict[str, object]:
    return {
        "profile": uneven_profile(1000, seed).model_dump(mode="json"),
        "cluster": "64x8x32GB",
        "options": {"num_microbatches": 1024, "max_replicas": None, "recompute": "auto"},
    }


@contextmanager
def _unfinished_job(target: Target, token: str) -> Iterator[str]:
    """Yield the path of the events of a job that lasts until the end of the block."""
    body = {
        "model": {"family": "mlp"},
        "sample": {"inputs": {"input": {"shape": [2, 64]}}},
        "profiling": {"budget_s": 60},
    }
    made = target.post("/v1/profile-jobs", body, token=token, headers={"Cache-Control": "no-cache"})
    job = f"/v1/jobs/{made.json()['id']}"
    try:
        yield f"{job}/events"
    finally:
        target.ask("POST", f"{job}/cancel", token=token)


def _open(stack: ExitStack, target: Target, path: str, token: str) -> Reply:
    """Ask for a stream that stays open until the stack is closed, and read its head alone."""
    line = stack.enter_context(_line(target))
    line.sendall(_head(target, "GET", path, token))
    return _answer(line)


def _once(target: Target, path: str) -> Reply:
    with ExitStack() as stack:
        return _open(stack, target, path, target.token)


@contextmanager
def _unfinished_body(target: Target, token: str, num_bytes: int) -> Iterator[socket.socket]:
    """Yield a line on which one MiB of a body is still to come."""
    more = f"Content-Type: {JSON}\r\nContent-Length: {num_bytes + 2**20}\r\n"
    with _line(target) as line:
        with suppress(OSError):  # it was refused and closed already
            line.sendall(_head(target, "POST", "/v1/plans", token, more) + b" " * num_bytes)
        yield line


def _line(target: Target, receives: int = 0) -> socket.socket:
    line = socket.socket()
    if receives:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    line.settimeout(ANSWERED_WITHIN_S)
    line.connect((target.host, target.port))
    return line


def _head(target: Target, method: str, path: str, token: str, more: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n"
        f"Authorization: Bearer {token}\r\n{more}\r\n"
    ).encode()


def _answer(line: socket.socket, within_s: float = ANSWERED_WITHIN_S) -> Reply:
    """Return the first answer on a line, or the status 0 if there is none in time."""
    line.settimeout(within_s)
    said, length = b"", 0
    with suppress(OSError):
        while b"\r\n\r\n" not in said or len(said) < said.index(b"\r\n\r\n") + 4 + length:
            piece = line.recv(65536)
            if not piece:
                break
            said += piece
            if found := re.search(rb"(?i)\r\ncontent-length: (\d+)\r\n", said):
                length = int(found[1])
    head, _, body = said.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.1 (\d{3})", head)
    kind = re.search(rb"(?i)\r\ncontent-type: ([^\r\n]*)", head)
    told = kind[1].decode("latin-1") if kind else ""
    return Reply(int(status[1]) if status else 0, told, body[:length])


def _others_wait(target: Target) -> Reply | None:
    """Return what is wrong if another request is not answered at once."""
    begin = time.monotonic()
    other = target.ask("GET", "/v1/plans?limit=1", token=target.other_token)
    took_s = time.monotonic() - begin
    if other.status == 200 and took_s <= OTHERS_WAIT_S:
        return None
    return _wrong(f"others wait {took_s:.1f} s for a {other.status}")


def _key(target: Target, token: str, *scopes: str) -> str:
    wanted = {"name": "one of many", "scopes": scopes or ("read", "plan")}
    return str(target.post("/v1/api-keys", wanted, token=token).json()["secret"])


def _signed_in(line: http.client.HTTPConnection, token: str) -> str:
    """Return the cookie of a new session."""
    return _browse(line, "POST", "/sign-in", {"token": token}).headers["set-cookie"].split(";")[0]


def _browse(
    line: http.client.HTTPConnection,
    method: str,
    path: str,
    fields: dict[str, str] | None = None,
    cookie: str = "",
) -> Reply:
    """Ask for a page, or send a form, as a page of the server would."""
    headers = {
        "Origin": f"http://{line.host}:{line.port}",
        "Content-Type": "application/x-www-form-urlencoded",
        "Cookie": cookie,
    }
    line.request(method, path, urlencode(fields or {}), headers)
    answer = line.getresponse()
    told = {name.lower(): value for name, value in answer.getheaders()}
    return Reply(answer.status, told.get("content-type", ""), answer.read(), told)


def _wrong(why: str) -> Reply:
    return Reply(WRONG, body=why.encode())
