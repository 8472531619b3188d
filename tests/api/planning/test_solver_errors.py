"""What a solver process refuses has a status of its own, whichever read it was asked for.

Cause: 8 of 13 exports of a plain plan were answered 503, "killed, most likely for lack of memory".
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import pytest

from stagewright.api.errors import SolverEnded
from stagewright.api.planning.solver_pool import Solver
from stagewright.core.errors import ForeignError, InvalidInput
from stagewright.formats.runtimes.registry import TARGETS
from tests.errors.raised import die_once, process_id, raise_unpicklable


@pytest.fixture
def plan_id(client, profile):
    options = {"num_microbatches": 4}
    request = {"profile": profile, "cluster": "2x24GB", "options": options}
    return client.post("/v1/plans", json=request).json()["id"]


@pytest.fixture
def infeasible_id(client, profile):
    return client.post("/v1/plans", json={"profile": profile, "cluster": "2x0.001GB"}).json()["id"]


def assert_problem(response, status, kind):
    assert response.status_code == status, response.text
    assert response.json()["kinds"][0] == kind


@pytest.mark.parametrize("target", TARGETS)
def test_an_export_is_made_or_refused_by_name(client, plan_id, target):
    answer = client.get(f"/v1/plans/{plan_id}/exports/{target}")
    if answer.status_code == 200:
        assert answer.text
        return
    assert_problem(answer, 422, "Inexpressible")
    for rejection in answer.json()["details"]["rejections"]:
        assert rejection["remedy"] in answer.json()["detail"]


def test_most_targets_refuse_a_plain_training_plan(client, plan_id):
    answers = {
        target: client.get(f"/v1/plans/{plan_id}/exports/{target}").status_code
        for target in TARGETS
    }
    refused = {target for target, status in answers.items() if status == 422}
    assert {"vllm", "sglang", "tensorrt-llm", "llama.cpp", "maxtext", "deepspeed"} <= refused
    assert answers["torch"] == 200


@pytest.mark.parametrize(
    "path", ["exports/torch", "exports/vllm", "?format=svg", "?format=schedule", "?format=balance"]
)
def test_an_infeasible_plan_has_no_other_form(client, infeasible_id, path):
    joined = f"/v1/plans/{infeasible_id}" + ("" if path.startswith("?") else "/") + path
    assert_problem(client.get(joined), 409, "NoPlan")


def test_a_file_that_no_form_has_is_named(client, plan_id):
    answer = client.get(f"/v1/plans/{plan_id}/exports/torch?file=other.csv")
    assert_problem(answer, 422, "InvalidInput")


def test_a_step_too_long_to_draw_is_refused(client, profile):
    options = {"num_microbatches": 2**16}
    request = {"profile": profile, "cluster": "1x80GB", "options": options}
    made = client.post("/v1/plans", json=request)
    assert made.status_code == 201, made.text
    address = f"/v1/plans/{made.json()['id']}?format="
    for form in ("schedule", "timeline", "svg", "chrome_trace"):
        answer = client.get(address + form)
        assert_problem(answer, 422, "InvalidInput")
        assert "at most 100000 are exported" in answer.json()["detail"]
    assert client.get(f"{address}plan").status_code == 200


def test_a_split_that_cannot_be_priced_is_refused(client, profile):
    request = {"profile": profile, "balance": [1, 9], "cluster": "2x24GB"}
    assert_problem(client.post("/v1/simulations", json=request), 422, "InvalidInput")


def test_a_file_that_is_no_document_is_refused_on_its_page(client):
    answer = client.post("/plans/file", content=b'{"schema_version": "other/1"}')
    assert answer.status_code == 422


def play(main):
    async def started():
        solver = Solver(1)
        try:
            return await main(solver)
        finally:
            solver.close()

    return asyncio.run(started())


def test_a_foreign_error_costs_no_process_and_tells_where_it_arose():
    async def main(solver):
        process = await solver.run(process_id)
        with pytest.raises(ForeignError, match="Unpicklable: one and two") as caught:
            await solver.run(raise_unpicklable)
        assert "in raise_unpicklable" in caught.value.remote_traceback
        assert await solver.run(process_id) == process

    play(main)


def test_a_read_whose_process_ends_is_asked_of_a_fresh_one_once(tmp_path):
    async def main(solver):
        process = await solver.run(process_id)
        assert await solver.run(partial(die_once, str(tmp_path / "dead"))) != process
        with pytest.raises(SolverEnded, match="the solver process ended with exit code 1;"):
            await solver.run(partial(os._exit, 1))

    play(main)


def test_a_killed_process_is_not_said_to_have_lacked_memory():
    async def main(solver):
        with pytest.raises(SolverEnded, match=r"was ended by SIGKILL \(signal 9\)") as caught:
            await solver.run(partial(signal.raise_signal, signal.SIGKILL))
        assert "memory" not in str(caught.value)

    play(main)


def test_work_beyond_the_memory_of_a_process_is_the_requests_fault():
    async def main(solver):
        with pytest.raises(InvalidInput, match="GiB this server gives it"):
            await solver.run(partial(bytearray, 2**40))

    play(main)
