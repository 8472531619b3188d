"""What a GPU's driver says is reported as it is; nothing is asked of a CPU, nothing is changed."""

import sys

import pytest
import torch

from stagewright.core.profile.profile import Clocks
from stagewright.profiler.machine.conditions import NVML_CLOCK_SM, watched
from tests.profiler.cuda_stub import SLICE, CudaStub

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Driver:
    """A driver that can only be read, of a card that falls from 1980 MHz to 1350.

    The card is cut into slices if ``is_cut``. ``fails`` is raised when its clock is asked for.
    """

    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonHwThermalSlowdown = 64

    class NVMLError(Exception):
        pass

    def __init__(self, bits, *, is_cut=False, fails=None):
        self.bits, self.clocks = list(bits), [1980, 1350]
        self.is_cut, self.fails = is_cut, fails

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != ("MIG-abcd" if self.is_cut else "GPU-1234"):
            raise self.NVMLError("Not Found")
        return "slice" if self.is_cut else "card"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part):
        assert part == "slice"
        return "card"

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert (handle, kind) == ("card", NVML_CLOCK_SM)
        if self.fails:
            raise self.fails
        return self.clocks.pop(0)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        assert handle == "card"
        return self.bits.pop(0)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU; returns a way to choose what its driver says."""
    stub = CudaStub()

    def with_reasons(*bits, **how):
        monkeypatch.setitem(sys.modules, "pynvml", Driver(bits, **how))
        if how.get("is_cut"):
            stub.cards = [SLICE]

    with stub.in_force():
        yield with_reasons


def test_clocks_and_reasons_before_and_after_are_reported(gpu):
    gpu(0, 4 | 64)
    with watched(GPU) as watch:
        assert watch.clocks() is None
    assert watch.clocks() == Clocks(
        before_mhz=1980, after_mhz=1350, throttled_by=("power cap", "thermal, hardware")
    )
    assert watch.notes == ()


def test_a_slice_has_the_clock_of_the_card_it_is_cut_from(gpu):
    """By its UUID NVML found no card, and reported nothing."""
    gpu(0, 4, is_cut=True)
    with watched(GPU) as watch:
        pass
    assert watch.clocks() == Clocks(before_mhz=1980, after_mhz=1350, throttled_by=("power cap",))


def test_idling_is_no_reason(gpu):
    gpu(1, 1)
    with watched(GPU) as watch:
        pass
    assert watch.clocks().throttled_by == ()


def test_a_clock_that_cannot_be_read_is_noted_once(gpu, monkeypatch):
    gpu(0, 0, fails=Driver.NVMLError("No Permission"))
    with watched(GPU) as watch:
        pass
    assert watch.clocks() is None
    (note,) = watch.notes
    assert "whether it was throttled, could not be read by NVML: No Permission" in note
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with watched(GPU) as watch:
        pass
    assert watch.clocks() is None
    (note,) = watch.notes
    assert "pynvml" in note


def test_nothing_is_known_of_a_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with watched(CPU) as watch:
        pass
    assert watch.clocks() is None
    assert watch.notes == ()
