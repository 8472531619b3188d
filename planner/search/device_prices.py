"""Prices of devices: how light a plan can be if devices are bought instead of counted.

For any prices, no path within the devices there are weighs less than

    the least of (weight + price of its devices) over all paths - price of all devices there are.

Here are sought the prices at which that bound is highest: the Lagrange multipliers of "no more
devices of a class than there are". Each try is a shortest path over stage arcs, O(arcs), however
many devices and classes there are.

What `label_kernel` says of its functions holds for these.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...schedules.numba_jit import float_zeros
from .device_pool import DevicePool, Floats, Integers

SECANT_STEPS = 6
"""The price of one class settles in two to four steps; more gain nothing measurable."""

MOST_TRIES = 60
"""Prices of several classes that are tried at most."""

PATIENCE = 3
"""Tries without a better bound until steps are halved."""

SHORTEST_STEP = 1 / 64
"""Steps below this share of the way to the cap gain nothing measurable."""

TOLERANCE = 1e-9
"""Sums of device speeds and prices are compared with this much slack, relatively."""


class UsableArcs(NamedTuple):
    """Arcs with enough replicas, before bounds: columns by arc but ``first_arc``.

    ``devices`` are those an arc occupies, of its class; ``exposed`` is the least time for which
    the summing of its gradients is exposed.
    """

    first_arc: Integers
    last: Integers
    arc: Integers
    replicas: Integers
    device_class: Integers
    weight: Floats
    devices: Integers
    exposed: Floats


def worth(prices: Floats, counts: Integers | Floats) -> float:
    """Return the price of a number of devices of each class."""
    total = 0.0
    for k in range(len(prices)):
        total += counts[k] * prices[k]
    return total


def charge(arcs: UsableArcs, per_weight: float, prices: Floats) -> Floats:
    """Return the cost of every arc at these prices."""
    cost = float_zeros(len(arcs.weight))
    weight, devices, device_class = arcs.weight, arcs.devices, arcs.device_class
    for index in range(len(weight)):
        cost[index] = per_weight * weight[index] + prices[device_class[index]] * devices[index]
    return cost


def shortest_from_front(arcs: UsableArcs, cost: Floats) -> Floats:
    """Return the least cost from position 0 to every position."""
    first_arc, last = arcs.first_arc, arcs.last
    front = float_zeros(len(first_arc))
    for i in range(1, len(first_arc)):
        front[i] = math.inf
    for i in range(len(first_arc) - 1):
        if front[i] < math.inf:
            for index in range(first_arc[i], first_arc[i + 1]):
                j = last[index]
                front[j] = min(front[j], front[i] + cost[index])
    return front


def shortest_to_end(arcs: UsableArcs, cost: Floats) -> Floats:
    """Return the least cost from every position to the end."""
    first_arc, last = arcs.first_arc, arcs.last
    back = float_zeros(len(first_arc))
    for i in range(len(first_arc) - 2, -1, -1):
        least = math.inf
        for index in range(first_arc[i], first_arc[i + 1]):
            least = min(least, cost[index] + back[last[index]])
        back[i] = least
    return back


def follow_path(arcs: UsableArcs, cost: Floats, back: Floats, used: Floats) -> float:
    """Return the weight of the path that `shortest_to_end` found; count its devices in ``used``."""
    first_arc, last = arcs.first_arc, arcs.last
    i, weight = 0, 0.0
    for k in range(len(used)):
        used[k] = 0.0
    while i < len(first_arc) - 1:
        least, best = math.inf, -1
        for index in range(first_arc[i], first_arc[i + 1]):
            if cost[index] + back[last[index]] < least:
                least, best = cost[index] + back[last[index]], index
        weight += arcs.weight[best]
        used[arcs.device_class[best]] += arcs.devices[best]
        i = last[best]
    return weight


def price_speed(
    arcs: UsableArcs, pool: DevicePool, back_weight: Floats, back_devices: Floats
) -> tuple[Floats, float]:
    """Find one price per unit of speed at which the lightest path uses about all devices.

    The secant method of Handler and Zang (1980): the next price makes the lightest path known
    with too many devices and the lightest known with few enough equally dear.

    Returns:
        The price of a device of each class (0 if the lightest path has devices enough), and a
        lower bound of every path's weight.
    """
    speed, used = pool.speed, float_zeros(len(pool.total))
    prices, least_weight, power = float_zeros(len(speed)), back_weight[0], worth(speed, pool.total)
    light = follow_path(arcs, charge(arcs, 1.0, prices), back_weight, used)
    light_devices = worth(speed, used)
    heavy = follow_path(arcs, charge(arcs, 0.0, speed), back_devices, used)
    heavy_devices = worth(speed, used)
    if light_devices <= power:
        return prices, least_weight
    for _ in range(SECANT_STEPS):
        if light_devices <= heavy_devices or heavy <= light:
            break
        price = (heavy - light) / (light_devices - heavy_devices)
        for k in range(len(speed)):
            prices[k] = price * speed[k]
        cost = charge(arcs, 1.0, prices)
        back = shortest_to_end(arcs, cost)
        least_weight = max(least_weight, back[0] - price * (power * (1 + TOLERANCE) + TOLERANCE))
        weight = follow_path(arcs, cost, back, used)
        devices = worth(speed, used)
        if back[0] >= (light + price * light_devices) * (1 - 1e-12):
            break  # no path lies below the line through the two: the price is the best
        if devices <= power:
            heavy, heavy_devices = weight, devices
        else:
            light, light_devices = weight, devices
    return prices, least_weight


def price_classes(
    arcs: UsableArcs, pool: DevicePool, cap: float, prices: Floats, tried: Floats
) -> tuple[Floats, float]:
    """Change the prices to better ones, each class its own; return them and their bound.

    Subgradient steps (Polyak 1969), from the better of ``prices`` and ``tried``: a class of which
    the lightest path uses more devices than there are becomes dearer, one of which it leaves some
    becomes cheaper. A step would reach the cap if the bound went on rising as it does here. It
    ends when the bound is above the cap, which is all a search asks, or rises no more.
    """
    num_classes, total, speed = len(pool.total), pool.total, pool.speed
    used, at = float_zeros(num_classes), float_zeros(num_classes)
    highest, length, failures = -math.inf, 1.0, 0
    for k in range(num_classes):
        at[k] = prices[k]
    for attempt in range(MOST_TRIES):
        cost = charge(arcs, 1.0, at)
        back = shortest_to_end(arcs, cost)
        value = back[0] - worth(at, total) * (1 + TOLERANCE)
        failures += 1
        if value > highest:
            highest, failures = value, 0
            for k in range(num_classes):
                prices[k] = at[k]
            if value > cap:
                break
        if attempt == 0 and worth(tried, total) > 0:
            for k in range(num_classes):
                at[k] = tried[k]
            continue
        if failures > PATIENCE:
            length, failures = length / 2, 0
            if length < SHORTEST_STEP:
                break
            for k in range(num_classes):
                at[k] = prices[k]
            continue
        follow_path(arcs, cost, back, used)
        target = cap if cap < math.inf else highest + 0.1 * abs(highest)
        if not step_prices(at, used, length * (target - value), total, speed):
            break  # the lightest path has devices enough, and pays for no idle one
    return prices, highest


def step_prices(prices: Floats, used: Floats, rise: float, total: Integers, speed: Floats) -> bool:
    """Move prices so that a bound linear in them would rise so much; return False if it cannot.

    A price counts in units of its class's speed, so that classes weigh alike.
    """
    square = 0.0
    for k in range(len(prices)):
        excess = (used[k] - total[k]) * speed[k]
        if excess > 0 or prices[k] > 0:
            square += excess * excess
    if square <= 0:
        return False
    for k in range(len(prices)):
        excess = (used[k] - total[k]) * speed[k]
        prices[k] = max(0.0, prices[k] + rise / square * excess * speed[k])
    return True
