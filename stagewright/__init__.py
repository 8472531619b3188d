"""Stagewright: where to cut a PyTorch model into pipeline stages, and how to run it so.

Everything here is loaded on first use; importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .balance import balance_by_size as balance_by_size
    from .balance import balance_by_time as balance_by_time
    from .client.client import AsyncClient as AsyncClient
    from .client.client import Client as Client
    from .core.cluster.cluster import Cluster as Cluster
    from .core.errors import StagewrightError as StagewrightError
    from .core.graph.graph import Graph as Graph
    from .core.plan.plan import Plan as Plan
    from .core.plan.plan import PlanOptions as PlanOptions
    from .core.plan.schedule import Schedule as Schedule
    from .core.plan.timeline import Timeline as Timeline
    from .core.profile.forward_only import for_inference as for_inference
    from .core.profile.profile import Profile as Profile
    from .data import PipelineLoader as PipelineLoader
    from .formats.check_cut import check as check
    from .formats.check_cut import import_ as import_
    from .formats.runtimes.registry import export as export
    from .planner.explain import explain as explain
    from .planner.plan import Planner as Planner
    from .planner.plan import plan as plan
    from .planner.validation.validate import validate as validate
    from .profiler.estimates.estimate import estimate as estimate
    from .profiler.measure.profile import profile as profile
    from .runtime.build import build as build
    from .runtime.checkpoint.load import latest_step as latest_step
    from .runtime.checkpoint.load import load_checkpoint as load_checkpoint
    from .runtime.checkpoint.save import save_checkpoint as save_checkpoint
    from .runtime.compare import compare as compare
    from .runtime.compare import corrected as corrected
    from .runtime.distributed import DistributedPipeline as DistributedPipeline
    from .runtime.inference.distributed import (
        DistributedInferencePipeline as DistributedInferencePipeline,
    )
    from .runtime.inference.pipeline import InferencePipeline as InferencePipeline
    from .runtime.meta_init.weights import Weights as Weights
    from .runtime.pipeline import Pipeline as Pipeline
    from .runtime.ranks.process_groups import init_process_group as init_process_group
    from .runtime.replicas.grad_scaler import LossScale as LossScale
    from .runtime.trace import record as record
    from .runtime.training import Training as Training
    from .runtime.verify import verify as verify

_NAMES = {
    "balance": ("balance_by_size", "balance_by_time"),
    "client.client": ("AsyncClient", "Client"),
    "core.cluster.cluster": ("Cluster",),
    "core.errors": ("StagewrightError",),
    "core.graph.graph": ("Graph",),
    "core.plan.plan": ("Plan", "PlanOptions"),
    "core.plan.schedule": ("Schedule",),
    "core.plan.timeline": ("Timeline",),
    "core.profile.forward_only": ("for_inference",),
    "core.profile.profile": ("Profile",),
    "data": ("PipelineLoader",),
    "formats.check_cut": ("check", "import_"),
    "formats.runtimes.registry": ("export",),
    "planner.explain": ("explain",),
    "planner.plan": ("Planner", "plan"),
    "planner.validation.validate": ("validate",),
    "profiler.estimates.estimate": ("estimate",),
    "profiler.measure.profile": ("profile",),
    "runtime.build": ("build",),
    "runtime.checkpoint.load": ("latest_step", "load_checkpoint"),
    "runtime.checkpoint.save": ("save_checkpoint",),
    "runtime.compare": ("compare", "corrected"),
    "runtime.distributed": ("DistributedPipeline",),
    "runtime.inference.distributed": ("DistributedInferencePipeline",),
    "runtime.inference.pipeline": ("InferencePipeline",),
    "runtime.meta_init.weights": ("Weights",),
    "runtime.pipeline": ("Pipeline",),
    "runtime.ranks.process_groups": ("init_process_group",),
    "runtime.replicas.grad_scaler": ("LossScale",),
    "runtime.trace": ("record",),
    "runtime.training": ("Training",),
    "runtime.verify": ("verify",),
}
"""Public names by the module that defines them."""

_HOME = {name: home for home, names in _NAMES.items() for name in names}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'stagewright' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
