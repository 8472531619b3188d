"""Models that cannot be estimated, and what to do with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import CaptureError, MeasurementError, first_line


@contextmanager
def measured_instead(model: str) -> Iterator[None]:
    """Offer to measure a model that does not run without values.

    Args:
        model: Its class, for the message.

    Raises:
        CaptureError: It branches on data, recomputes at random or does something else that
            tensors without values cannot follow; the message says to measure it.
    """
    try:
        yield
    except (CaptureError, MeasurementError) as error:
        module, operation = getattr(error, "module", None), getattr(error, "operation", None)
        where = repr(module) if module else ""
        where += f" ({operation})" if module and operation else ""
        reason = f"{where} needs them" if where else first_line(error).rstrip(".")
        raise CaptureError(
            f"{model} cannot be estimated: an estimate runs without values, and {reason}. "
            "Measure it where it can run: stagewright.profile(model, sample), or 'stagewright "
            "profile package.module:model --sample package.module:sample'",
            module=module,
            operation=operation,
        ) from error
