"""Every error of the library survives every way into another process.

Cause: an error whose constructor takes more than its message could be pickled and not unpickled.
That ended the solver process which raised it, and 8 of 13 exports of a plain plan were answered
503, "killed for lack of memory".
"""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from functools import partial

import pytest

from stagewright.api.http.problems import Problem, problem_of_error
from stagewright.api.jobs.messages import ERRORS, TaskFailed
from stagewright.api.jobs.outcome import error_from_failure, problem_json, read_problem
from stagewright.api.planning.solver_pool import Solver
from stagewright.api.sandbox.child_messages import CHILD_ERRORS, error_of
from stagewright.cli.support import launch_ranks
from stagewright.client.errors import KNOWN, error_from_problem
from stagewright.core import errors
from stagewright.core.errors import (
    ErrorRecord,
    ForeignError,
    InvalidInput,
    MeasurementError,
    RankFailed,
    StagewrightError,
)
from stagewright.core.service.problems import ProblemDocument
from stagewright.profiler import worker_protocol
from stagewright.profiler.links import launch_local
from stagewright.runtime import elastic
from stagewright.runtime.checkpoint_files import rank_agreement
from stagewright.runtime.inference.transport import MicrobatchTransport
from stagewright.runtime.rpc import calls
from tests.errors.every_error import details_of, error_classes, make_error
from tests.errors.raised import die_once, process_id, raise_error, raise_unpicklable

EVERY = pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)


def assert_same(found, sent, message=None):
    assert type(found) is type(sent)
    assert str(found) == (message or str(sent))
    assert details_of(found) == details_of(sent)
    assert found.__notes__ == sent.__notes__


def test_the_classes_are_found():
    names = {kind.__name__ for kind in error_classes()}
    assert {"Inexpressible", "StageError", "BalanceError", "KeyReused", "RankFailed"} <= names
    assert len(names) == len(error_classes()), "records name classes: each name stands for one"


@EVERY
def test_a_pickle_a_copy_and_a_record_hold_all_of_an_error(kind):
    error = make_error(kind)
    assert_same(pickle.loads(pickle.dumps(error)), error)
    assert_same(copy.deepcopy(error), error)
    record = json.loads(json.dumps(error.to_record().as_dict))
    assert_same(StagewrightError.from_record(record), error)
    assert_same(error.at("rank 3"), error, f"rank 3: {error}")


@EVERY
def test_a_class_that_the_reader_does_not_know_is_its_nearest_base(kind):
    record = make_error(kind).to_record()
    others = [each for each in error_classes() if each is not kind and each is not StagewrightError]
    found = StagewrightError.from_record(record, others)
    bases = [base for base in kind.__mro__[1:] if issubclass(base, StagewrightError)]
    assert type(found) is (bases[0] if bases else StagewrightError)
    assert str(found) == record.message


def test_a_solver_process_hands_on_every_error_and_lives(tmp_path):
    async def main():
        solver = Solver(1)
        try:
            process = await solver.run(process_id)
            for kind in error_classes():
                error = make_error(kind)
                with pytest.raises(StagewrightError) as caught:
                    await solver.run(partial(raise_error, error))
                assert_same(caught.value, error)
            with pytest.raises(ForeignError, match="Unpicklable: one and two") as caught:
                await solver.run(raise_unpicklable)
            assert "in raise_unpicklable" in caught.value.remote_traceback
            assert await solver.run(process_id) == process
            # The process dies under work that only reads: a fresh one is asked.
            assert await solver.run(partial(die_once, str(tmp_path / "dead"))) != process
        finally:
            solver.close()

    asyncio.run(main())


@EVERY
def test_a_confined_child_reports_the_errors_that_clients_may_see(kind, capsys):
    error = make_error(kind)
    worker_protocol.tell_error(error)
    found = error_of(1, capsys.readouterr().err.encode())
    if issubclass(kind, CHILD_ERRORS):
        nearest = next(base for base in kind.__mro__ if base in CHILD_ERRORS)
        assert type(found) is nearest
        shared = details_of(found).keys() & details_of(error).keys()
        assert {name: getattr(found, name) for name in shared} == {
            name: getattr(error, name) for name in shared
        }
        assert str(found) == str(error)
    else:
        assert type(found) is MeasurementError
        assert str(error) not in str(found)


@EVERY
def test_a_worker_sends_the_errors_that_clients_may_see(kind):
    error = make_error(kind)
    failure = TaskFailed(error.to_record())
    assert pickle.loads(pickle.dumps(failure)) == failure
    found = error_from_failure(failure)
    expected = next((base for base in kind.__mro__ if base in ERRORS), StagewrightError)
    assert type(found) is expected
    assert str(found) == str(error)


