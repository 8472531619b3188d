"""A profile says with which settings it was measured."""

import pytest
import torch

from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.machine import provenance as module
from stagewright.profiler.machine.provenance import provenance


@pytest.fixture
def torchs_precisions():
    """Torch's own, put back afterwards."""
    holders = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [holder.fp32_precision for holder in holders]
    yield holders
    for holder, precision in zip(holders, before, strict=True):
        holder.fp32_precision = precision


@pytest.mark.parametrize(
    ("products", "convolutions", "said"),
    [
        ("ieee", "ieee", "off"),
        ("tf32", "ieee", "products"),
        ("ieee", "tf32", "convolutions"),
        ("tf32", "tf32", "products and convolutions"),
    ],
)
def test_what_ran_in_tf32_is_recorded(torchs_precisions, monkeypatch, products, convolutions, said):
    monkeypatch.setattr(module, "device_name", lambda device: "a GPU")
    for holder, precision in zip(torchs_precisions, (products, convolutions), strict=True):
        holder.fp32_precision = precision
    found = provenance(torch.device("cuda", 0), ProfilingOptions())
    assert found.tf32 == said


def test_the_older_setting_is_read_as_well(torchs_precisions, monkeypatch):
    monkeypatch.setattr(module, "device_name", lambda device: "a GPU")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = provenance(torch.device("cuda", 0), ProfilingOptions())
    finally:
        torch.set_float32_matmul_precision(before)
    assert "products" in found.tf32


def test_a_cpu_knows_no_tf32():
    assert provenance(torch.device("cpu"), ProfilingOptions()).tf32 is None
