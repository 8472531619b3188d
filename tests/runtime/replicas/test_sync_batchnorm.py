"""Batch statistics of all replicas: a round of micro-batches is normalised as one batch."""

import json

import pytest
import torch
from torch import nn

from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.runtime.replicas.sync_batchnorm import check_no_sync_batch_norm, check_synchronised
from stagewright.schedules.make_schedule import make_schedule
from tests.runtime.forked import run_as_on_nccl

EXACT = 1e-9


@pytest.fixture(scope="module")
def results(tmp_path_factory, forking_executable):
    folder = tmp_path_factory.mktemp("synchronised")
    run_as_on_nccl(
        forking_executable, "tests.runtime.synchronised_worker", str(folder), timeout_s=120
    )
    return [
        entry
        for rank in range(2)
        for entry in json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    ]


@pytest.mark.distributed
@pytest.mark.timeout(150)
def test_two_replicas_are_one_device_with_batches_of_two(results):
    ran = [entry for entry in results if "refused" not in entry]
    assert len(ran) == 8
    assert any(entry["loss"] for entry in ran)
    for entry in ran:
        assert max(entry["gradients"], entry["buffers"], entry["outputs"]) <= EXACT, entry


@pytest.mark.distributed
@pytest.mark.timeout(150)
def test_replicas_with_unequal_work_are_refused(results):
    refused = [entry["refused"] for entry in results if "refused" in entry]
    assert len(refused) == 2
    for text in refused:
        assert "stage 0 cannot be synchronised" in text
        assert "batch_statistics='microbatch'" in text


def test_stages_that_normalise_nothing_may_have_any_replicas():
    schedule = make_schedule("1f1b", 2, 4, replicas=[3, 1])
    plain, normed = nn.Linear(2, 2), nn.BatchNorm1d(2)
    check_synchronised([plain, normed], schedule, {})
    with pytest.raises(PlanMismatch, match="3 replicas share 4 micro-batches"):
        check_synchronised([normed, plain], schedule, {})


def test_torch_s_own_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(InvalidInput, match=r"^1 is an nn\.SyncBatchNorm.*'synchronised'"):
        check_no_sync_batch_norm(model)
    check_no_sync_batch_norm(nn.Sequential(nn.BatchNorm1d(2), torch.nn.Identity()))
