"""Precisions by the names people write: short ones, and torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.errors import InvalidInput

if TYPE_CHECKING:
    from ...core.cluster.accelerators import Precision

PRECISIONS: dict[str, Precision] = {
    "fp32": "float32",
    "tf32": "tf32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def read_precision(text: str | None) -> Precision | None:
    """The precision by either name, such as ``bf16`` or ``bfloat16``; `None` for `None`.

    Raises:
        InvalidInput: There is none of that name.
    """
    if text is None:
        return None
    for short, precision in PRECISIONS.items():
        if text.lower() in (short, precision):
            return precision
    raise InvalidInput(
        f"--precision takes {', '.join(PRECISIONS)}, not {text!r}", field="/precision"
    )


def long_name(text: str | None) -> str | None:
    """A dtype's name in torch for its short one; what is neither stays as it is."""
    return text if text is None else PRECISIONS.get(text.lower(), text)
