"""A search that takes a while, importable where plans are searched for."""

from __future__ import annotations

import time
from typing import Any

from stagewright.api.planning.service import decide

DURATION_S = 2.0


def late(*arguments: Any) -> Any:
    time.sleep(DURATION_S)
    return decide(*arguments)


def ready() -> int:
    return 7
