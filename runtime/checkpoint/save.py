"""Saving a training run."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..checkpoint_files.checksums import Sums, sums_of_writer
from ..checkpoint_files.manifest import Checkpoint, SavedOptimizer, SavedTensor, model_key
from ..checkpoint_files.rank_agreement import Ranks, plain_errors, quiet
from ..checkpoint_files.step_folder import abandon, begin, keep_newest, locked, publish
from ..checkpoint_files.tensors import as_json, describe
from ..distributed import DistributedPipeline
from ..random_state import Generators, collect_random_states
from .optimizer_state import OptimizerPart, merge_optimizers, read_optimizer
from .target import Target, target_of


def save_checkpoint(
    folder: str | Path,
    model: DistributedPipeline | nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    plan: Plan | None = None,
    random_state: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a model and its optimizer between two steps, so that any plan can go on from there.

    Every rank calls it. Each tensor is stored once, under its name in the model, whoever holds it.
    A crash at any moment leaves what was saved before as it was; when this returns, the step is on
    the disk.

    Args:
        folder: One run's checkpoints, on a disk that all ranks share; made if needed. The step
            goes into a folder of its own there.
        model: A `DistributedPipeline`, a `Pipeline`, or any module.
        optimizer: Of this rank's parameters. Ranks without parameters have none.
        step: How many steps were taken. A step saved before is replaced.
        extra: What else to resume with, as JSON: the epoch, ``scheduler.state_dict()``. That of
            the first rank is kept.
        keep: Delete all but this many of the steps saved last; keep all if `None`.
        plan: What the model is trained by, noted in the checkpoint; a `DistributedPipeline` knows.
        random_state: Whether to save each rank's random generators too.
        group: The ranks; those of the pipeline, or all there are, if `None`.

    Returns:
        The step's folder.

    Raises:
        InvalidInput: Something cannot be saved, ranks disagree, or the folder cannot be written;
            every rank raises it, and names the rank at fault.
        RankFailed: A rank died meanwhile (from a `DistributedPipeline`).
    """
    if keep is not None and keep < 1:
        raise InvalidInput(f"keep is {keep}; keep 1 or more, or None for all")
    target = target_of(model, group)
    if target.unsaved:
        logging.getLogger(__name__).warning(
            "not saved is what get_extra_state returns of %s; put it into extra",
            ", ".join(target.unsaved),
        )
    ranks = target.ranks
    with target.explained("saving a checkpoint"), ExitStack() as held:
        part: list[_Part] = []

        def describe_part() -> _Described:
            part.append(_take_apart(target, optimizer, random_state))
            return part[0].described(target, step, extra, plan)

        def start(parts: Sequence[_Described]) -> tuple[str, Checkpoint]:
            record = _merge(parts)
            held.enter_context(locked(Path(folder)))
            started = begin(Path(folder), record.step)
            held.callback(abandon, started)
            return started.name, record

        name, record = ranks.reduce(describe_part, start)
        started = Path(folder) / name
        ranks.each(lambda: _check_shared(started))
        _write_tensors(started, part[0].tensors, ranks)

        def finish(sums: Sequence[Sums]) -> str:
            path = publish(started, record, dict(ChainMap(*map(dict, sums))))
            if keep is not None:
                keep_newest(Path(folder), keep)
            return path.name

        written = partial(sums_of_writer, started, ranks.rank, ranks.size)
        return Path(folder) / ranks.reduce(written, finish)


@dataclass(frozen=True)
class _Described:
    """What one rank tells the first of its part."""

    step: int
    pipeline_steps: int | None
    extra: dict[str, JsonValue]
    plan: str | None
    model: dict[str, SavedTensor]
    aliases: dict[str, str]
    optimizer: SavedOptimizer | None
    generators: Generators


@dataclass(frozen=True)
class _Part:
    """One rank's tensors by key, and the optimizer they were taken from."""

    tensors: dict[str, Tensor]
    optimizer: OptimizerPart | None
    generators: Generators

    def described(
        self, target: Target, step: int, extra: Mapping[str, Any] | None, plan: Plan | None
    ) -> _Described:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InvalidInput(f"step is {step!r}; give the number of steps taken")
        return _Described(
            step=step,
            pipeline_steps=target.steps,
            extra={key: as_json(f"extra[{key!r}]", value) for key, value in (extra or {}).items()},
            plan=plan.content_id() if plan else target.plan,
            model={name: describe(name, tensor) for name, tensor in target.tensors.items()},
            aliases=target.aliases(),
            optimizer=self.optimizer.saved if self.optimizer else None,
            generators=self.generators,
        )


def _take_apart(target: Target, optimizer: Optimizer | None, random_state: bool) -> _Part:
    target.check_memory()
    tensors = {model_key(name): tensor for name, tensor in target.tensors.items()}
    part = read_optimizer(optimizer, target.canonical_names()) if optimizer is not None else None
    tensors |= part.tensors if part else {}
    random = collect_random_states(target.ranks.rank) if random_state else {}
    generators: Generators = tuple(random)
    tensors |= {key: tensor for key, tensor in random.values()}
    return _Part(tensors, part, generators)


def _merge(parts: Sequence[_Described]) -> Checkpoint:
    """The record of all ranks' parts.

    Raises:
        InvalidInput: Ranks disagree.
    """
    model: dict[str, SavedTensor] = {}
    for rank, part in enumerate(parts):
        if part.step != parts[0].step:
            raise InvalidInput(f"rank 0 saves step {parts[0].step}, rank {rank} step {part.step}")
        for name, tensor in part.model.items():
            other = model.setdefault(name, tensor)
            if other != tensor:
                raise InvalidInput(
                    f"{name} is {other.dtype} {list(other.shape)} on one rank and {tensor.dtype} "
                    f"{list(tensor.shape)} on rank {rank}; give all ranks the same model"
                )
    aliases = {alias: name for part in parts for alias, name in part.aliases.items()}
    optimizers = [part.optimizer for part in parts if part.optimizer is not None]
    return Checkpoint(
        step=parts[0].step,
        ranks=len(parts),
        pipeline_steps=parts[0].pipeline_steps,
        plan=parts[0].plan,
        model=model,
        aliases={alias: name for alias, name in aliases.items() if alias not in model},
        optimizer=merge_optimizers(optimizers) if optimizers else None,
        random=tuple(part.generators for part in parts) if any(p.generators for p in parts) else (),
        extra=parts[0].extra,
    )


def _check_shared(started: Path) -> None:
    if not started.is_dir():
        raise InvalidInput(
            f"{started.parent} is not the folder that rank 0 writes to; save into one that all "
            "machines share, by the same path"
        )


def _write_tensors(started: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write all ranks' tensors, each by the lowest rank that holds it, and wait for the disk."""
    with plain_errors(f"cannot write {started}"), quiet():
        save(
            dict(tensors),
            storage_writer=FileSystemWriter(started, sync_files=True),
            # By the lowest rank, so that the buffers of a replica stay together.
            planner=DefaultSavePlanner(
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
                dedup_save_to_lowest_rank=True,
            ),
            process_group=ranks.group,
            no_dist=not ranks.together,
        )
