"""Pins that no plan can keep, and the fewest among several that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.errors import InvalidInput
from ...core.plan.plan import Pin, PlanOptions

Pins = tuple[tuple[int, Pin], ...]
"""Pins with their indices in the options."""


def check_pins(options: PlanOptions, layer_of: Callable[[str], int], kinds: Sequence[str]) -> None:
    """Refuse pins to a layer, kind or stage that there is not.

    Pins that contradict each other are found where nothing fits (`solvers/feasibility.py`).
    """
    pins = tuple(enumerate(options.pins))
    for entry in pins:
        layer_of(entry[1].layer)
        if entry[1].kind is not None and entry[1].kind not in kinds:
            raise _refusal(
                f"{describe_pins([entry])} needs a kind of device that the cluster does not have; "
                f"choose {' or '.join(map(repr, dict.fromkeys(kinds)))}"
            )
    most, limit = _most_stages(options)
    for entry in pins:
        if most is not None and entry[1].stage is not None and entry[1].stage >= most:
            raise _refusal(
                f"{describe_pins([entry])} needs at least {entry[1].stage + 1} stages, but {limit} "
                f"allows {most}; pin it to a lower stage or allow more stages"
            )


def least_conflict(pins: Pins, fails: Callable[[Pins], bool]) -> Pins:
    """Return an inclusion-minimal subset of failing pins that still fails."""
    # Delta debugging: drop halves first, then quarters, down to single pins.
    size = len(pins)
    while size:
        start = 0
        while start < len(pins):
            rest = pins[:start] + pins[start + size :]
            if fails(rest):
                pins = rest
            else:
                start += size
        size //= 2
    return pins


def describe_pins(pins: Sequence[tuple[int, Pin]]) -> str:
    """Return, for example, ``pins[0] ('embed' in stage 1) and pins[2] ('head' on a 'fast')``."""
    return " and ".join(f"pins[{number}] ({_place(pin)})" for number, pin in pins)


def _place(pin: Pin) -> str:
    where = [f"in stage {pin.stage}"] if pin.stage is not None else []
    where += [f"on a {pin.kind!r}"] if pin.kind is not None else []
    return f"{pin.layer!r} {' '.join(where)}"


def _most_stages(options: PlanOptions) -> tuple[int | None, str]:
    """Return the most stages that options allow (`None` for any number) and the binding option."""
    found = [("num_stages", options.num_stages), ("max_stages", options.max_stages)]
    limits = [(count, f"{name}={count}") for name, count in found if count is not None]
    return min(limits, key=lambda entry: entry[0], default=(None, ""))


def _refusal(message: str) -> InvalidInput:
    return InvalidInput(message, field="/options/pins")
