"""What is refused because its deadline would not hold: exactly the limit is not."""

from __future__ import annotations

import pytest

from stagewright.api.planning import requests as effort
from stagewright.api.planning.requests import check_effort
from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import PlanOptions
from tests.builders import chain_profile

LAYERS = chain_profile([1.0] * 64)


def check(cluster="64xcpu", **options):
    check_effort([LAYERS], Cluster.parse(cluster), PlanOptions(**options))


def of_kinds(count: int) -> Cluster:
    devices = tuple(Device(name=str(index), speed=1.0 + index) for index in range(count))
    return Cluster(devices=devices, levels=(LinkLevel(group_size=count),))


def test_so_many_kinds_of_devices_and_no_more():
    check_effort([LAYERS], of_kinds(effort.MAX_KINDS), PlanOptions())
    with pytest.raises(InvalidInput, match=r"5 kinds of devices .* limit of 4") as caught:
        check_effort([LAYERS], of_kinds(effort.MAX_KINDS + 1), PlanOptions())
    assert caught.value.field == "/cluster"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_times_microbatches_are_limited(monkeypatch, schedule):
    monkeypatch.setattr(effort, "is_available", lambda: True)
    check(num_microbatches=2**16, schedule=schedule)
    with pytest.raises(InvalidInput, match="at most 65536 micro-batches") as caught:
        check(num_microbatches=2**16 + 1, schedule=schedule)
    assert caught.value.field == "/options/num_microbatches"
    check(num_microbatches=2**16 + 1, schedule=schedule, max_stages=63)
    check(num_microbatches=2**16 + 1, schedule=schedule, num_stages=2)
    check("2x16x24GB", num_microbatches=2**16 + 1, schedule=schedule)


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2**12), ("zero_bubble", 2**8)])
def test_without_numba_less_is_simulated_and_the_way_out_is_said(monkeypatch, schedule, most):
    monkeypatch.setattr(effort, "is_available", lambda: False)
    check(num_microbatches=most, schedule=schedule)
    with pytest.raises(InvalidInput, match=r"stagewright\[fast\]"):
        check(num_microbatches=most + 1, schedule=schedule)


def test_other_schedules_count_every_stage_of_a_device(monkeypatch):
    monkeypatch.setattr(effort, "is_available", lambda: True)
    check(num_microbatches=2**12, schedule="zero_bubble")
    with pytest.raises(InvalidInput, match="or the 1f1b schedule"):
        check(num_microbatches=2**12 + 1, schedule="zero_bubble")
    check("4xcpu", num_microbatches=2**15, schedule="interleaved_1f1b", chunks=2)
    with pytest.raises(InvalidInput, match="up to 8 stages"):
        check("4xcpu", num_microbatches=2**15 + 1, schedule="interleaved_1f1b", chunks=2)


def test_of_a_batch_the_smallest_size_counts(monkeypatch):
    monkeypatch.setattr(effort, "is_available", lambda: True)
    inputs = (TensorSpec(name="x", shape=(1, 8), dtype="float32"),)
    profile, cluster = LAYERS.model_copy(update={"inputs": inputs}), Cluster.parse("64xcpu")
    check_effort([profile], cluster, PlanOptions(batch_size=2**16))
    with pytest.raises(InvalidInput) as caught:
        check_effort([profile], cluster, PlanOptions(batch_size=2**17))
    assert caught.value.field == "/options/batch_size"
