"""The measuring child, seen from a job's worker: its errors, its deadline, its end.

Stand-ins for the child, small Python programs, misbehave as a real one may.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from stagewright.api.http.examples import measure_example
from stagewright.api.jobs.measurements import run_measurement as measure_for_job
from stagewright.api.jobs.messages import (
    CPU,
    ProfileMeasured,
    TaskFailed,
    WorkerLost,
    WorkerProgress,
    WorkerTask,
)
from stagewright.api.jobs.outcome import error_from_failure
from stagewright.api.jobs.workers import ThreadWorkers
from stagewright.api.model_sources.measure import MeasuringSetup
from stagewright.core.errors import (
    CaptureError,
    DeadlineExceeded,
    InvalidInput,
    MeasurementError,
    OutOfMemory,
)
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.requests import MeasureRequest

NOISE = "import json, os, subprocess, sys, time; sys.stderr.write('[W] noise of torch\\n')\n"


@pytest.fixture
def request_to_measure() -> MeasureRequest:
    example = measure_example()
    del example["cluster"]
    return MeasureRequest.model_validate(example)


@pytest.fixture
def task(child, request_to_measure):
    def task(program: str, deadline_s: float = 20.0, key: str = "run") -> WorkerTask:
        setup = MeasuringSetup(child(NOISE + program), deadline_s, sandbox="off")
        return WorkerTask(key, request_to_measure.model_dump_json(), CPU, setup)

    return task


@pytest.fixture
def measure(task):
    def measure(program: str, deadline_s: float = 20.0) -> Profile:
        outcome = measure_for_job(task(program, deadline_s), lambda _: None, lambda: False)
        if isinstance(outcome, ProfileMeasured):
            return Profile.model_validate_json(outcome.profile_json)
        assert isinstance(outcome, TaskFailed)
        raise error_from_failure(outcome)

    return measure


def failing(error: str, message: str, **further: object) -> str:
    line = json.dumps({"kinds": [error], "message": message, "details": further})
    return f"sys.stderr.write('Traceback: secret\\n' + {line!r} + '\\n'); sys.exit(1)"


def test_the_child_reads_the_request_and_its_profile_comes_back(
    measure, profile, request_to_measure
):
    program = (
        f"profile = json.loads({json.dumps(profile)!r})\n"
        "request = json.load(sys.stdin)\n"
        "profile['model'] = json.dumps(request)\n"
        'sys.stderr.write(\'{"done": 1, "total": 1, "layer": "0"}\\n\')\n'
        "json.dump(profile, sys.stdout)"
    )
    measured = measure(program)
    assert MeasureRequest.model_validate_json(measured.model) == request_to_measure


@pytest.mark.parametrize("error", [InvalidInput, CaptureError, MeasurementError])
def test_an_error_the_child_reports_is_raised_with_its_message_alone(measure, error):
    with pytest.raises(error) as caught:
        measure(failing(error.__name__, "blocks.3 gave no gradient"))
    assert str(caught.value) == "blocks.3 gave no gradient"


def test_the_field_the_child_blames_is_kept(measure):
    with pytest.raises(InvalidInput, match="not 'foo'") as caught:
        measure(failing("InvalidInput", "not 'foo'", field="/sample/inputs"))
    assert caught.value.field == "/sample/inputs"


@pytest.mark.parametrize("field", [None, 3, ["/sample"]])
def test_what_is_no_pointer_is_no_field(measure, field):
    with pytest.raises(InvalidInput) as caught:
        measure(failing("InvalidInput", "wrong", field=field))
    assert caught.value.field is None


@pytest.mark.parametrize(
    "program",
    [
        "sys.exit(3)",
        "raise RuntimeError('secret path')",
        failing("KeyError", "secret"),
        "sys.stderr.write('[1, 2]\\n'); sys.exit(1)",
        'sys.stderr.write(\'{"kinds": 1, "message": []}\\n\'); sys.exit(1)',
        "sys.stderr.buffer.write(b'\\xff\\xfe'); sys.exit(1)",
    ],
)
def test_a_child_that_fails_without_a_word_tells_nothing(measure, program):
    """What drove it is the caller's model, so it is not a failure of the server."""
    with pytest.raises(MeasurementError, match="the server's log has the details") as caught:
        measure(program)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "program", ["sys.stdout.write('no profile')", "pass", "sys.stdout.write('{}')"]
)
def test_a_child_without_a_profile_is_said(measure, program):
    with pytest.raises(MeasurementError, match="no valid profile"):
        measure(program)


