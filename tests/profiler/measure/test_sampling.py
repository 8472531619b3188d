"""Repeats go where the spread makes the total uncertain, and stop when it is certain."""

import random
from itertools import pairwise
from statistics import median, quantiles

import pytest

from stagewright.profiler.measure.session import (
    TOTAL_ERROR,
    representative,
    standard_error,
    worth_repeating,
)


def draw(centre, spread, count, seed=0):
    generator = random.Random(seed)
    return [generator.gauss(centre, spread) for _ in range(count)]


def test_the_standard_error_is_that_of_a_median():
    """Against medians of many samples of one normal distribution."""
    medians = [median(draw(10.0, 1.0, 25, seed)) for seed in range(2000)]
    mean = sum(medians) / len(medians)
    true_error = (sum((m - mean) ** 2 for m in medians) / len(medians)) ** 0.5
    stated = [standard_error(draw(10.0, 1.0, 25, seed)) for seed in range(500)]
    assert median(stated) == pytest.approx(true_error, rel=0.15)
    assert standard_error([1.0]) == float("inf")
    assert standard_error([2.0, 2.0, 2.0]) == 0.0


def test_nothing_is_repeated_once_the_total_is_certain():
    assert worth_repeating([[1.0] * 3, [2.0] * 3], [1, 1]) == []
    steady = [draw(1.0, 0.0005, 9, seed) for seed in range(4)]
    assert worth_repeating(steady, [1] * 4) == []


def test_the_layer_with_the_spread_is_repeated():
    samples = [[1.0, 1.0, 1.001], [1.0, 1.2, 0.8], [5.0, 5.0, 5.001]]
    assert worth_repeating(samples, [1, 1, 1]) == [1]


def test_a_large_spread_of_a_small_layer_does_not_matter():
    samples = [[1e-5, 3e-5, 2e-5], [1.0, 1.05, 0.95]]
    assert worth_repeating(samples, [1, 1]) == [1]


def test_a_layer_that_stands_for_many_is_repeated_first():
    samples = [[1.0, 1.01, 0.99], [1.0, 1.02, 0.98]]
    assert worth_repeating(samples, [1, 1]) == [1]
    assert worth_repeating(samples, [48, 1]) == [0]


def test_repeating_what_is_chosen_ends_with_a_certain_total():
    """A noisy layer among quiet ones gets nearly all the repeats."""
    spreads = [0.001, 0.2, 0.002, 0.0]
    samples = [draw(1.0, spread, 3, seed) for seed, spread in enumerate(spreads)]
    generator = random.Random(9)
    for _ in range(1000):
        chosen = worth_repeating(samples, [1] * 4)
        if not chosen:
            break
        for index in chosen:
            samples[index].append(generator.gauss(1.0, spreads[index]))
    assert not chosen
    errors = [standard_error(found) for found in samples]
    assert sum(error**2 for error in errors) ** 0.5 <= TOTAL_ERROR * 4.1
    assert len(samples[1]) > 10 * max(len(samples[i]) for i in (0, 2, 3)) / 3


def test_every_layer_of_a_class_takes_its_turn():
    members = list(range(10, 58))
    turns = [representative(members, turn) for turn in range(200)]
    assert set(turns) == set(members)
    assert turns[0] == members[24]  # the middle one first
    first = sorted(turns[:6])
    assert max(b - a for a, b in pairwise(first)) < 48 / 2  # spread out
    assert all(a != b for a, b in pairwise(turns))
    assert representative([7], 5) == 7
    assert quantiles(turns, n=4)[1] == pytest.approx(34, abs=3)
