"""From a plan and a model to training steps, on whatever this process is part of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..capture.capture import default_device
from ..core.errors import InvalidInput
from ..core.plan.plan import Plan
from .batchnorm.running_statistics import BatchStatistics
from .distributed import DistributedPipeline
from .engine.batch_io import LossFunction
from .engine.stage import autocast_to
from .meta_init.materialise import materialise_whole
from .meta_init.meta_checks import check_weights
from .meta_init.weights import Weights
from .pipeline import Pipeline
from .replicas.grad_scaler import LossScale
from .replicas.strategy import Strategy
from .training import Training


def build(
    plan: Plan,
    model: nn.Module,
    *,
    loss_fn: LossFunction,
    weights: Weights | str | Path | None = None,
    devices: torch.device | str | Sequence[torch.device | str] | None = None,
    group: dist.ProcessGroup | None = None,
    sample: Any = None,
    autocast: torch.dtype | None = None,
    keyed_dropout: int | None = None,
    batch_statistics: BatchStatistics = "microbatch",
    strategy: Strategy | Mapping[int, Strategy] | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    loss_scale: LossScale | Literal["auto"] | None = "auto",
) -> Training:
    """A planned model ready to train: across processes under torchrun, in one process without.

    Where ``torch.distributed`` is initialised this rank gets its stages, and every rank calls it
    with the same plan and model. Elsewhere all stages are in this process. The loop is the same.
    What else pipelines take (a schedule or engine of your own, chunks) is given to one of them,
    and that to `Training`.

    Args:
        plan: Where to cut, and in which order to work.
        model: The model the plan was made for. Built under ``torch.device("meta")`` it takes no
            memory, and each rank gives memory to its own stages alone.
        loss_fn: ``loss_fn(output, target)``, a mean: over each micro-batch in processes, over the
            batch in one process.
        weights: Where the values of a model on the meta device come from; a path is that of a
            checkpoint.
        devices: This rank's device; in one process also one for every stage. `None` leaves stages
            where the model is.
        group: The ranks, in order; the default group if `None`.
        sample: See `runtime.cut.cut_for_plan`.
        autocast: Run the stages and the loss under ``torch.autocast`` to this dtype; weights,
            gradients and optimizer state keep theirs.
        keyed_dropout: See `DistributedPipeline`.
        batch_statistics: See `DistributedPipeline`.
        strategy: See `DistributedPipeline`; replicas need processes.
        max_norm: See `Training`.
        accumulate: See `Training`.
        loss_scale: See `Training`.

    Raises:
        PlanMismatch: The plan is for another model or another number of ranks.
        InvalidInput: An argument is not what it may be, or torchrun's process group was not
            initialised.
    """
    if isinstance(weights, str | Path):
        weights = Weights(checkpoint=weights)
    places = _places(devices)
    across = dist.is_initialized()
    pipeline: DistributedPipeline | Pipeline
    if across:
        if len(places) > 1:
            raise InvalidInput(f"a rank has one device, not {len(places)}; give this rank's")
        pipeline = DistributedPipeline(
            model,
            plan,
            loss_fn=loss_fn,
            device=places[0] if places else None,
            group=group,
            sample=sample,
            autocast=autocast,
            keyed_dropout=keyed_dropout,
            batch_statistics=batch_statistics,
            strategy=strategy,
            weights=weights,
        )
    else:
        _check_alone(strategy)
        check_weights(model, weights)
        if weights is not None:
            materialise_whole(model, weights, _where(places))
        with autocast_to(places[0] if places else default_device(model), autocast):
            pipeline = Pipeline(
                model,
                plan,
                devices=places or None,
                sample=sample,
                batch_statistics=batch_statistics,
                keyed_dropout=keyed_dropout,
            )
    return Training(
        pipeline,
        loss_fn=None if across else loss_fn,
        autocast=None if across else autocast,
        max_norm=max_norm,
        accumulate=accumulate,
        loss_scale=loss_scale,
    )


def _places(
    devices: torch.device | str | Sequence[torch.device | str] | None,
) -> list[torch.device]:
    if devices is None:
        return []
    if isinstance(devices, str | torch.device):
        return [torch.device(devices)]
    return [torch.device(device) for device in devices]


def _where(places: Sequence[torch.device]) -> torch.device:
    """Where a model gets its values in one process: several devices get theirs from the CPU."""
    if len(places) == 1:
        return places[0]
    return torch.device("cuda" if not places and torch.cuda.is_available() else "cpu")


def _check_alone(strategy: Strategy | Mapping[int, Strategy] | None) -> None:
    """A process that others were started beside must not train a model of its own."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise InvalidInput(
            f"{started} processes were started, but they do not know of each other; call "
            "torch.distributed.init_process_group() before build, on every rank"
        )
    if strategy is not None:
        raise InvalidInput(
            "strategy= is about replicas, and one process has none; start one process a device"
        )
