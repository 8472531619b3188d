"""Namespaces that keep skip tensors of equal name apart."""

from __future__ import annotations

import uuid

__all__ = ["Namespace"]


class Namespace:
    """Namespace for the names of skip tensors; see `Skippable.isolate`.

    Copies, such as those made by copying a module, compare equal.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __lt__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id < other.id


SkipName = tuple[Namespace | None, str]
"""Namespace of a skip tensor, if it has one, and its name in it."""
