"""Time the page in Debian's Chromium: first paint, a what-if, the largest plans.

A server of its own answers; the browser is driven by playwright. Exits 1 if a limit is exceeded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from statistics import median
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from stagewright.core.graph.graph import Boundary, Layer
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.profile.profile import LayerProfile, Profile, Timing

LIMITS_S = {"first paint": 1.0, "what if": 0.2, "open": 3.0}
REPEATS = 9
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """The service as a process of its own."""

    def __init__(self, folder: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stagewright.api", "--port", "0", "--database", ":memory:"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            text=True,
        )
        assert self.process.stdout is not None
        announced = json.loads(self.process.stdout.readline())
        self.url, self.token = announced["url"], announced["token"]

    def ask(self, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        sent = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, sent, headers)
        with DIRECT.open(request, timeout=120) as answer:
            return json.load(answer)


def blocks(count: int) -> dict[str, Any]:
    """Return a profile of equal blocks of ten layers."""
    hidden = TensorSpec(name="hidden", shape=(8, 1024), dtype="float16", requires_grad=True)
    layers = tuple(
        LayerProfile(
            layer=Layer(
                name=f"h.{index // 10}.part{index % 10}",
                parameter_bytes=2**20,
                cost_class=str(index % 10),
            ),
            forward=Timing(median_s=1e-3 + 1e-4 * (index % 10)),
            backward=Timing(median_s=2e-3 + 2e-4 * (index % 10)),
            saved_activation_bytes=2**18,
        )
        for index in range(count)
    )
    gaps = tuple(Boundary(after=index, tensors=(hidden,)) for index in range(count - 1))
    profile = Profile(model=f"{count} layers", inputs=(hidden,), layers=layers, boundaries=gaps)
    return profile.model_dump(mode="json")


def requests() -> dict[str, dict[str, Any]]:
    """Return what is planned, by name."""
    return {
        "GPT-2 XL on 8 devices": {
            "model": "gpt2-xl",
            "cluster": "8xH100",
            "options": {"num_microbatches": 32},
        },
        "64 stages of 512 micro-batches": {
            "profile": blocks(128),
            "cluster": "64x80GB",
            "options": {"num_microbatches": 512, "num_stages": 64},
            "deadline_s": 15,
        },
        "10,000 layers on 8 devices": {
            "profile": blocks(10_000),
            "cluster": "8x80GB",
            "options": {"num_microbatches": 32, "num_stages": 8},
            "deadline_s": 15,
        },
    }


def opened_s(browser: Browser, server: Server, path: str) -> tuple[float, float, Page]:
    """From asking to the first paint, and to charts and tables; in a new session."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(f"{server.url}/sign-in#token={server.token}")
    page.wait_for_url("**/plans")
    start = time.perf_counter()
    page.goto(server.url + path)
    page.wait_for_selector("#layers tbody tr")
    whole_s = time.perf_counter() - start
    paint = "performance.getEntriesByType('paint').map((entry) => entry.startTime / 1000)"
    return min(page.evaluate(paint), default=whole_s), whole_s, page


def drawn_s(page: Page) -> float:
    """From asking for a page to the last of its step, where that comes after the rest."""
    page.wait_for_selector("body[data-whole]")
    return float(page.evaluate("performance.now() / 1000"))


WATCH = """() => {
    window.taken = [];
    let pressed = 0;
    addEventListener("keydown", (event) => { pressed = event.timeStamp; }, true);
    new MutationObserver(() => requestAnimationFrame(() => setTimeout(() => {
        window.taken.push((performance.now() - pressed) / 1000);
        document.body.dataset.taken = String(window.taken.length);
    }))).observe(document.body, { attributeFilter: ["data-priced"] });
}"""
"""From a key to the frame after the answer has been drawn, by the browser's own clock."""


def what_if_s(page: Page) -> float:
    """From a key pressed on a cut to the new numbers on the screen, to and fro."""
    page.evaluate(WATCH)
    page.locator(".cut").first.focus()
    for turn in range(REPEATS):
        page.keyboard.press("ArrowRight" if turn and turn % 2 == 0 else "ArrowLeft")
        page.wait_for_selector(f"body[data-taken='{turn + 1}']")
    return median(page.evaluate("window.taken"))


def main() -> int:
    """Print what was measured, and say whether it is within the limits."""
    failed = False
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = Server(folder)
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        try:
            for name, body in requests().items():
                made = server.ask("/v1/plans", body)
                paint_s, whole_s, page = opened_s(browser, server, f"/plans/{made['id']}")
                rows = {"first paint": paint_s, "open": whole_s}
                if name.startswith("GPT"):
                    rows["what if"] = what_if_s(page)
                elif name.startswith("64"):
                    rows["step drawn"] = drawn_s(page)
                for what, value_s in rows.items():
                    is_limited = name.startswith("GPT") or what == "open"
                    over = is_limited and value_s > LIMITS_S[what]
                    failed |= over
                    print(f"{name:32} {what:12} {value_s * 1e3:6.0f} ms{'  TOO LONG' * over}")
        finally:
            browser.close()
            server.process.terminate()
            server.process.wait()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
