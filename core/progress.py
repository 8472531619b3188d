"""Type of the progress callback."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with the number of items done, the total, and a description of the current one."""
