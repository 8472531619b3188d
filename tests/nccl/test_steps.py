"""What a host waits for in a step, and what settings of CUDA would keep a step from its end."""

import json
import os
from pathlib import Path
from typing import Any
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
    {"model": "mlp", "schedule": "1f1b", "stages": 3, "autocast": "bfloat16"},
    {"model": "experts", "schedule": "1f1b", "stages": 3, "aux_losses": {"*.aux": 0.5}},
    {"model": "partly used", "schedule": "1f1b", "stages": 3},
    {"model": "mlp", "schedule": "1f1b", "stages": 3, "check_finite": False},
    {"model": "mlp", "schedule": "1f1b", "stages": 3, "loss_scale": 8.0},
    {"model": "mlp", "schedule": "1f1b", "stages": 3, "does": "evaluate"},
    {"model": "gpt2", "schedule": "1f1b", "stages": 3, "does": "clip"},
    {"model": "mlp", "schedule": "1f1b", "stages": 2, "replicas": [2, 1], "does": "share"},
    {"model": "partly used", "schedule": "1f1b", "stages": 2, "replicas": [2, 1]},
    {"model": "float8", "schedule": "1f1b", "stages": 3, "balance": [2, 3, 1]},
    {"model": "mlp", "schedule": "1f1b", "stages": 2, "replicas": [1, 2], "does": "evaluate"},
    {"model": "complex", "schedule": "1f1b", "stages": 3, "balance": [2, 1, 2]},
    {"model": "whole numbers", "schedule": "1f1b", "stages": 3, "balance": [1, 1, 2]},
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


def lines_of(folder: Path, variant: int) -> list[dict[str, Any]]:
    """What the ranks printed of a variant, in the order of ranks."""
    told = [json.loads(line) for line in (folder / "printed").read_text().splitlines()]
    here = sorted(
        (line for line in told if line["variant"] == variant), key=lambda line: line["rank"]
    )
    assert [line["rank"] for line in here] == [0, 1, 2]
    return here


AFTER_THE_STEP = {"clip": ["aten::_local_scalar_dense"], "share": ["tolist"], "evaluate": []}
"""What the host reads once the step is over: the norm, or what ranks tell each other."""


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_the_host_reads_once_a_step_and_waits_for_no_copy(folder: Path, variant):
    """Whether a value was infinite, and what replicas that share statistics ran, in one go.

    Where nothing is checked, the watcher for lost ranks waits for the step's end instead.
    """
    given = VARIANTS[variant]
    unchecked = not given.get("check_finite", True) or "loss_scale" in given
    unchecked |= given.get("does") == "evaluate"
    for line in lines_of(folder, variant):
        is_checked = not unchecked and (given["model"], line["rank"]) != ("whole numbers", 0)
        in_step = "tolist" if is_checked else "an event"
        expected = [in_step, *AFTER_THE_STEP.get(given.get("does", ""), [])]
        # A weight of replicas that got no gradient here: did it get one elsewhere?
        asks = given["model"] == "partly used" and "replicas" in given and line["rank"] < 2
        assert line["waits"] == [["tolist"] * asks + expected] * 3


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_a_call_ends_behind_all_that_it_waits_for(folder: Path, variant):
    """A rank lost afterwards would leave garbage in what was returned, without an error."""
    assert [line["unread"] for line in lines_of(folder, variant)] == [0] * 3


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_nothing_is_made_on_the_host_that_a_step_would_copy(folder: Path, variant):
    """The norm that clipping returns stays there."""
    kept = ["tensor"] if VARIANTS[variant].get("does") == "clip" else []
    assert [line["host_made"] for line in lines_of(folder, variant)] == [kept] * 3


def test_a_tied_weight_is_summed_once_a_step(folder):
    """Whatever the number of micro-batches; one more element counts who has a gradient."""
    by_rank = lines_of(folder, TIED)
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
