"""Everything that is tried."""

from __future__ import annotations

from collections.abc import Iterator

from . import archives, bodies, floods, history, holding, wire
from .attack import Attack

PARTS = (bodies, floods, archives, wire, history, holding)


def corpus() -> Iterator[Attack]:
    """Every attack, those that start children last."""
    found = [attack for part in PARTS for attack in part.attacks()]
    yield from sorted(found, key=lambda attack: attack.is_heavy)
