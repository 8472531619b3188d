"""Dropout masks: recorded while a pipeline runs, given to the unsplit model afterwards.

Ranks draw from generators of their own, in their schedule's order, so no seed makes the unsplit
model draw the same. What can be asked is that the split step is exactly the unsplit step with the
masks that were drawn. A mask is known by its width, which no two dropouts of the model share, and
by its place among those of that width: every schedule takes a stage's micro-batches in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Masks = dict[int, list[NDArray[Any]]]
"""The masks of each width, in the order they were drawn."""


class Recording(TorchDispatchMode):
    """Keeps every mask that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: Masks = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _draws(func):
            self.masks[result.shape[-1]].append(result.numpy().copy())
        return result


class Replay(TorchDispatchMode):
    """Hands out recorded masks instead of drawing."""

    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self._masks = {width: iter(drawn) for width, drawn in masks.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _draws(func):
            return func(*args, **(kwargs or {}))
        target: Tensor = args[0]
        return target.copy_(torch.from_numpy(next(self._masks[target.shape[-1]])))


def merged(ranks: Iterable[Masks]) -> Masks:
    """Return the masks of all ranks; each dropout is on one of them."""
    return {width: drawn for masks in ranks for width, drawn in masks.items()}


def _draws(func: Any) -> bool:
    return bool(func == torch.ops.aten.bernoulli_.float)
