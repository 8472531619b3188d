"""Time is the device's; a GPU is never waited for inside a measurement."""

import pytest
import torch

from stagewright.profiler.machine.clock import SLEEP_CYCLES_PER_S, Clock
from tests.profiler.cuda_stub import TICK_S, CudaStub

FIRST, SECOND, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


@pytest.fixture
def stub():
    with CudaStub().in_force() as stub:
        yield stub


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=str)
def test_a_gpus_clock_waits_only_when_it_is_read(stub, device):
    """On the second GPU, with the first current, all of it was done to the first."""
    stub.cards[device.index].stream = "side"
    clock = Clock(device)
    clock.settle()
    clock.head_start(0.001)
    start = clock.mark()
    end = clock.mark()
    done = [
        ("synchronize", device.index),
        ("sleep", device.index, int(0.001 * SLEEP_CYCLES_PER_S)),
        ("record", device.index, "side"),
        ("record", device.index, "side"),
    ]
    assert stub.calls == done
    assert clock.seconds(start, end) == pytest.approx(TICK_S)
    assert stub.calls == [*done, ("wait", device.index), ("read", device.index)]
    assert stub.current == 0
    assert 0 <= end.host_s - start.host_s < 60


def test_events_are_not_read_before_the_device_has_reached_them(stub):
    """The stub's own refusal, on which the test above depends."""
    clock = Clock(FIRST)
    start, end = clock.mark(), clock.mark()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.event.elapsed_time(end.event)
    with pytest.raises(RuntimeError, match="same device"):
        start.event.elapsed_time(Clock(SECOND).mark().event)


def test_a_cpus_clock_needs_no_head_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: pytest.fail("slept"), raising=False)
    clock = Clock(CPU)
    clock.settle()
    clock.head_start(1.0)
    start = clock.mark()
    assert clock.seconds(start, clock.mark()) >= 0


class Times:
    """Both clocks of a process, to be set."""

    def __init__(self, monkeypatch):
        self.wall_s = self.worked_s = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.wall_s)
        monkeypatch.setattr("time.process_time", lambda: self.worked_s)


@pytest.mark.parametrize(
    ("shared", "wall_s", "worked_s", "counted_s"),
    [
        (False, 3.0, 2.0, 2.0),  # another program had the core for a second
        (False, 3.0, 6.0, 3.0),  # two threads
        (True, 3.0, 2.0, 3.0),  # ranks that share cores wait for each other
    ],
)
def test_other_programs_time_is_not_the_models(monkeypatch, shared, wall_s, worked_s, counted_s):
    times = Times(monkeypatch)
    clock = Clock(CPU, shared=shared)
    start = clock.mark()
    times.wall_s, times.worked_s = wall_s, worked_s
    assert clock.seconds(start, clock.mark()) == counted_s
