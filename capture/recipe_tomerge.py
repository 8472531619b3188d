"""How a model was captured, in a few words, so that it can be captured the same way again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ..core.errors import InvalidInput


@dataclass(frozen=True)
class Recipe:
    """The tracer that was accepted, and what it had to leave as written.

    Attributes:
        tracer: ``sequential``, ``export``, ``trace`` or ``modules``.
        opaque: Why modules are called as their author wrote them, by path.
        evaluation: Whether evaluation has a graph of its own.
    """

    tracer: str
    opaque: dict[str, str] = field(default_factory=dict)
    evaluation: bool = False

    def to_json(self) -> str:
        data = {"tracer": self.tracer, "opaque": self.opaque, "evaluation": self.evaluation}
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read what `to_json` wrote.

        Raises:
            InvalidInput: The text is no recipe.
        """
        try:
            data = json.loads(text)
            return cls(str(data["tracer"]), dict(data["opaque"]), bool(data["evaluation"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"no capture recipe: {error!r}") from None
