"""Names of skip tensors that do not meet."""

from __future__ import annotations

import uuid

__all__ = ["Namespace"]


class Namespace:
    """Tells skip tensors of one name apart; see `Skippable.isolate`.

    Copies, also those made with a module, are the same namespace.
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
