"""Records that write only what differs from its default: thousands of them in one document."""

from __future__ import annotations

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from .document import Record


class CompactRecord(Record):
    """A record whose JSON leaves out every field that has its default value."""

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, write: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a return type would replace the schema
        written: dict[str, Any] = write(self)
        fields = type(self).model_fields
        return {
            name: value
            for name, value in written.items()
            if fields[name].is_required()
            or getattr(self, name) != fields[name].get_default(call_default_factory=True)
        }
