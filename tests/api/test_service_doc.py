"""What docs/service.md tells people to send is answered as it says."""

from __future__ import annotations

import json
import re

import pytest

CALL = re.compile(r"-d '(\{.*?\})' \$URL(/\S+)")
ROUTE = re.compile(r"`(?:GET|POST) (/v1/[^`?]*)")


@pytest.fixture
def page(repository):
    return (repository / "docs" / "service.md").read_text()


def test_every_request_shown_is_answered(client, page):
    calls = CALL.findall(page)
    assert calls
    for body, path in calls:
        response = client.post(path, json=json.loads(body))
        assert response.status_code == 201, response.text


def test_every_route_named_exists(client, page):
    paths = client.get("/openapi.json").json()["paths"]
    known = {re.sub(r"{\w+}", "{id}", path) for path in paths}
    named = set(ROUTE.findall(page))
    assert len(named) > 8
    assert named <= known
