"""Time is the device's; a GPU is never waited for inside a measurement."""

import pytest
import torch

from stagewright.profiler.machine.clock import SLEEP_CYCLES_PER_S, Clock

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Event:
    """Of a device that has done a millisecond's work between any two events."""

    made = 0

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.number, self.reached = None, False

    def record(self):
        Event.made += 1
        self.number = Event.made

    def synchronize(self):
        self.reached = True

    def elapsed_time(self, other):
        assert other.reached
        return float(other.number - self.number)


def test_a_gpus_clock_waits_only_when_it_is_read(monkeypatch):
    waited, slept = [], []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    clock = Clock(GPU)
    clock.settle()
    clock.head_start(0.001)
    start = clock.mark()
    end = clock.mark()
    assert waited == [1]
    assert slept == [int(0.001 * SLEEP_CYCLES_PER_S)]
    assert not start.event.reached
    assert not end.event.reached
    assert clock.seconds(start, end) == pytest.approx(0.001)
    assert end.event.reached
    assert 0 <= end.host_s - start.host_s < 60


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
