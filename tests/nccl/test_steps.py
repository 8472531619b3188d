"""What a host waits for in a step, and what settings of CUDA would keep a step from its end."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from tests.nccl.launches import Cuda
from tests.nccl.process_group import find_deadlocks
from tests.runtime.forked import MANNERS, run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

TIED = 5
"""Of the variants: its first and last rank hold one weight."""

VARIANTS = [
    {"model": "mlp", "schedule": "1f1b", "stages": 3},
    {"model": "mlp", "schedule": "interleaved_1f1b", "stages": 6, "chunks": 2},
    {"model": "mlp", "schedule": "zero_bubble", "stages": 3, "recompute": "always"},
    {"model": "resnet", "schedule": "1f1b", "stages": 2, "replicas": [2, 1]},
    {
        "model": "resnet", "schedule": "gpipe", "stages": 2, "replicas": [1, 2],
        "batch_statistics": "deferred",
    },
    {"model": "gpt2", "schedule": "1f1b", "stages": 3},
    {
        "model": "resnet", "schedule": "gpipe", "stages": 2, "replicas": [1, 2],
        "batch_statistics": "synchronised",
    },
    {
        "model": "mlp", "schedule": "1f1b", "stages": 2, "replicas": [1, 2],
        "strategy": "ddp",
    },
    {
        "model": "mlp", "schedule": "1f1b", "stages": 2, "replicas": [2, 1],
        "strategy": "fully_shard",
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(forking_executable, tmp_path_factory):
    """The logs of three ranks that took a few steps of every variant, and what they printed."""
    pytest.importorskip("transformers")
    found = tmp_path_factory.mktemp("steps")
    with mock.patch.dict(os.environ, {MANNERS: str(found)}):
        printed = run_worker(
            forking_executable, "tests.nccl.steps_worker", "3", json.dumps(VARIANTS), timeout_s=180
        )
    (found / "printed").write_text(printed, encoding="utf-8")
    return found


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_the_host_reads_once_a_step_and_waits_for_no_copy(folder: Path, variant):
    """Whether a value was infinite, and what replicas that share statistics ran, in one go."""
    told = [json.loads(line) for line in (folder / "printed").read_text().splitlines()]
    here = {line["rank"]: line["waits"] for line in told if line["variant"] == variant}
    assert len(here) == 3
    assert list(here.values()) == [[["tolist"]] * 3] * 3


def test_a_tied_weight_is_summed_once_a_step(folder):
    """Whatever the number of micro-batches; one more element counts who has a gradient."""
    told = [json.loads(line) for line in (folder / "printed").read_text().splitlines()]
    by_rank = {line["rank"]: line for line in told if line["variant"] == TIED}
    size = by_rank[0]["weights"]["transformer.wte.weight"]
    assert size == by_rank[2]["weights"]["lm_head.weight"]
    for rank in (0, 2):
        assert by_rank[rank]["collectives"] == [[f"allreduce of {size + 1} elements"]] * 3


def test_nothing_is_connected_in_a_step(folder):
    """A communicator made in the middle of a step would wait for ranks that wait for others."""
    told = [json.loads(line) for line in (folder / "printed").read_text().splitlines()]
    assert [line["connected"] for line in told] == [0] * len(told)


def test_every_order_ends_with_the_settings_that_are_made(folder):
    assert find_deadlocks(folder) == []


def test_kernels_loaded_at_first_use_would_block_a_first_step(folder):
    (words,) = find_deadlocks(folder, Cuda(loads_lazily=True))
    assert "the host waits (loading aten::" in words


def test_one_connection_to_the_gpu_would_block_a_step(folder):
    assert len(find_deadlocks(folder, Cuda(has_one_connection=True))) == 1
