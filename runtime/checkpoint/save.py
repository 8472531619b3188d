"""Saving of a training run's model, optimizer and random state."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..checkpoint_files.checksums import Sums, compute_own_sums
from ..checkpoint_files.manifest import Checkpoint, SavedTensor, model_key, random_key
from ..checkpoint_files.rank_agreement import RankAgreement, silence_warnings, simplify_errors
from ..checkpoint_files.step_folder import (
    abandon_step,
    begin_step,
    keep_newest,
    lock_folder,
    publish_step,
)
from ..checkpoint_files.tensors import describe, to_json_value
from ..distributed import DistributedPipeline
from .optimizer_state import merge_optimizers, read_optimizer
from .target import CheckpointTarget, find_target


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
    """Save a model and its optimizer between two steps; a run under any plan can resume from it.

    All ranks must call it. Each tensor is stored once, under its name in the model. A crash at any
    moment leaves earlier checkpoints intact; when this returns, the step is on disk.

    Args:
        folder: Folder of the run's checkpoints, shared by all ranks; created if needed. Each step
            has its own folder in it.
        model: A `DistributedPipeline`, a `Pipeline`, or any module.
        optimizer: Optimizer of this rank's parameters; `None` on ranks without parameters.
        step: Number of steps taken. A checkpoint of the same step is replaced.
        extra: Additional JSON values, such as the epoch or ``scheduler.state_dict()``; those of
            rank 0 are saved.
        keep: Delete all but this many latest checkpoints; keep all if `None`.
        plan: Plan to record in the checkpoint; a `DistributedPipeline` provides it.
        random_state: Save each rank's random generators.
        group: The ranks; by default those of the pipeline, or all.

    Returns:
        The step's folder.

    Raises:
        InvalidInput: A value cannot be saved, ranks disagree, or the folder is not writable; all
            ranks raise it, and the message names the rank.
        RankFailed: A rank died meanwhile (with a `DistributedPipeline`).
    """
    if keep is not None and keep < 1:
        raise InvalidInput(f"keep is {keep}; keep 1 or more, or None for all")
    target = find_target(model, group)
    if target.unsaved:
        logging.getLogger(__name__).warning(
            "the extra state of %s (get_extra_state) is not saved; pass it in extra",
            ", ".join(target.unsaved),
        )
    with target.explained("saving a checkpoint"), ExitStack() as cleanup:
        describe_part = partial(
            _describe_part, target, optimizer, step, extra or {}, plan, random_state
        )
        return _save_step(Path(folder), target.ranks, describe_part, keep, cleanup)


def _save_step(
    folder: Path,
    ranks: RankAgreement,
    describe_part: Callable[[dict[str, Tensor]], Checkpoint],
    keep: int | None,
    cleanup: ExitStack,
) -> Path:
    tensors: dict[str, Tensor] = {}

    def start(parts: Sequence[Checkpoint]) -> tuple[str, Checkpoint]:
        record = _merge(parts)
        # Undone in reverse order, also after an error: the folder first, then the lock.
        cleanup.enter_context(lock_folder(folder))
        started = begin_step(folder, record.step)
        cleanup.callback(abandon_step, started)
        return started.name, record

    # Nothing is written before all ranks agree on the record, and the step gets its name only
    # after all ranks have written their files to disk.
    name, record = ranks.reduce(lambda: describe_part(tensors), start)
    started = folder / name
    ranks.each(lambda: _check_shared(started))
    _write_tensors(started, tensors, ranks)

    def finish(sums: Sequence[Sums]) -> str:
        path = publish_step(started, record, dict(ChainMap(*map(dict, sums))))
        # Not earlier: until the new step is published, an old one may be the only good one.
        if keep is not None:
            keep_newest(folder, keep)
        return path.name

    own_sums = partial(compute_own_sums, started, ranks.rank, ranks.size)
    return folder / ranks.reduce(own_sums, finish)


def _describe_part(
    target: CheckpointTarget,
    optimizer: Optimizer | None,
    step: int,
    extra: Mapping[str, Any],
    plan: Plan | None,
    random_state: bool,
    tensors: dict[str, Tensor],
) -> Checkpoint:
    """Return the manifest of this rank's part, and collect its tensors by key in ``tensors``."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InvalidInput(f"step is {step!r}; give the number of steps taken")
    target.check_memory()
    whole = {name: target.in_whole(tensor) for name, tensor in target.tensors.items()}
    tensors.update((model_key(name), tensor) for name, tensor in whole.items())
    saved = None
    if optimizer is not None:
        saved, slots = read_optimizer(optimizer, target.canonical_names(), target.in_whole)
        tensors.update(slots)
    states: dict[Literal["cpu", "cuda"], Tensor] = {}
    if random_state:
        states["cpu"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
    rank = target.ranks.rank
    tensors.update((random_key(rank, generator), state) for generator, state in states.items())
    return Checkpoint(
        step=step,
        ranks=1,
        pipeline_steps=target.steps,
        plan=plan.content_id() if plan else target.plan,
        model={name: describe(name, tensor) for name, tensor in whole.items()},
        aliases=target.aliases(),
        optimizer=saved,
        random=(tuple(states),),
        extra={key: to_json_value(f"extra[{key!r}]", value) for key, value in extra.items()},
    )


def _merge(parts: Sequence[Checkpoint]) -> Checkpoint:
    """Merge the parts of all ranks; raise `InvalidInput` if they disagree."""
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
    random = tuple(generators for part in parts for generators in part.random)
    changes = {
        "ranks": len(parts),
        "model": model,
        # What another rank stores as a tensor under this name is no alias.
        "aliases": {alias: name for alias, name in aliases.items() if alias not in model},
        "optimizer": merge_optimizers(optimizers) if optimizers else None,
        "random": random if any(random) else (),
    }
    return parts[0].model_copy(update=changes)


def _check_shared(started: Path) -> None:
    if not started.is_dir():
        raise InvalidInput(
            f"{started.parent} is not the folder that rank 0 writes to; use a folder that all "
            "machines share under the same path"
        )


def _write_tensors(started: Path, tensors: Mapping[str, Tensor], ranks: RankAgreement) -> None:
    """Write all tensors, each on the lowest rank that holds it, and sync them to disk."""
    with simplify_errors(f"cannot write {started}"), silence_warnings():
        save(
            dict(tensors),
            # Synced before the rename that publishes the step: a name must never be durable before
            # the data it stands for.
            storage_writer=FileSystemWriter(started, sync_files=True),
            # By the lowest rank, so that all buffers are from the same replica.
            planner=DefaultSavePlanner(
                # The dictionary is flat; flattening would only add a mapping to torch's index.
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
                dedup_save_to_lowest_rank=True,
            ),
            process_group=ranks.group,
            no_dist=not ranks.together,
        )
