"""Resuming of a training run from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.errors import InvalidInput
from ..checkpoint_files.manifest import RECORD, Checkpoint, model_key, random_key
from ..checkpoint_files.rank_agreement import RankAgreement
from ..checkpoint_files.safe_reader import read_tensors
from ..checkpoint_files.step_folder import check_step, find_step, list_steps
from ..distributed import DistributedPipeline
from ..pipeline import Pipeline
from .compatibility import TensorMatch, compare, match_tensors
from .optimizer_state import allocate_state, check_optimizer, fill_optimizer
from .target import CheckpointTarget, find_target


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Result of loading a checkpoint.

    Attributes:
        step: Step number given when saving.
        extra: Extra values given when saving; tuples have become lists.
        missing: Names in the model but not in the checkpoint, which kept their values; empty
            unless ``strict=False``.
        unused: Names in the checkpoint but not in the model; empty unless ``strict=False``.
        path: The step's folder.
    """

    step: int
    extra: dict[str, JsonValue]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    path: Path


def latest_step(folder: str | Path) -> int | None:
    """Return the step that `load_checkpoint` would load; `None` without checkpoints."""
    return find_step(Path(folder))[1].step if list_steps(Path(folder)) else None


def load_checkpoint(
    folder: str | Path,
    model: DistributedPipeline | nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    random_state: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Load a saved step, under the plan it was saved with or any other.

    All ranks must call it, with their part of the model. Values are converted to the device and
    floating-point type of the model. Nothing is changed until everything is known to fit and all
    checksums have been verified; only a disk error after that leaves the model partly loaded.

    Args:
        folder: The folder given to `save_checkpoint`, or one step's folder in it.
        model: A `DistributedPipeline`, a `Pipeline`, or any module.
        optimizer: Optimizer of this rank's parameters; `None` to load only the model. Saved
            hyperparameters replace its own, except for ``fused``, ``capturable`` and the like.
        step: Step to load; the latest if `None`.
        strict: Require equal names in model and checkpoint; otherwise ignore the others.
        random_state: Restore the random generators; the number of ranks must be unchanged.
        group: The ranks; by default those of the pipeline, or all.

    Raises:
        InvalidInput: The step does not exist, is damaged, or does not fit; all ranks raise it.
        RankFailed: A rank died meanwhile (with a `DistributedPipeline`).
    """
    target = find_target(model, group)
    ranks = target.ranks
    with target.explained("loading a checkpoint"):
        # Chosen by one rank: on a shared file system, another may still see an older latest step.
        name = ranks.first(lambda: find_step(Path(folder), step)[0].name)
        loads: list[_Load] = []

        def prepare() -> TensorMatch:
            # A folder of one step is that of the step that rank 0 chose.
            path = Path(folder) if (Path(folder) / RECORD).exists() else Path(folder) / name
            loads.append(_Load(path, target, optimizer, random_state))
            # Only the match is sent to the other ranks; the tensors stay here.
            return loads[0].match

        matches = ranks.each(prepare)
        (mine,) = loads
        # A rank without parameters has no optimizer, but must judge names as the others do.
        with_optimizer = any(ranks.each(lambda: optimizer is not None))
        missing, unused = compare(
            mine.record, matches, with_optimizer=with_optimizer, strict=strict
        )
        ranks.each(mine.make_room)
        # The first change: the model's own tensors are read into, optimizer state into new ones.
        read_tensors(mine.path, mine.room, ranks)
        ranks.each(mine.finish)
    if isinstance(model, DistributedPipeline | Pipeline):
        taken = mine.record.pipeline_steps
        model.steps = mine.record.step if taken is None else taken
    return LoadedCheckpoint(mine.record.step, mine.record.extra, missing, unused, mine.path)


class _Load:
    """One rank's part of loading a step."""

    def __init__(
        self,
        path: Path,
        target: CheckpointTarget,
        optimizer: Optimizer | None,
        random_state: bool,
    ) -> None:
        self.path, self._target, self._optimizer = path, target, optimizer
        self.record = check_step(path)
        target.check_memory()
        if optimizer is not None and self.record.optimizer is None:
            raise InvalidInput(
                f"{path.name} was saved without an optimizer; use optimizer=None or another step"
            )
        self.match = match_tensors(target, optimizer, self.record)
        self.room: dict[str, Tensor] = {}
        self._random = _allocate_random_states(self.record, target.ranks) if random_state else {}
        self._saved_names = {
            id(target.tensors[key]): name for key, name in self.match.names.items()
        }

    def make_room(self) -> None:
        """Collect or allocate the tensors to read into, by key."""
        for key, name in self.match.names.items():
            self.room[model_key(name)] = self._target.in_whole(self._target.tensors[key])
        if self._optimizer is not None:
            assert self.record.optimizer is not None
            check_optimizer(self._optimizer, self.record.optimizer, self._saved_names)
            self.room |= allocate_state(
                self._optimizer, self.record.optimizer, self._saved_names, self._target.in_whole
            )
        for generator, state in self._random.items():
            self.room[random_key(self._target.ranks.rank, generator)] = state

    def finish(self) -> None:
        """Pass the values read to the optimizer and the random generators."""
        if self._optimizer is not None:
            assert self.record.optimizer is not None
            fill_optimizer(self._optimizer, self.record.optimizer, self._saved_names, self.room)
        if "cpu" in self._random:
            torch.set_rng_state(self._random["cpu"])
        if "cuda" in self._random:
            torch.cuda.set_rng_state(self._random["cuda"])


def _allocate_random_states(record: Checkpoint, ranks: RankAgreement) -> dict[str, Tensor]:
    """Allocate tensors for the saved states of this rank's generators."""
    if not record.random:
        raise InvalidInput(
            "the checkpoint has no random state; save with random_state=True, or load without it"
        )
    if len(record.random) != ranks.size:
        raise InvalidInput(
            f"the random state was saved by {len(record.random)} ranks, but there are now "
            f"{ranks.size}; load with random_state=False, and seed the ranks yourself"
        )
    room: dict[str, Tensor] = {}
    for generator in record.random[ranks.rank]:
        if generator == "cpu":
            room[generator] = torch.empty_like(torch.get_rng_state())
        elif torch.cuda.is_available():
            room[generator] = torch.empty_like(torch.cuda.get_rng_state())
    return room
