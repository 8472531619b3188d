"""Compression of large answers."""


def test_large_answers_are_compressed_and_known_by_their_tags(make_client, profile):
    service = make_client()
    body = {"profile": profile, "cluster": "2xcpu", "options": {"num_microbatches": 64}}
    plan_id = service.post("/v1/plans", json=body).json()["id"]
    for path in (
        f"/v1/plans/{plan_id}/view",
        f"/v1/plans/{plan_id}?format=timeline",
        "/static/plan.js",
    ):
        first = service.get(path)
        assert first.headers["Content-Encoding"] == "gzip"
        again = service.get(path, headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["ETag"] == first.headers["ETag"]
        plain = service.get(path, headers={"Accept-Encoding": "identity"})
        assert plain.content == first.content
        assert "Content-Encoding" not in plain.headers
