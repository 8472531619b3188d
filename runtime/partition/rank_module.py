"""Rank module: all stages of a rank as one module, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor, nn

from ...capture.program.segment import Segment


class RankModule(nn.Module):
    """The parameters and buffers of a rank with several stages, each once.

    The stages are not children, so that names are those of the model, but they follow changes of
    mode, device and dtype. The module itself is never called.
    """

    def __init__(self, stages: Sequence[Segment]) -> None:
        super().__init__()
        object.__setattr__(self, "_stages", tuple(stages))
        self._register()
        self.training = all(stage.training for stage in stages)

    _stages: tuple[Segment, ...]

    def train(self, mode: bool = True) -> Self:
        """Switch the mode of all stages; see `Segment.train`."""
        for stage in self._stages:
            stage.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        moved: dict[Tensor, Tensor] = {}

        # A tensor held by two stages must stay a single one, so it is converted only once.
        def once(tensor: Tensor) -> Tensor:
            if tensor not in moved:
                moved[tensor] = fn(tensor)
            return moved[tensor]

        for stage in self._stages:
            stage._apply(once, recurse)
        self._register()
        return self

    def _register(self) -> None:
        for stage in self._stages:
            for path, module in stage.named_modules(remove_duplicate=False):
                here = _get_or_create(self, path)
                for name, parameter in module._parameters.items():
                    here.register_parameter(name, parameter)
                if type(module) not in (nn.Module, Segment):  # its code may replace them
                    here._buffers = module._buffers
                for name, buffer in module._buffers.items():
                    persistent = name not in module._non_persistent_buffers_set
                    here.register_buffer(name, buffer, persistent=persistent)


def _get_or_create(root: nn.Module, path: str) -> nn.Module:
    """Return the module at a path, creating empty modules where there are none."""
    here: Any = root
    for part in path.split(".") if path else ():
        if part not in here._modules:
            here.add_module(part, nn.Module())
        here = here._modules[part]
    return here  # type: ignore[no-any-return]


def build_rank_module(stages: Sequence[Segment]) -> nn.Module:
    """Return a single stage as it is, or several as a `RankModule`."""
    return stages[0] if len(stages) == 1 else RankModule(stages)
