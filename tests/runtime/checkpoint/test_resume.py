"""Saved under one plan and resumed under another, the losses are those of a run never stopped."""

import json
from itertools import chain

import pytest
import torch

from stagewright.runtime.checkpoint.convert import convert_checkpoint
from stagewright.runtime.checkpoint_files.step_folder import find_step
from tests.runtime.checkpoint.resume_worker import LEGS, MICROBATCHES, STEPS
from tests.runtime.forked import run_as_on_nccl

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

EXACT = 1e-12


@pytest.fixture(scope="module")
def folder(forking_executable, tmp_path_factory):
    """One run over all legs and both optimizers."""
    folder = tmp_path_factory.mktemp("resume")
    run_as_on_nccl(
        forking_executable,
        "tests.runtime.checkpoint.resume_worker",
        str(folder),
        "adamw,sgd",
        timeout_s=280,
    )
    return folder


def entries(folder, name, leg):
    for rank in range(LEGS[leg][0]):
        for line in (folder / f"{rank}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if (entry["optimizer"], entry["leg"]) == (name, leg):
                yield entry


def losses(folder, name, leg, key="losses"):
    """Of the rank that has them; replicas of the last stage have the same."""
    found = [e[key] for e in entries(folder, name, leg) if None not in e[key]]
    assert all(other == found[0] for other in found)
    return found[0]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_loss_curve_continues(folder, name):
    without_stop = losses(folder, name, 0) + losses(folder, name, 0, "following")
    resumed = list(chain.from_iterable(losses(folder, name, leg) for leg in range(len(LEGS))))
    assert len(without_stop) == len(LEGS) * STEPS
    assert resumed == pytest.approx(without_stop, rel=EXACT)
    assert len(set(without_stop)) == len(without_stop)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_what_is_saved_does_not_depend_on_the_plan(folder, name):
    records = [
        find_step(folder / name, step)[1] for step in range(STEPS, len(LEGS) * STEPS + 1, STEPS)
    ]
    assert [record.ranks for record in records] == [ranks for ranks, _, _ in LEGS]
    for record in records[1:]:
        assert record.model == records[0].model
        assert record.aliases == records[0].aliases
        assert record.optimizer.parameters.keys() == records[0].optimizer.parameters.keys()
        slots = [
            {key: state.slots for key, state in r.optimizer.parameters.items()}
            for r in (record, records[0])
        ]
        assert slots[0] == slots[1]
    assert records[0].plan.startswith("plan_")
    assert records[2].plan is None
    assert records[0].aliases == {"head.weight": "embed.weight"}
    assert "blocks.1.1.bias" in records[0].model.keys() - records[0].optimizer.parameters.keys()
    assert {"norm.running_mean", "norm.num_batches_tracked"} <= records[0].model.keys()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_buffers_went_through_all_plans(folder, name, tmp_path):
    convert_checkpoint(folder / name, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found["norm.num_batches_tracked"] == len(LEGS) * STEPS * MICROBATCHES
