"""When a rank dies, the others say which one, in time, and nothing is left running."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.runtime.forked import MANNERS, run_worker
from tests.torch_models import make_case, make_plan

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

RANKS = 3
SCENARIOS = [
    *(("kill", victim, 40) for victim in range(RANKS)),
    ("hang", 1, 10),
    ("absent", 2, 8),
]


@pytest.fixture(scope="module", params=["gloo", "as on NCCL"])
def accounts(request, forking_executable, tmp_path_factory):
    """Exit code and last words of every rank but those that hang, by scenario and victim."""
    folder = tmp_path_factory.mktemp("doomed")
    manners = {} if request.param == "gloo" else {MANNERS: str(folder)}
    with mock.patch.dict(os.environ, manners):
        output = run_worker(
            forking_executable,
            "tests.runtime.doomed_worker",
            str(folder),
            json.dumps(SCENARIOS),
            timeout_s=160,
        )
    return {
        (ended["what"], ended["victim"]): {
            int(rank): (code, folder.joinpath(f"{ended['what']}-{ended['victim']}-{rank}.txt"))
            for rank, code in ended["codes"].items()
        }
        for ended in map(json.loads, output.splitlines())
    }


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_killed_rank_is_named_by_all_others(accounts, victim):
    found = accounts["kill", victim]
    assert set(found) == set(range(RANKS))
    for rank, (code, words) in found.items():
        account = words.read_text(encoding="utf-8")
        assert code == (-signal.SIGKILL if rank == victim else 7), account
        if rank != victim:
            assert f"RankFailed: rank {victim} (" in account, account
            assert f"rank {rank} was at" in account


def test_a_rank_that_hangs_is_reported_within_the_timeout(accounts):
    assert set(accounts["hang", 1]) == {0, 2}
    for rank, (code, words) in accounts["hang", 1].items():
        account = words.read_text(encoding="utf-8")
        assert code == 7, account
        assert "got no answer in time, though every rank is still alive" in account
        assert "rank 1 was at the forward of micro-batch" in account
        assert f"rank {rank} was at the wait for rank 1, before the" in account
        assert re.search(rf"ward of micro-batch \d on stage {rank} ", account), account


def test_a_rank_that_never_makes_its_pipeline_is_named(accounts):
    """The others blamed the store's host, rank 0, who then blamed itself."""
    assert set(accounts["absent", 2]) == {0, 1}
    for rank, (code, words) in accounts["absent", 2].items():
        account = words.read_text(encoding="utf-8")
        assert code == 7, account
        assert "RankFailed: rank 2 never joined" in account
        assert f"rank {rank} was at the wait for plan and model of the other ranks" in account


def process_ids(marker):
    """Processes whose command line holds ``marker``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if marker.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found


def test_a_rank_killed_under_torchrun_is_named_and_nothing_is_left(tmp_path):
    plan_file = tmp_path / "plan.json"
    make_plan(make_case("mlp"), 2).write(plan_file)
    command = [
        sys.executable, "-m", "stagewright.cli", "run", str(plan_file), "--steps", "1000000",
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            victim = wait_for_worker(tmp_path, process)
            os.kill(victim, signal.SIGKILL)
            _, account = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 5, account
    assert "rank 1 (" in account
    assert not process_ids(str(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_command_that_started_it(tmp_path, number):
    """torchrun and its ranks have sessions of their own, and trained on for ever."""
    plan_file = tmp_path / "plan.json"
    make_plan(make_case("mlp"), 2).write(plan_file)
    command = [
        sys.executable, "-m", "stagewright.cli", "run", str(plan_file), "--steps", "1000000",
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_worker(tmp_path, process)
            process.send_signal(number)
            code = process.wait(timeout=60)
        finally:
            process.kill()
    assert code == (128 + number if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process_ids(str(tmp_path)):
        time.sleep(0.1)
    assert not process_ids(str(tmp_path))
    assert not list(tmp_path.glob("stagewright-*"))


def wait_for_worker(folder, process):
    """The process of rank 1, once it is training."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        for candidate in process_ids(f"{folder}/stagewright-"):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{candidate}/environ").read_bytes().split(b"\0")
                started = any(Path(folder).glob("stagewright-*/training.1"))
                if b"RANK=1" in environment and started:
                    return candidate
        time.sleep(0.1)
    raise AssertionError("the workers did not start training")
