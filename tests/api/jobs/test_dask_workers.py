"""Jobs on a real Dask worker, embedded as a server has it: what a puppet cannot show."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stagewright.api.errors import WorkersUnavailable
from stagewright.api.http.examples import example_profile, measure_example
from stagewright.api.jobs.dask_workers import (
    DaskWorkers,
    EmbeddedScheduler,
    RemoteScheduler,
    check_address,
)
from stagewright.api.jobs.messages import (
    CPU,
    ProfileMeasured,
    WorkerLost,
    WorkerMessage,
    WorkerProgress,
    WorkerStarted,
    WorkerTask,
)
from stagewright.api.model_sources.measure import MeasuringSetup
from stagewright.api.settings.settings import TlsFiles
from stagewright.core.errors import InvalidInput, Refused
from tests.api.job_children import measuring, sleeping

REQUEST = json.dumps(
    {name: value for name, value in measure_example().items() if name != "cluster"}
)

pytestmark = pytest.mark.filterwarnings("default")  # of Dask's own; its sockets outlive a kill


class Heard:
    """What a task's worker says, one after the other."""

    def __init__(self) -> None:
        self.said: queue.Queue[WorkerMessage] = queue.Queue()

    def next(self, kind: type[Any], timeout_s: float = 30.0) -> Any:
        """The next message of a kind; others before it are dropped."""
        end = time.monotonic() + timeout_s
        while True:
            told = self.said.get(timeout=max(0.01, end - time.monotonic()))
            if isinstance(told, kind):
                return told


@pytest.fixture(scope="module", autouse=True)
def _without_traces() -> Iterator[None]:
    """Dask sets OMP_NUM_THREADS and others, and extends the path; later tests must not see it."""
    variables, path = dict(os.environ), list(sys.path)
    yield
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = path


@pytest.fixture(scope="module")
def embedded(_without_traces: None) -> Iterator[DaskWorkers]:
    workers = DaskWorkers(EmbeddedScheduler("json", "error"))
    yield workers
    workers.close()


def submit(workers: DaskWorkers, program: str, key: str, needs: str = CPU) -> Heard:
    heard = Heard()
    setup = MeasuringSetup((sys.executable, "-c", program), 60.0, sandbox="off")
    workers.submit(WorkerTask(key, REQUEST, needs, setup), heard.said.put)
    return heard


@pytest.fixture
def run(embedded) -> Callable[..., Heard]:
    return functools.partial(submit, embedded)


def pid_in(path: Path) -> int:
    wait_for(lambda: path.exists() and bool(path.read_text()))
    return int(path.read_text())


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_progress_and_the_profile_come_back(run, embedded):
    heard = run(measuring(example_profile(), seconds=0.6), "good")
    assert isinstance(heard.next(WorkerStarted), WorkerStarted)
    assert heard.next(WorkerProgress) == WorkerProgress(0, 3, "blocks.0")
    assert json.loads(heard.next(ProfileMeasured).profile_json)["model"] == "Example"
    assert embedded.offers()[CPU] == 1


def test_stopping_a_task_kills_its_child_and_frees_the_worker(run, embedded, tmp_path):
    heard = run(sleeping(str(tmp_path / "pid")), "endless")
    never = run(sleeping(str(tmp_path / "never")), "never-begun")
    pid = pid_in(tmp_path / "pid")
    embedded.stop("never-begun")
    embedded.stop("endless")
    wait_for(lambda: not is_alive(pid))
    assert run(measuring(example_profile()), "next").next(ProfileMeasured)
    assert not (tmp_path / "never").exists()
    assert never.said.empty()
    assert not any(isinstance(told, WorkerLost) for told in list(heard.said.queue)), "nobody asks"


def test_a_killed_worker_is_told_and_the_next_one_goes_on(run, embedded, tmp_path):
    heard = run(sleeping(str(tmp_path / "pid")), "doomed")
    heard.next(WorkerStarted)
    child = pid_in(tmp_path / "pid")
    (worker,) = embedded._client.run(os.getpid).values()
    os.kill(worker, signal.SIGKILL)
    assert "lost" in heard.next(WorkerLost).why
    wait_for(lambda: not is_alive(child))
    again = run(measuring(example_profile()), "doomed-again")
    assert isinstance(again.next(ProfileMeasured | WorkerLost), ProfileMeasured | WorkerLost)


def test_the_worker_logs_as_its_server_does(embedded):
    """Cause: its warnings were bare lines among the JSON; also one that took a killed one's place.

    It is one by now, after the test above.
    """
    root = "__import__('logging').getLogger()"
    told = f"[type(each.formatter).__name__ for each in {root}.handlers], {root}.level"
    (found,) = embedded._connected().run(eval, told).values()
    assert found == (["ProcessorFormatter"], logging.ERROR)


def test_what_nobody_offers_waits(run, embedded):
    heard = run(measuring(example_profile()), "for-a-gpu", needs="H200")
    assert "H200" not in embedded.offers()
    time.sleep(0.2)
    assert heard.said.empty()
    embedded.stop("for-a-gpu")


@pytest.mark.usefixtures("_without_traces")
def test_closing_ends_what_runs(tmp_path):
    """The last of a server: its workers and their children go with it."""
    workers = DaskWorkers(EmbeddedScheduler("json", "error"))
    submit(workers, sleeping(str(tmp_path / "pid")), "last")
    pid = pid_in(tmp_path / "pid")
    workers.close()
    workers.close()
    wait_for(lambda: not is_alive(pid))
    with pytest.raises(WorkersUnavailable, match="stopping"):
        workers.offers()


TLS = TlsFiles(ca_file="ca.pem", cert="cert.pem")


@pytest.mark.parametrize(
    ("address", "tls", "error", "words"),
    [
        ("tls://10.0.0.5:8786", None, InvalidInput, "certificates"),
        ("tcp://10.0.0.5:8786", None, Refused, "is unencrypted"),
        ("tcp://10.0.0.5:8786", TLS, Refused, "is unencrypted"),
        ("http://10.0.0.5:8786", TLS, InvalidInput, "not a scheduler's address"),
        ("tls://10.0.0.5", TLS, InvalidInput, "not a scheduler's address"),
        ("tls://:8786", TLS, InvalidInput, "not a scheduler's address"),
        ("tls://[::1:8786", TLS, InvalidInput, "not a scheduler's address"),
        ("anything", TLS, InvalidInput, "not a scheduler's address"),
    ],
)
def test_a_scheduler_is_spoken_to_by_tls_or_not_at_all(address, tls, error, words):
    with pytest.raises(error, match=words):
        RemoteScheduler(address, tls)


def test_on_loopback_it_may_be_in_the_clear():
    check_address("tcp://127.0.0.1:8786", None)
    assert RemoteScheduler("tcp://localhost:8786", None).name == "tcp://localhost:8786"
