"""What a GPU's driver says is reported as it is; nothing is asked of a CPU, nothing is changed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from stagewright.core.profile.profile import Clocks
from stagewright.profiler.machine.conditions import watched_clocks

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Driver:
    """A driver that can only be read."""

    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonHwThermalSlowdown = 64

    def __init__(self, bits):
        self.bits = list(bits)

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1234"
        return "handle"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        assert handle == "handle"
        return self.bits.pop(0)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU whose clock falls; returns a way to choose what it says."""

    def with_reasons(*bits):
        monkeypatch.setitem(sys.modules, "pynvml", Driver(bits))

    clocks = [1980, 1350]
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: clocks.pop(0))
    properties = SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return with_reasons


def test_clocks_and_reasons_before_and_after_are_reported(gpu):
    gpu(0, 4 | 64)
    with watched_clocks(GPU) as watch:
        assert watch.clocks() is None
    assert watch.clocks() == Clocks(
        before_mhz=1980, after_mhz=1350, throttled_by=("power cap", "thermal, hardware")
    )


def test_idling_is_no_reason(gpu):
    gpu(1, 1)
    with watched_clocks(GPU) as watch:
        pass
    assert watch.clocks().throttled_by == ()


def test_without_the_drivers_library_only_the_clock_is_known(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with watched_clocks(GPU) as watch:
        pass
    assert watch.clocks() == Clocks(before_mhz=1980, after_mhz=1350)


def test_nothing_is_known_of_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: pytest.fail("asked"))
    with watched_clocks(CPU) as watch:
        pass
    assert watch.clocks() is None