@EVERY
def test_a_problem_document_becomes_the_same_error_in_the_client(kind):
    error = make_error(kind)
    problem = problem_of_error(error)
    text = problem.document.model_dump_json(exclude_defaults=True, exclude_none=True)
    found = error_from_problem(ProblemDocument.model_validate_json(text))
    assert type(found) in KNOWN
    if not problem.document.kinds:
        assert str(error) not in text
        return
    nearest = next((base for base in kind.__mro__ if base in KNOWN), StagewrightError)
    if nearest is not StagewrightError:
        assert type(found) is nearest
        shared = details_of(found).keys() & details_of(error).keys()
        assert all(getattr(found, name) == getattr(error, name) for name in shared)
    assert problem.document.detail in str(found)
    stored = read_problem(problem_json(error))
    assert stored == problem.document


def test_a_problem_can_be_pickled_too():
    problem = Problem(409, "busy", "try again", headers={"Retry-After": "1"})
    found = pickle.loads(pickle.dumps(problem))
    assert (found.document, found.headers, found.kind) == (
        problem.document,
        {"Retry-After": "1"},
        "busy",
    )


@EVERY
def test_a_rank_of_the_command_line_leaves_its_error_in_a_file(kind, tmp_path, capsys):
    error = make_error(kind)
    launch_ranks.write_error(tmp_path, 2, error)
    found = launch_ranks._build_error(tmp_path, 1, "")
    if kind is RankFailed:  # other ranks' are told with it
        assert str(found) == f"training stopped:\n  rank 2: {error}"
    else:
        assert_same(found, error, f"rank 2: {error}")
    assert f"rank 2: {error}" in capsys.readouterr().err


@EVERY
def test_a_rank_that_measures_links_says_its_error_in_a_line(kind, tmp_path):
    error = make_error(kind)
    line = json.dumps(error.to_record().as_dict)
    (tmp_path / "rank0.txt").write_text(f"[W] noise of torch\n{line}\n", encoding="utf-8")
    found = launch_local._failure(tmp_path, 1)
    if kind is RankFailed:
        assert str(found) == f"measuring links stopped:\n  {error}"
    else:
        assert_same(found, error)


@EVERY
def test_an_rpc_worker_returns_its_error_with_its_place(kind, monkeypatch):
    monkeypatch.setattr(calls, "worker_name", lambda: "worker1")
    error = make_error(kind)
    sent = calls.call_safely(raise_error, error)
    assert_same(pickle.loads(pickle.dumps(sent)), error, f"on worker1: {error}")


def test_an_rpc_worker_returns_an_error_of_the_model_with_its_traceback(monkeypatch):
    monkeypatch.setattr(calls, "worker_name", lambda: "worker1")
    sent = pickle.loads(pickle.dumps(calls.call_safely(raise_error, KeyError("layer"))))
    assert type(sent) is calls.StageError
    assert str(sent) == "on worker1: KeyError: 'layer'"
    assert "in raise_error" in sent.remote_traceback


@EVERY
def test_a_failed_micro_batch_carries_its_error(kind):
    error = make_error(kind)
    assert_same(pickle.loads(MicrobatchTransport(0, None, ())._pack_error(error)), error)


@EVERY
def test_ranks_that_agree_raise_the_error_of_one_of_them(kind):
    error = make_error(kind)
    sent = rank_agreement._to_sendable((None, error))
    assert_same(pickle.loads(pickle.dumps(sent))[1], error)


@EVERY
def test_a_rank_without_a_plan_is_told_why(kind):
    error = make_error(kind)

    class Store:
        def wait(self, keys, timeout):
            del keys, timeout

        def get(self, key):
            del key
            return json.dumps({"error": error.to_record().as_dict})

    with pytest.raises(StagewrightError) as caught:
        elastic._receive_plan(Store(), "plan", 1.0)
    assert_same(caught.value, error)


def test_a_record_of_another_release_is_read_as_far_as_it_goes():
    record = {
        "kinds": ["OfTomorrow", "OutOfMemory", "MeasurementError"],
        "message": "half \ud800",
        "details": {"layer": ["no name"], "required_bytes": -1, "colour": "red"},
        "more": 1,
    }
    found = StagewrightError.from_record(record)
    assert type(found) is errors.OutOfMemory
    assert (str(found), found.layer, found.required_bytes) == ("half ?", None, None)
    assert not hasattr(found, "colour")


@pytest.mark.parametrize("record", [{}, {"kinds": 1, "message": "m"}, {"kinds": [], "message": 1}])
def test_what_is_no_record_is_refused(record):
    with pytest.raises(ValueError, match="ErrorRecord"):
        StagewrightError.from_record(record)


def test_records_are_values():
    record = InvalidInput("no", field="/a").to_record()
    assert record == ErrorRecord(("InvalidInput",), "no", {"field": "/a"})
