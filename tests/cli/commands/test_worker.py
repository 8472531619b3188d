"""`worker` joins a scheduler, or says why it does not."""

import json
import signal
import subprocess
import sys
import threading

import pytest


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--scheduler", "tls://10.0.0.5:8786"], 2, "--tls-ca-file"),
        (["--scheduler", "tcp://10.0.0.5:8786"], 4, "is unencrypted"),
        (["--scheduler", "tls://h:1", "--tls-ca-file", "ca.pem"], 2, "--tls-cert"),
        (["--scheduler", "tcp://localhost:1", "--resources", "H 200"], 2, "H200=1"),
        ([], 2, "--scheduler"),
    ],
)
def test_what_it_refuses(run, monkeypatch, words, code, said):
    monkeypatch.delenv("STAGEWRIGHT_SCHEDULER", raising=False)
    ran = run("worker", *words)
    assert ran.code == code
    assert said in ran.stderr


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_it_joins_says_what_it_offers_and_leaves_in_peace():
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=0, host="127.0.0.1", scheduler_kwargs={"dashboard_address": "127.0.0.1:0"}
    ) as cluster:
        words = ["--scheduler", cluster.scheduler_address, "--resources", "H200=1", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-m", "stagewright.cli", "worker", *words, "--name", "gpu0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        with process:
            try:
                assert process.stdout is not None
                joined = json.loads(process.stdout.readline() or "{}")
                assert joined == {"worker": "gpu0", "offers": {"H200": 1.0}}
                (worker,) = cluster.scheduler.workers.values()
                assert (worker.name, worker.resources) == ("gpu0", {"H200": 1.0})
                process.send_signal(signal.SIGTERM)
                _, talk = process.communicate(timeout=30)
            finally:
                watchdog.cancel()
                process.kill()
        assert process.returncode == 0, talk
        assert "offering H200=1" in talk
