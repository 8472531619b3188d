"""Plans in the forms of other runtimes over HTTP."""

import pytest

import stagewright
from stagewright.formats.runtimes.registry import TARGETS, export


@pytest.fixture
def created(client, profile):
    options = {"num_stages": 2, "schedule": "gpipe", "tied": "together"}
    request = {"profile": profile, "cluster": "2xcpu", "options": options}
    return client.post("/v1/plans", json=request).json()


def test_a_plan_is_exported_as_the_library_exports_it(client, created):
    plan = stagewright.Plan.model_validate(created["plan"])
    found = client.get(f"/v1/plans/{created['id']}/exports/torch")
    assert found.status_code == 200, found.text
    assert found.text == export(plan, "torch").text
    assert 'filename="torch_pipeline.py"' in found.headers["Content-Disposition"]
    assert found.headers["Content-Type"].startswith("text/plain")
    address = f"/v1/plans/{created['id']}/exports/torch?file=schedule.csv"
    assert client.get(address).text == export(plan, "torch").attachments["schedule.csv"]


def test_what_cannot_be_exported_says_why(client, created):
    refused = client.get(f"/v1/plans/{created['id']}/exports/vllm")
    assert refused.status_code == 422
    assert "only runs inference (stagewright plan --for vllm" in refused.json()["detail"]
    unknown = client.get(f"/v1/plans/{created['id']}/exports/megatrn")
    assert unknown.status_code == 422
    assert "did you mean 'megatron'" in unknown.json()["detail"]
    lacking = client.get(f"/v1/plans/{created['id']}/exports/torch?file=other.csv")
    assert lacking.status_code == 422
    assert "schedule_comms.csv" in lacking.json()["detail"]
    assert client.get(f"/v1/plans/plan_{'0' * 32}/exports/torch").status_code == 404


def test_the_page_of_a_plan_offers_every_target(client, created):
    page = client.get(f"/plans/{created['id']}").text
    for name in TARGETS:
        assert f"/v1/plans/{created['id']}/exports/{name}" in page
