"""One live service for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stagewright import Client
from tests.live_service import TOKEN, live_service


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with live_service() as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with Client(server, TOKEN) as opened:
        yield opened
