"""Under torchrun, one stage a rank: the same numbers as the unsplit model."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

CASES = [(2, "mlp,resnet,unet"), (2, "gpt2"), (3, "unet,gpt2")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} ranks {case[1]}")
def results(request, tmp_path_factory, repository):
    """Every rank's account of every model and schedule, from one run."""
    ranks, models = request.param
    if "gpt2" in models:
        pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("equality")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={ranks}", "-m", "tests.runtime.equality_worker", models, str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    done = subprocess.run(
        command,
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [
        json.loads(line)
        for rank in range(ranks)
        for line in (folder / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(found) == ranks * 4 * len(models.split(","))
    return found


def test_double_precision_is_exact(results):
    for entry in results:
        if entry["dtype"] == "torch.float64":
            assert entry["gradient"] <= 1e-9, entry
            assert entry["buffer"] <= 1e-9, entry


def test_losses_agree(results):
    losses = [entry for entry in results if entry["loss"] is not None]
    assert losses
    for entry in losses:
        assert entry["loss"] <= (1e-9 if entry["dtype"] == "torch.float64" else 1e-5), entry


def test_ranks_hold_every_name_between_them(results):
    runs = {}
    for entry in results:
        key = (entry["model"], entry["schedule"], entry["dtype"])
        runs.setdefault(key, (set(), set(entry["all_names"])))[0].update(entry["names"])
    assert all(held == wanted for held, wanted in runs.values())


def test_torch_works_in_the_order_of_our_schedule(results):
    assert all(entry["order"] for entry in results)
