"""`profile --links`: alone on a machine, and as the ranks of a launcher."""

import json
import os
import subprocess
import sys

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.profiler.links.launch_local import free_port

QUICK = ("--device", "cpu", "--budget", "0.5")
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_PORT")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.distributed
def test_alone_it_starts_the_ranks_and_writes_a_cluster(run, forked_python):
    ran = run("profile", "--links", "--ranks", "2", *QUICK)
    assert ran.code == 0, ran.stderr
    cluster = Cluster.read("cluster.json")
    assert [device.name for device in cluster.devices] == ["cpu:0", "cpu:1"]
    memory = {device.memory_bytes for device in cluster.devices}
    assert len(memory) == 1
    assert min(memory) > 2**20
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert lines[0] == "2 ranks on cpu, backend gloo"
    assert lines[2] == "link joins latency bandwidth fit error all-reduce fit error"
    assert lines[4].startswith("node 2 ")
    assert "next: stagewright plan profile.json --devices cluster.json" in ran.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["theirs:model"], "MODEL cannot be combined with --links"),
        (["--family", "mlp"], "--family cannot be combined with --links"),
        (["--threads", "2"], "--threads cannot be combined with --links"),
        (["--device", "cuda:1"], "--device takes cpu or cuda, not cuda:1"),
        (["--ranks", "1"], "--ranks"),
        (["-o", "absent/c.json"], "folder absent does not exist"),
    ],
)
def test_what_does_not_go_together_is_refused(run, words, said):
    ran = run("profile", "--links", *words)
    assert (ran.code, ran.stdout) == (2, "")
    assert said in ran.stderr


def test_ranks_are_for_links(run):
    ran = run("profile", "--family", "mlp", "--input", "input=2x64", "--ranks", "2")
    assert ran.code == 2
    assert "--ranks cannot be combined with a model" in ran.stderr


def test_ranks_under_a_launcher_are_refused(run, monkeypatch):
    for name in LAUNCHER:
        monkeypatch.setenv(name, "1")
    ran = run("profile", "--links", "--ranks", "2")
    assert ran.code == 2
    assert "under torchrun, which starts the ranks" in ran.stderr


def launch(folder, ranks, output, *words):
    """Ranks of one machine as a launcher starts them; what they said and their exit codes."""
    port = free_port()
    command = [sys.executable, "-m", "stagewright.cli", "profile", "--links", *QUICK, *words]
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [*command, "-o", str(output)], cwd=folder, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        return [(*process.communicate(timeout=200), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.distributed
def test_ranks_of_a_launcher_write_one_cluster(tmp_path, forked_python):
    ended = launch(tmp_path, 2, "c.json", "--json")
    assert [code for *_, code in ended] == [0, 0], ended
    assert ended[1][0] == ""
    report = json.loads(ended[0][0])
    cluster = Cluster.read(tmp_path / "c.json")
    assert Cluster.model_validate(report["cluster"]) == cluster
    assert [level.group_size for level in cluster.levels] == [2]
    assert {path.name for path in tmp_path.iterdir()} == {"c.json"}


@pytest.mark.distributed
def test_every_rank_fails_where_the_first_cannot_write(tmp_path, forked_python):
    ended = launch(tmp_path, 2, "absent/c.json")
    assert [code for *_, code in ended] == [2, 2]
    assert all("folder absent does not exist" in stderr for _, stderr, _ in ended)


@pytest.mark.distributed
def test_torchrun_starts_it(tmp_path, forked_python):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "stagewright.cli", "profile", "--links", *QUICK,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks on cpu, backend gloo")
    assert len(Cluster.read(tmp_path / "cluster.json").devices) == 2
