"""All stages of a rank as one module, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor, nn

from ...capture.program.segment import Segment


class RankModule(nn.Module):
    """What a rank with several stages holds: their parameters and buffers, each once.

    The stages themselves are no children, so that names are those of the model; modes and moves
    reach them all the same. It is not called: the stages are.

    Args:
        stages: Of one rank; their parameters and buffers are the model's own objects.
    """

    def __init__(self, stages: Sequence[Segment]) -> None:
        super().__init__()
        object.__setattr__(self, "_stages", tuple(stages))
        self._hold()
        self.training = all(stage.training for stage in stages)

    _stages: tuple[Segment, ...]

    def train(self, mode: bool = True) -> Self:
        """See `Segment.train`."""
        for stage in self._stages:
            stage.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        moved: dict[Tensor, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            """A tensor that two stages hold stays one."""
            if tensor not in moved:
                moved[tensor] = fn(tensor)
            return moved[tensor]

        for stage in self._stages:
            stage._apply(once, recurse)
        self._hold()
        return self

    def _hold(self) -> None:
        for stage in self._stages:
            for path, module in stage.named_modules(remove_duplicate=False):
                here = _made(self, path)
                for name, parameter in module._parameters.items():
                    here.register_parameter(name, parameter)
                for name, buffer in module._buffers.items():
                    persistent = name not in module._non_persistent_buffers_set
                    here.register_buffer(name, buffer, persistent=persistent)


def _made(root: nn.Module, path: str) -> nn.Module:
    """The module of that path, made empty where there is none."""
    here: Any = root
    for part in path.split(".") if path else ():
        if part not in here._modules:
            here.add_module(part, nn.Module())
        here = here._modules[part]
    return here  # type: ignore[no-any-return]


def build_rank_module(stages: Sequence[Segment]) -> nn.Module:
    """One stage as it is, several as one module."""
    return stages[0] if len(stages) == 1 else RankModule(stages)
