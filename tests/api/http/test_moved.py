"""Paths of the first release lead to what replaced them."""

from __future__ import annotations

import io

import pytest

from stagewright.api.routes.moved import MOVED


@pytest.fixture
def planned(client, profile):
    return client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"}).json()


def test_every_old_path_redirects_with_its_method_and_query(client, planned):
    place = {"plan_id": planned["id"], "profile_id": planned["profile_id"], "family": "gpt2"}
    for old, (method, new) in MOVED.items():
        path = old.format(**place)
        answer = client.request(
            method, path, params={"format": "svg"}, content=b"x", follow_redirects=False
        )
        assert answer.status_code == 308, old
        expected = new.format(query="format=svg", **place)
        assert answer.headers["Location"] == expected


def test_old_paths_answer_as_before_once_redirects_are_followed(client, planned):
    base = f"/v1/plans/{planned['id']}"
    for name in ("schedule", "timeline"):
        assert client.get(f"{base}/{name}").json() == client.get(f"{base}?format={name}").json()
    drawing = client.get(f"{base}/export?format=svg")
    assert drawing.headers["Content-Disposition"].endswith('.svg"')
    rows = client.get(f"/v1/profiles/{planned['profile_id']}/export?format=csv").text
    assert len(rows.strip().splitlines()) == 5
    assert client.get("/v1/accelerators").json()["accelerators"]
    assert client.get("/v1/model-families").json()["model_families"]
    archive = {"content": io.BytesIO(b"no archive"), "headers": {"Content-Type": "application/zip"}}
    refused = client.post("/v1/graphs/pt2", **archive)
    assert "torch.export.save" in refused.json()["detail"]


def test_an_id_with_a_line_break_does_not_split_the_header(client):
    path = "/v1/plans/x%0D%0ASet-Cookie:%20a=b/schedule"
    answer = client.get(path, follow_redirects=False)
    assert answer.headers["Location"].startswith("/v1/plans/x%0D%0A")
    assert "Set-Cookie" not in answer.headers
