"""Build a planned model for training, across processes or in one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import nn

from ..capture.capture import default_device
from ..core.errors import InvalidInput
from ..core.models.training_memory import Recipe
from ..core.plan.plan import Plan
from .batchnorm.running_statistics import BatchStatistics
from .distributed import DistributedPipeline
from .engine.aux_losses import AuxLosses
from .engine.batch_io import LossFunction
from .engine.loss_reduction import LossReduction
from .engine.stage import autocast_to
from .meta_init.materialise import materialise_whole
from .meta_init.meta_capture import check_weights
from .meta_init.weights import Weights
from .pipeline import Pipeline
from .recipe import choose_autocast, choose_recipe, convert_model
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
    precision: Recipe | Literal["plan"] | None = "plan",
    keyed_dropout: int | None = None,
    batch_statistics: BatchStatistics = "microbatch",
    aux_losses: AuxLosses | None = None,
    strategy: Strategy | Mapping[int, Strategy] | None = None,
    loss_reduction: LossReduction = "mean",
    **loop: Unpack[_Loop],
) -> Training:
    """Build a planned model for training: across processes under torchrun, or in one process.

    With ``torch.distributed`` initialised, every rank calls this and gets its own stages.

    Args:
        plan: Where to cut, and in which order to work.
        model: The model the plan was made for; on the meta device ranks allocate their stages only.
        loss_fn: ``loss_fn(output, target)`` of a micro-batch; in one process, the batch.
        weights: Source of the values of a model on the meta device; a path is a checkpoint's.
        devices: This rank's device, or in one process one per stage; `None` for the model's.
        group: The ranks, in order; the default group if `None`.
        sample: See `cut_for_plan`.
        autocast: The dtype to autocast stages and loss to; weights and gradients keep theirs.
        precision: Recipe of precision, by default the plan's: the model is converted to its type of
            weights in place, gradients are summed in its type, and `Training.optimizer` keeps
            master weights. `None` leaves the model as it is; so do plans without one.
        keyed_dropout: See `DistributedPipeline`.
        batch_statistics: See `DistributedPipeline`.
        aux_losses: See `DistributedPipeline`.
        strategy: See `DistributedPipeline`; replicas need processes.
        loss_reduction: What ``loss_fn`` is over samples; see `DistributedPipeline`.
        **loop: ``max_norm``, ``accumulate`` and ``loss_scale``; see `Training`.

    Raises:
        PlanMismatch: The plan is for another model or another number of ranks.
        InvalidInput: An argument is invalid, or torchrun's process group was not initialised.
    """
    recipe = choose_recipe(plan, precision)
    autocast = choose_autocast(recipe, autocast)
    weights = Weights(checkpoint=weights) if isinstance(weights, str | Path) else weights
    common = _Common(
        sample=sample, keyed_dropout=keyed_dropout, batch_statistics=batch_statistics,
        aux_losses=aux_losses,
    )  # fmt: skip
    convert_model(model, recipe, plan, strategy)
    places = _list_devices(devices)
    if not dist.is_initialized():
        _check_single_process(strategy)
        local = _build_local(model, plan, weights, places, autocast, common)
        return Training(local, loss_fn=loss_fn, autocast=autocast, recipe=recipe, **loop)
    pipeline = _build_distributed(
        model, plan, (loss_fn, loss_reduction), weights, places, group, strategy, autocast, common
    )
    return Training(pipeline, recipe=recipe, **loop)


class _Loop(TypedDict, total=False):
    """Arguments of `Training` for both kinds of pipeline."""

    max_norm: float | None
    accumulate: int
    loss_scale: LossScale | Literal["auto"] | None


class _Common(TypedDict):
    """Arguments of both kinds of pipeline."""

    sample: Any
    keyed_dropout: int | None
    batch_statistics: BatchStatistics
    aux_losses: AuxLosses | None


def _build_distributed(
    model: nn.Module,
    plan: Plan,
    loss: tuple[LossFunction, LossReduction],
    weights: Weights | None,
    devices: Sequence[torch.device],
    group: dist.ProcessGroup | None,
    strategy: Strategy | Mapping[int, Strategy] | None,
    autocast: torch.dtype | None,
    common: _Common,
) -> DistributedPipeline:
    if len(devices) > 1:
        raise InvalidInput(f"a rank has one device, not {len(devices)}; pass this rank's")
    return DistributedPipeline(
        model,
        plan,
        loss_fn=loss[0],
        loss_reduction=loss[1],
        device=devices[0] if devices else None,
        group=group,
        autocast=autocast,
        strategy=strategy,
        weights=weights,
        **common,
    )


def _build_local(
    model: nn.Module,
    plan: Plan,
    weights: Weights | None,
    devices: Sequence[torch.device],
    autocast: torch.dtype | None,
    common: _Common,
) -> Pipeline:
    check_weights(model, weights)
    if weights is not None:
        materialise_whole(model, weights, _materialisation_device(devices))
    # Captured under autocast, so that boundaries have the dtypes that training will give them.
    with autocast_to(devices[0] if devices else default_device(model), autocast):
        return Pipeline(model, plan, devices=devices or None, **common)


def _list_devices(
    devices: torch.device | str | Sequence[torch.device | str] | None,
) -> list[torch.device]:
    if devices is None:
        return []
    if isinstance(devices, str | torch.device):
        return [torch.device(devices)]
    return [torch.device(device) for device in devices]


def _materialisation_device(devices: Sequence[torch.device]) -> torch.device:
    """Return where a whole model gets its values: for several devices, on the CPU."""
    if len(devices) == 1:
        return devices[0]
    return torch.device("cuda" if not devices and torch.cuda.is_available() else "cpu")


def _check_single_process(strategy: Strategy | Mapping[int, Strategy] | None) -> None:
    # Under torchrun, forgetting init_process_group would make every process train all of the
    # model by itself, without an error.
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise InvalidInput(
            f"{started} processes were started, but they are not connected; call "
            "stagewright.init_process_group() before build, on every rank"
        )
    if strategy is not None:
        raise InvalidInput(
            "strategy= is for replicas, and a single process has none; start one process per device"
        )
