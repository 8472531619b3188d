"""Passes over layers and runs of the whole model take turns, and end when they should."""

import random

import pytest

from stagewright.profiler.measure.session import MIN_PASSES, WHOLE_RUNS, Measuring
from stagewright.profiler.measure.timed_passes import Samples


class Machine:
    """Layers of given durations, and a log of what was run; time passes only in passes."""

    def __init__(self, durations, spread=0.0, monkeypatch=None):
        self.durations, self.spread = durations, spread
        self.samples = [Samples() for _ in durations]
        self.log, self.now_s = [], 0.0
        self.generator = random.Random(0)
        self.forward_s = []
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s)

    def run(self, chosen=None, *, split=False, keep=True, tell=None):
        if chosen is None:
            self.log.append("whole")
            self.forward_s.append(1.0)
            return
        self.log.append(("split" if split else "pass", tuple(chosen), keep))
        for index in chosen:
            tell(index)
            factor = 1 + self.spread * self.generator.uniform(-1, 1)
            duration = self.durations[index] * factor
            self.now_s += duration
            if keep:
                samples = self.samples[index].device_s
                samples["forward"].append(duration / 3)
                phases = ("backward_input", "backward_weight") if split else ("backward",)
                for phase in phases:
                    samples[phase].append(duration * 2 / 3)


def measure(machine, classes, budget_s, **options):
    for members in classes:
        for index in members:
            machine.samples[index] = machine.samples[members[0]]
    told = []
    names = [str(index) for index in range(len(machine.durations))]
    measuring = Measuring(
        machine, machine, classes, machine.samples, names, lambda *now: told.append(now)
    )
    measuring.run(budget_s, **options)
    return measuring, told


def test_turns_start_with_a_pass_that_does_not_count(monkeypatch):
    machine = Machine([1.0, 2.0], monkeypatch=monkeypatch)
    measuring, _ = measure(machine, [[0], [1]], 100.0)
    full = (0, 1)
    assert machine.log == [
        ("split", full, False),
        "whole", ("pass", full, True), ("split", full, True),
        "whole", ("pass", full, True), ("split", full, True),
        "whole", ("pass", full, True),
    ]  # fmt: skip
    assert measuring.layers_s == pytest.approx(15.0)


def test_layers_that_cannot_be_taken_apart_are_not(monkeypatch):
    machine = Machine([1.0], monkeypatch=monkeypatch)
    measure(machine, [[0]], 100.0, split=False)
    assert all(entry == "whole" or entry[0] == "pass" for entry in machine.log)


def test_the_budget_ends_repeats_and_the_least_is_made_without_any(monkeypatch):
    few = Machine([1.0] * 4, 0.5, monkeypatch)
    measure(few, [[i] for i in range(4)], 0.001)
    assert len(few.samples[0].total_s()) == MIN_PASSES
    many = Machine([1.0] * 4, 0.5, monkeypatch)
    measuring, _ = measure(many, [[i] for i in range(4)], 60.0)
    assert 30 < measuring.layers_s <= 66
    assert many.log.count("whole") == WHOLE_RUNS
    assert {entry[0] for entry in many.log if entry != "whole"} == {"pass", "split"}


def test_of_many_equal_layers_one_is_measured_a_pass_and_most_of_the_saving_is_kept(monkeypatch):
    """48 blocks between two layers, noisy enough that every repeat allowed is made."""
    classes = [[0], list(range(1, 49)), [49]]
    once = Machine([1.0] * 50, 0.3, monkeypatch)
    measuring, _ = measure(once, classes, 1000.0)
    every = Machine([1.0] * 50, 0.3, monkeypatch)
    all_of_them, _ = measure(every, [[i] for i in range(50)], 1.0)
    assert all_of_them.layers_s / measuring.layers_s > 10
    assert len(once.samples[1].total_s()) > MIN_PASSES  # the saving that was not kept
    assert all(len(entry[1]) <= 3 for entry in once.log if entry != "whole")
    chosen = {index for entry in once.log if entry != "whole" for index in entry[1]}
    assert len(chosen) > 6  # another block every time


def test_progress_never_goes_back_and_ends_at_its_total(monkeypatch):
    machine = Machine([1.0, 2.0], 0.5, monkeypatch)
    _, told = measure(machine, [[0], [1]], 40.0)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert [total for _, total, _ in told] == sorted(total for _, total, _ in told)
    assert all(done <= total for done, total, _ in told)
    assert told[-1][0] == told[-1][1]
    assert {name for _, _, name in told} == {"0", "1", "whole model"}
