"""Why something cannot be traced, in one short sentence of plain English."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..core.text_table import clipped

MOST = 100
"""Characters of a tracer's own words, where nothing plainer is known."""

_PLAIN = (
    (r"random number was drawn", "it draws random numbers in Python"),
    (r"could not guard on data-dependent|inputs to control flow|_local_scalar_dense",
     "it branches on its data"),
    (r"extract specialized integer|number computed from data|data-dependent expression",
     "it computes a number from its data and goes on with it in Python"),
    (r"the traced model is not the model|the traced model fails where",
     "traced it would not be the same model: hooks, state kept in Python, random numbers or a "
     "custom derivative get lost"),
    (r"lies in a no_grad or autocast region",
     "what has to stay as written lies in a no_grad or autocast region"),
)  # fmt: skip
"""What tracers say, and what it means, the most telling first."""

_PREFIX = re.compile(r"^(torch\.export: |torch\.fx: )?(CaptureError: )?")


def plain_reason(refusal: str) -> str:
    """A tracer's refusal as a clause with "it", or the first of the tracer's own words."""
    for pattern, meaning in _PLAIN:
        if re.search(pattern, refusal, re.IGNORECASE):
            return meaning
    first = _PREFIX.sub("", refusal.strip().partition("\n")[0])
    return clipped(first.replace("forward of the model itself ", "its own forward "), MOST)


def plainest(refusals: Sequence[str]) -> str:
    """One reason for several refusals of one model: the most telling known, else the first."""
    reasons = [plain_reason(refusal) for refusal in refusals]
    return next((meaning for _, meaning in _PLAIN if meaning in reasons), reasons[0])
