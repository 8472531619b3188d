"""Equal stages lie on the first devices of a class that hold them, as trying each finds."""

import random

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.planner.cost.device_classes import DeviceClass, Devices
from stagewright.planner.solvers.device_layouts import list_device_layouts


def placed_below(entry, last, count, replicas):
    """Where stages end, from the last one at most at ``last``; `None` if they do not fit."""
    ends = []
    while len(ends) < count:
        end = entry.place(ends[-1] - replicas if ends else last, replicas, is_last=not ends)
        if end < replicas:
            return None
        ends.append(end)
    return tuple(reversed(ends))


@pytest.mark.parametrize("seed", range(200))
def test_stages_lie_on_the_first_devices_that_hold_them(seed):
    draw = random.Random(seed)
    size, inner = draw.randint(1, 40), draw.randint(1, 8)
    sizes = draw.choice([(size,), (inner, size), (inner, inner * draw.randint(1, 4), size)])
    entry = DeviceClass("gpu", 1.0, None, tuple(range(size)), sizes)
    devices = Devices(Cluster.uniform(size), (entry,), ())
    count, replicas = draw.randint(1, 6), draw.randint(1, 6)
    tried = (placed_below(entry, last, count, replicas) for last in range(1, size + 1))
    expected = next((ends for ends in tried if ends is not None), None)
    found = [each.ends for each in list_device_layouts(count, replicas, devices)]
    assert found == ([] if expected is None else [expected])
