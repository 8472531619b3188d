"""Which engine runs a plan in processes, and what it would pass over."""

from __future__ import annotations

from typing import Literal, get_args

from ..core.errors import InvalidInput
from .batchnorm.running_statistics import BatchStatistics, checked_policy

Engine = Literal["stagewright", "torch"]


def check_engine(
    engine: Engine, *, keyed_dropout: int | None, batch_statistics: BatchStatistics
) -> None:
    """Refuse what an engine would pass over.

    Raises:
        InvalidInput: There is no such engine or policy, or torch's schedules have no place for it.
    """
    if engine not in get_args(Engine):
        raise InvalidInput(f"engine is {engine!r}; give one of {', '.join(get_args(Engine))}")
    checked_policy(batch_statistics)
    ignored = {
        "keyed_dropout": keyed_dropout is not None,
        "batch_statistics": batch_statistics != "microbatch",
    }
    found = [name for name, is_asked_for in ignored.items() if is_asked_for]
    if engine == "torch" and found:
        raise InvalidInput(
            f"torch's schedules take no {' and no '.join(found)}; use engine='stagewright'"
        )
