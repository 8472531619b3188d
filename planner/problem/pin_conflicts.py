"""Contradictions between pins, found without a search and whatever the devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...core.errors import InvalidInput
from ...core.plan.plan import Pin, PlanOptions

Pins = tuple[tuple[int, Pin], ...]
"""Pins with their indices in the options."""


def check_pins(
    options: PlanOptions,
    layer_of: Callable[[str], int],
    positions: Sequence[int] | None,
    kinds: Sequence[str],
) -> None:
    """Refuse pins that no plan can keep.

    Positions are `None` if layers may be reordered, since only the search can tell then.
    """
    pins = tuple(enumerate(options.pins))
    for entry in pins:
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
    if positions is not None:
        layers = {pin.layer: bisect_right(positions, layer_of(pin.layer)) - 1 for _, pin in pins}
        chain = _Chain(layers, len(positions) - 1, options.num_stages, most, _forbidding(options))
        _check_order(chain, pins, limit)


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


def _forbidding(options: PlanOptions) -> str:
    names = [name for name in ("together", "no_cut_after") if getattr(options, name)]
    names += ["tied"] * (options.tied == "together")
    return f" (see also {', '.join(names)})" if names else ""


@dataclass(frozen=True)
class _Chain:
    """Pinned layers along the chain of atoms, which cannot be cut.

    A layer's atom is the number of legal cuts in front of it.
    """

    atoms: dict[str, int]
    num_atoms: int
    num_stages: int | None = None
    most_stages: int | None = None
    forbidding: str = ""

    def contradicts(self, pins: Pins) -> bool:
        """Return True if no cuts keep these pins, given any number of devices of each kind.

        State: at each pin, for each kind that the current stage may be bound to (`None`: free),
        the set of stage numbers it may have, as bits. Transition: between two pins, any subset of
        the legal cuts is made; a cut starts a new stage, whose kind is free.
        """
        last = self.num_stages - 1 if self.num_stages else None
        points = sorted((self.atoms[pin.layer], number, pin) for number, pin in pins)
        steps = [(atom, pin.stage, pin.kind) for atom, _, pin in points]
        steps.append((self.num_atoms - 1, last, None))
        every = (1 << min(self.num_atoms, self.most_stages or self.num_atoms)) - 1
        states: dict[str | None, int] = {None: 1}
        before = 0
        for atom, stage, kind in steps:
            states[None] = states.get(None, 0) | _further(states, atom - before, every)
            allowed = every if stage is None else every & 1 << stage
            # A stage without a cut since the last pin keeps that pin's kind.
            kept: dict[str | None, int] = {}
            for other, numbers in states.items():
                if kind in (None, other) or other is None:
                    kept[kind or other] = kept.get(kind or other, 0) | numbers & allowed
            if not any(kept.values()):
                return True
            states, before = kept, atom
        return False


def _further(states: dict[str | None, int], cuts: int, every: int) -> int:
    """Return the stage numbers reachable with at least one and at most ``cuts`` more cuts."""
    reached = 0
    for numbers in states.values():
        reached |= numbers << 1 & every
    # Doubling: after `width` possible cuts, shift by up to as many again.
    width = 1
    while width < cuts:
        step = min(width, cuts - width)
        reached |= reached << step & every
        width += step
    return reached if cuts else 0


def _check_order(chain: _Chain, pins: Pins, limit: str) -> None:
    if not chain.contradicts(pins):
        return
    found = least_conflict(pins, chain.contradicts)
    free = _Chain(chain.atoms, chain.num_atoms)
    with_limit = "" if free.contradicts(found) else f" with {limit}"
    if len(found) == 1:
        raise _refusal(_alone(chain, found[0], with_limit))
    quantity = "both" if len(found) == 2 else "all"
    why = _why(chain, sorted(found, key=lambda entry: chain.atoms[entry[1].layer]))
    raise _refusal(
        f"{describe_pins(found)} cannot {quantity} be kept{with_limit}: {why}; "
        "change or drop one of them"
    )


def _alone(chain: _Chain, entry: tuple[int, Pin], with_limit: str) -> str:
    """Describe a single impossible pin: too few cuts before the layer, or after it."""
    stage, front = entry[1].stage or 0, chain.atoms[entry[1].layer]
    if stage > front:
        return (
            f"{describe_pins([entry])} cannot be kept: {stage} cuts are needed before the layer, "
            f"but only {front} are allowed{chain.forbidding}; pin it to stage {front} or lower"
        )
    behind = chain.num_atoms - 1 - front
    needed = (chain.num_stages or stage + 1) - 1 - stage
    return (
        f"{describe_pins([entry])} cannot be kept{with_limit}: {needed} cuts are needed after the "
        f"layer, but only {behind} are allowed{chain.forbidding}; pin it to a later stage or ask "
        "for fewer stages"
    )


def _why(chain: _Chain, pins: Sequence[tuple[int, Pin]]) -> str:
    """Describe the first contradiction between neighbouring pins in the layers' order."""
    staged = [pin for _, pin in pins if pin.stage is not None]
    for one, other in pairwise(staged):
        first, second = one.stage or 0, other.stage or 0
        allowed = chain.atoms[other.layer] - chain.atoms[one.layer]
        if one.layer == other.layer and first != second:
            return "a layer belongs to one stage"
        if first > second:
            return f"{one.layer!r} comes before {other.layer!r}, and stages follow the layers"
        if second - first > allowed:
            return (
                f"{second - first} cuts are needed between {one.layer!r} and {other.layer!r}, but "
                f"only {allowed} are allowed{chain.forbidding}"
            )
    return "a stage runs on one kind of device, and there are too few cuts between the layers"


def _refusal(message: str) -> InvalidInput:
    return InvalidInput(message, field="/options/pins")
