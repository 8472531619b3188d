"""`PlanOptions` from the words of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.errors import InvalidInput

if TYPE_CHECKING:
    from ...core.plan.plan import Pin


def number_or_any(text: str) -> int | None:
    """A number of replicas; `None` for ``any``.

    Raises:
        InvalidInput: Neither a number nor ``any``.
    """
    if text == "any":
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(
            f"--max-replicas takes a number or 'any', not {text!r}", field="/max_replicas"
        ) from None


def pair(text: str) -> tuple[str, str]:
    """Two layers that share a stage, from ``FIRST:LAST``.

    Raises:
        InvalidInput: The text is not two names.
    """
    first, colon, last = text.partition(":")
    if not (first and colon and last) or ":" in last:
        raise InvalidInput(
            f"--together takes two layer names as FIRST:LAST, not {text!r}", field="/together"
        )
    return first, last


def pins(texts: Sequence[str]) -> tuple[Pin, ...]:
    """Where layers have to be, from ``LAYER=STAGE`` or ``LAYER=@KIND``.

    Raises:
        InvalidInput: A text is neither.
    """
    return tuple(_pin(text) for text in texts)


def _pin(text: str) -> Pin:
    from ...core.plan.plan import Pin

    layer, _, place = text.rpartition("=")
    if layer and place.startswith("@") and len(place) > 1:
        return Pin(layer=layer, kind=place[1:])
    if layer and place.isascii() and place.isdigit():
        return Pin(layer=layer, stage=int(place))
    raise InvalidInput(
        f"--pin takes LAYER=STAGE, stages counted from 0, or LAYER=@KIND, not {text!r}",
        field="/pins",
    )