def test_a_killed_child_is_taken_for_out_of_memory(measure):
    with pytest.raises(MeasurementError, match="SIGKILL"):
        measure("os.kill(os.getpid(), 9)")


def test_where_a_child_failed_goes_to_the_log_and_not_what_it_says(measure, caplog):
    with pytest.raises(MeasurementError):
        measure("json.loads('noise of torch')")
    assert "decoder.py" in caplog.text
    assert "noise of torch" not in caplog.text


def test_secrets_are_not_handed_on(measure, profile, monkeypatch):
    monkeypatch.setenv("STAGEWRIGHT_TOKEN", "secret")
    monkeypatch.setenv("STAGEWRIGHT_DATABASE", "postgresql://me:secret@host/name")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    profile["notes"] = ["?"]
    names = {"STAGEWRIGHT_TOKEN", "STAGEWRIGHT_DATABASE", "OMP_NUM_THREADS"}
    program = (
        f"profile = json.loads({json.dumps(profile)!r})\n"
        f"profile['notes'] = sorted(set(os.environ) & {names!r})\n"
        "json.dump(profile, sys.stdout)"
    )
    assert measure(program).notes == ("OMP_NUM_THREADS",)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def family(tmp_path: Path) -> str:
    """A child with a child of its own; both write down who they are, then sleep."""
    return (
        "neighbour = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pids.part')!r}, 'w').write(f'{{os.getpid()}} {{neighbour.pid}}')\n"
        f"os.rename({str(tmp_path / 'pids.part')!r}, {str(tmp_path / 'pids')!r})\n"
        "time.sleep(600)"
    )


def test_after_the_deadline_the_child_and_its_children_are_dead(measure, tmp_path):
    with pytest.raises(DeadlineExceeded, match=r"1\.5 s"):
        measure(family(tmp_path), deadline_s=1.5)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert wait_for(lambda: not any(map(is_running, pids)))


def test_stopping_kills_the_child(task, tmp_path):
    begun = (tmp_path / "pids").exists
    assert isinstance(measure_for_job(task(family(tmp_path)), lambda _: None, begun), WorkerLost)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert wait_for(lambda: not any(map(is_running, pids))), "killed, but gone a moment later"


def test_progress_and_memory_that_ran_out_come_back_with_their_numbers(task):
    told: list[object] = []
    program = (
        'sys.stderr.write(\'{"done": 1, "total": 9, "layer": "blocks.1"}\\n\')\n'
    ) + failing("OutOfMemory", "out of memory in blocks.1", layer="blocks.1", required_bytes=30,
                available_bytes=20)  # fmt: skip
    outcome = measure_for_job(task(program), told.append, lambda: False)
    assert told == [WorkerProgress(1, 9, "blocks.1")]
    assert isinstance(outcome, TaskFailed)
    error = error_from_failure(outcome)
    assert isinstance(error, OutOfMemory)
    assert (error.layer, error.required_bytes, error.available_bytes) == ("blocks.1", 30, 20)


def test_one_measurement_at_a_time(task, profile, tmp_path):
    """A child fails if it finds another one's lock file."""
    program = (
        f"lock = os.open({str(tmp_path / 'lock')!r}, os.O_CREAT | os.O_EXCL)\n"
        "time.sleep(0.1)\n"
        f"os.unlink({str(tmp_path / 'lock')!r})\n"
        f"sys.stdout.write({json.dumps(profile)!r})"
    )
    workers, told, done = ThreadWorkers(), [], threading.Semaphore(0)

    def tell(message: object) -> None:
        told.append(message)
        if isinstance(message, ProfileMeasured | TaskFailed | WorkerLost):
            done.release()

    for number in range(3):
        workers.submit(task(program, key=f"run-{number}"), tell)
    for _ in range(3):
        assert done.acquire(timeout=20)
    workers.close()
    assert sum(isinstance(message, ProfileMeasured) for message in told) == 3, told


def test_memory_running_out_ends_the_child_not_the_server(measure, profile):
    own = Path("/proc/self/oom_score_adj")
    if not own.exists() or not os.access(own, os.W_OK):
        pytest.skip("the kernel has no out-of-memory score")
    program = (
        f"profile = json.loads({json.dumps(profile)!r})\n"
        "sys.stdin.read()\n"
        "profile['notes'] = [open('/proc/self/oom_score_adj').read().strip()]\n"
        "json.dump(profile, sys.stdout)"
    )
    assert measure(program).notes == ("1000",)
