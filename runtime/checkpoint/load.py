"""Resuming a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.errors import InvalidInput
from ..checkpoint_files.manifest import RECORD, Checkpoint, model_key, random_key
from ..checkpoint_files.safe_reader import read_tensors
from ..checkpoint_files.step_folder import check, find, saved_steps
from ..distributed import DistributedPipeline
from ..pipeline import Pipeline
from ..random_state import allocate_random_states, restore
from .compatibility import Match, compare, match
from .optimizer_state import check_optimizer, fill_optimizer, room_for
from .target import Target, target_of


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: As given when it was saved.
        extra: Likewise; tuples have become lists.
        missing: Names of the model that the checkpoint lacks, which kept their values; empty
            unless ``strict=False``.
        unused: Names of the checkpoint that the model lacks; likewise.
        path: The step's folder.
    """

    step: int
    extra: dict[str, JsonValue]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    path: Path


def latest_step(folder: str | Path) -> int | None:
    """The step `load_checkpoint` would take; `None` if nothing was saved yet."""
    return find(Path(folder))[1].step if saved_steps(Path(folder)) else None


def load_checkpoint(
    folder: str | Path,
    model: DistributedPipeline | nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    random_state: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Go on from a saved step, under the plan it was saved under or any other.

    Every rank calls it, with its part of the model. Values are converted to the device and the
    floating-point type of the model. Nothing is changed unless all of it fits and every file holds
    what was written into it; a disk that fails behind that leaves the model half loaded.

    Args:
        folder: As given to `save_checkpoint`, or one step's folder in it.
        model: A `DistributedPipeline`, a `Pipeline`, or any module.
        optimizer: Of this rank's parameters; `None` to load the model alone. Its hyperparameters
            become the saved ones, but how it computes (``fused``, ``capturable``) stays.
        step: Which; the one saved last if `None`.
        strict: Whether every name must be in both; else what only one has is left alone.
        random_state: Whether to set the random generators; as many ranks as saved must load.
        group: The ranks; those of the pipeline, or all there are, if `None`.

    Raises:
        InvalidInput: There is no such step, it is damaged, or does not fit; every rank raises it.
        RankFailed: A rank died meanwhile (from a `DistributedPipeline`).
    """
    target = target_of(model, group)
    ranks = target.ranks
    with target.explained("loading a checkpoint"):
        name = ranks.first(lambda: find(Path(folder), step)[0].name)
        loads: list[_Load] = []

        def prepare() -> Match:
            loads.append(_prepare(_path(Path(folder), name), target, optimizer, random_state))
            return loads[0].match

        matches = ranks.each(prepare)
        (mine,) = loads
        with_optimizer = any(ranks.each(lambda: optimizer is not None))
        difference = compare(mine.record, matches, with_optimizer=with_optimizer, strict=strict)
        ranks.each(mine.make_room)
        read_tensors(mine.path, mine.room, ranks)
        ranks.each(mine.finish)
    if isinstance(model, DistributedPipeline | Pipeline):
        taken = mine.record.pipeline_steps
        model.steps = mine.record.step if taken is None else taken
    return Loaded(
        mine.record.step, mine.record.extra, difference.missing, difference.unused, mine.path
    )


class _Load:
    """One rank's part of loading a step."""

    def __init__(
        self,
        path: Path,
        record: Checkpoint,
        target: Target,
        optimizer: Optimizer | None,
        random_state: bool,
    ) -> None:
        self.path = path
        self.record = record
        self.match = match(target, optimizer, record)
        self.room: dict[str, Tensor] = {}
        self._target = target
        self._optimizer = optimizer
        ranks = target.ranks
        self._random = (
            allocate_random_states(record, ranks.rank, ranks.size) if random_state else {}
        )
        self._saved_names = {
            id(target.tensors[key]): name for key, name in self.match.names.items()
        }

    def make_room(self) -> None:
        """Find or make memory for everything that is read, by key.

        Raises:
            InvalidInput: The optimizer cannot take what was saved.
        """
        for key, name in self.match.names.items():
            self.room[model_key(name)] = self._target.tensors[key]
        if self._optimizer is not None:
            assert self.record.optimizer is not None
            check_optimizer(self._optimizer, self.record.optimizer, self._saved_names)
            self.room |= room_for(self._optimizer, self.record.optimizer, self._saved_names)
        for generator, state in self._random.items():
            self.room[random_key(self._target.ranks.rank, generator)] = state

    def finish(self) -> None:
        """Hand what was read to the optimizer and the generators."""
        if self._optimizer is not None:
            assert self.record.optimizer is not None
            fill_optimizer(self._optimizer, self.record.optimizer, self._saved_names, self.room)
        restore(self._random)


def _prepare(path: Path, target: Target, optimizer: Optimizer | None, random_state: bool) -> _Load:
    record = check(path)
    target.check_memory()
    if optimizer is not None and record.optimizer is None:
        raise InvalidInput(
            f"{path.name} was saved without an optimizer; load with optimizer=None, or another step"
        )
    return _Load(path, record, target, optimizer, random_state)


def _path(folder: Path, name: str) -> Path:
    """The step the first rank chose."""
    return folder if (folder / RECORD).exists() else folder / name
