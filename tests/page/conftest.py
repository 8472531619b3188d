"""A server in a thread of this process, and Debian's Chromium driven against it."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.http.examples import example_profile
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.database import IN_MEMORY
from tests.api.job_children import measuring
from tests.shared_solvers import shared_solvers

TOKEN = "a-token-for-pages"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking")


@pytest.fixture(autouse=True, scope="session")
def _share_solvers() -> Iterator[None]:
    """Plan in processes, as by default: those that one service leaves are the next one's."""
    with shared_solvers():
        yield


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """For a module: while it runs no other event loop can, and other modules' tests run theirs."""
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


@dataclass
class Served:
    """The running service."""

    url: str
    app: Any

    def client(self) -> TestClient:
        """Asks the same application directly, as programs do."""
        client = TestClient(self.app, base_url="http://localhost")
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        return client


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    listening = socket.create_server(("127.0.0.1", 0))
    measuring_child = (sys.executable, "-c", measuring(example_profile(), seconds=0.4))
    app = create_app(
        ServerSettings(
            token=TOKEN,
            database=IN_MEMORY,
            scheduler="threads",
            measure_command=measuring_child,
        )
    )
    config = uvicorn.Config(app, log_level="critical", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.01)
    yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", app)
    server.should_exit = True
    thread.join(timeout=20)
    listening.close()


@dataclass
class Watched:
    """A page, and what must not happen on it."""

    page: Page
    url: str
    wrong: list[str] = field(default_factory=list)

    def check(self) -> None:
        """No console error, no violation of the policy, nothing asked of another machine."""
        assert self.wrong == []


@pytest.fixture(scope="module")
def signed_in(chromium: Browser, served: Served) -> Iterator[Watched]:
    """One page for a module, signed in by the printed address; what it does is watched."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    watched = Watched(page, served.url)

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            watched.wrong.append(f"{page.url}: {message.text}")

    def on_request(request: Any) -> None:
        if not request.url.startswith((served.url, "data:", "blob:", "file:")):
            watched.wrong.append(f"asked {request.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: watched.wrong.append(f"{page.url}: {error}"))
    page.on("request", on_request)
    page.set_default_timeout(60_000)
    page.goto(f"{served.url}/sign-in#token={TOKEN}")
    page.wait_for_url("**/plans")
    yield watched
    context.close()
