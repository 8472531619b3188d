"""A service in this process, with the real planner and a store in memory."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.examples import example_profile
from stagewright.api.settings import IN_MEMORY, Settings

TOKEN = "a-token-for-tests"


@pytest.fixture
def token() -> str:
    return TOKEN


@pytest.fixture
def profile() -> dict[str, Any]:
    """A profile as JSON, to be changed at will."""
    return copy.deepcopy(example_profile())


@pytest.fixture
def child() -> Callable[[str], tuple[str, ...]]:
    """A stand-in for the measuring child: a Python program given as text."""
    return lambda program: (sys.executable, "-c", program)


@pytest.fixture
def make_client(token: str) -> Iterator[Callable[..., TestClient]]:
    """Clients of services with settings of their own; bugs come back as responses."""
    with ExitStack() as stack:

        def make(*, store: Any = None, authorized: bool = True, **settings: Any) -> TestClient:
            app = create_app(
                Settings(**{"token": token, "database": IN_MEMORY, **settings}), store=store
            )
            client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
            if authorized:
                client.headers["Authorization"] = f"Bearer {token}"
            return stack.enter_context(client)

        yield make


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client()
