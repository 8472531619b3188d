"""Keep a library's loggers from printing what is about to be raised as an error of ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_loggers(prefix: str) -> Iterator[None]:
    """Silence every logger of that name or below it, for a while."""
    found = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name == prefix or name.startswith(f"{prefix}.")
    ]
    before = [logger.disabled for logger in found]
    for logger in found:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(found, before, strict=True):
            logger.disabled = disabled
