"""Whose error it was: a transport's, the model's, or that of a rank that is gone."""

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from stagewright.core.errors import RankFailed
from stagewright.profiler.links.launch_local import free_port
from stagewright.runtime.ranks.failure_detection import (
    ConnectionEnded,
    FailureDetector,
    is_transport_error,
)


@pytest.mark.parametrize(
    "words",
    [
        "skip connection 3 has 5 channels, expected 4",
        "the weights restored are of another peer group",
        "timeout must be positive",
    ],
)
def test_words_that_transports_use_too_do_not_make_a_model_s_error_theirs(words):
    assert not is_transport_error(RuntimeError(words))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed"),
        RuntimeError("Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no"),
        dist.DistNetworkError("Broken pipe"),
        dist.DistStoreError("wait timeout after 8000ms"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1"),
        ConnectionEnded("told to stop"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_transport_s_error_is_known_also_as_a_cause(error):
    assert is_transport_error(error)
    wrapped = RuntimeError("stage 1 failed")
    wrapped.__cause__ = error
    assert is_transport_error(wrapped)


@pytest.fixture
def stores():
    """The host's store, and another rank's connection to it."""
    host, port, waits = "127.0.0.1", free_port(), timedelta(seconds=30)
    hosted = dist.TCPStore(host, port, is_master=True, timeout=waits, wait_for_workers=False)
    return hosted, dist.TCPStore(host, port, is_master=False, timeout=waits)


def test_heartbeats_go_on_while_the_main_thread_waits_in_the_store(stores):
    """They shared its connection, so a rank that formed a group passed for dead."""
    ours, theirs = stores
    watch = FailureDetector(theirs, 1, 2)

    def wait():
        with pytest.raises(dist.DistStoreError):
            theirs.wait(["never"], timedelta(seconds=3))

    waiting = threading.Thread(target=wait)
    waiting.start()
    key = "stagewright-watch/default/1/beat/1"
    seen = set()
    while waiting.is_alive():
        seen.add(ours.get(key))
        waiting.join(0.05)
    watch.close()
    assert len(seen) > 3


def test_heartbeats_that_nobody_closed_end_before_python_is_taken_apart():
    """A thread found inside the store then is unwound through C++, which aborts the process."""
    script = f"""
import weakref
import torch.distributed as dist
from stagewright.runtime.ranks.failure_detection import FailureDetector
store = dist.TCPStore("127.0.0.1", {free_port()}, is_master=True, wait_for_workers=False)
# Finalizers run in the reverse order of their making.
weakref.finalize(dist, lambda: print("still there:", watch._beats._thread.is_alive()))
watch = FailureDetector(store, 0, 1)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "still there: False\n"


def test_a_rank_s_own_error_is_told_to_the_others(stores):
    detectors = [FailureDetector(store, rank, 2) for rank, store in enumerate(stores)]
    detectors[1].set_activity("the forward of micro-batch 0 on stage 1")
    with pytest.raises(ZeroDivisionError) as own, detectors[1].explain_errors():
        raise ZeroDivisionError("of the loss")
    assert own.value.__notes__ == ["rank 1, at the forward of micro-batch 0 on stage 1"]
    detectors[0].set_activity("the wait for rank 1")
    with pytest.raises(RankFailed) as raised, detectors[0].explain_errors():
        raise dist.DistNetworkError("Connection reset by peer")
    assert raised.value.ranks == (1,)
    assert "raised ZeroDivisionError: of the loss; rank 0 was at the wait for" in str(raised.value)
    for watch in detectors:
        watch.close()
