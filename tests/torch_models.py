"""The small models that capture, profiler and runtime are tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.graph import Graph
from stagewright.core.models.families import (
    GPT2Config,
    GPT2Spec,
    MLPConfig,
    MLPSpec,
    ModelSpec,
    ResNetConfig,
    ResNetSpec,
    UNetConfig,
    UNetSpec,
)
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.price_split import plan_from_balance
from stagewright.profiler.models.families import build_loss, build_model, training_batch

SPECS: dict[str, ModelSpec] = {
    "mlp": MLPSpec(family="mlp", config=MLPConfig(num_layers=4, hidden_size=32)),
    "resnet": ResNetSpec(family="resnet", config=ResNetConfig(depth=18, width=8, num_classes=10)),
    "unet": UNetSpec(family="unet", config=UNetConfig(width=4, depth=2)),
    "gpt2": GPT2Spec(
        family="gpt2",
        config=GPT2Config(
            n_layer=3, n_embd=32, n_head=4, vocab_size=64, n_positions=32, dropout=0.0
        ),
    ),
}

MICROBATCHES: dict[str, dict[str, tuple[int, ...]]] = {
    "mlp": {"input": (4, 64)},
    "resnet": {"x": (2, 3, 32, 32)},
    "unet": {"x": (2, 3, 16, 16)},
    "gpt2": {"input_ids": (2, 12)},
}


@dataclass(frozen=True)
class Case:
    """A model, one micro-batch for it, and its loss."""

    name: str
    spec: ModelSpec
    model: nn.Module
    sample: Any
    loss_fn: Callable[[Any, Tensor], Tensor]


def make_case(name: str, *, seed: int = 0) -> Case:
    """One of the four models of the field: plain, with BatchNorm, with long skips, tied."""
    if name == "gpt2":
        pytest.importorskip("transformers")
    torch.manual_seed(seed)
    spec = SPECS[name]
    model = build_model(spec)
    sample: Any = {
        key: torch.randint(0, 64, shape) if name == "gpt2" else torch.randn(shape)
        for key, shape in MICROBATCHES[name].items()
    }
    if isinstance(model, nn.Sequential):
        sample = tuple(sample.values())
    return Case(name, spec, model, sample, build_loss(spec))


def unmeasured_profile(graph: Graph, case: Case, structure: str) -> Profile:
    """A profile with made-up times, for tests of where cuts are made rather than why."""
    return Profile(
        model=graph.model,
        spec=case.spec,
        inputs=graph.inputs,
        input_structure=structure,
        layers=tuple(
            LayerProfile(layer=layer, forward=Timing(median_s=1), backward=Timing(median_s=2))
            for layer in graph.layers
        ),
        boundaries=graph.boundaries,
        parameters=graph.parameters,
        fixed_mode=graph.fixed_mode,
    )


def traced_profile(case: Case) -> Profile:
    """What `unmeasured_profile` makes of the case's own graph; traced once for equal cases."""
    from stagewright.capture.capture import trace

    key = _what_is_traced(case)
    if key not in TRACED:
        captured = trace(case.model, case.sample, check=False)
        TRACED[key] = unmeasured_profile(captured.graph, case, captured.structure.to_json())
    return TRACED[key]


TRACED: dict[tuple[object, ...], Profile] = {}
"""Tracing takes a second or two, and some files plan one model a dozen times."""


def _what_is_traced(case: Case) -> tuple[object, ...]:
    """Code, settings, modes and tensors of a model, and its sample: all but the values."""
    modules = [(type(module), module.training) for module in case.model.modules()]
    tensors = [*case.model.named_parameters(), *case.model.named_buffers()]
    values = case.sample.items() if isinstance(case.sample, dict) else enumerate(case.sample)
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return (
        case.name, repr(case.model), repr(case.spec), autocast, *modules,
        *((name, t.shape, t.dtype, t.requires_grad, t.device) for name, t in tensors),
        *((name, t.shape, t.dtype) for name, t in values if isinstance(t, Tensor)),
    )  # fmt: skip


def make_plan(
    case: Case,
    num_stages: int,
    *,
    num_microbatches: int = 4,
    schedule: Any = "1f1b",
    balance: list[int] | None = None,
    profile: Profile | None = None,
) -> Plan:
    """A plan of near-equal layer counts, or of the given ones."""
    profile = profile or traced_profile(case)
    if balance is None:
        base, extra = divmod(len(profile.layers), num_stages)
        balance = [base + (index < extra) for index in range(num_stages)]
    options = PlanOptions(num_microbatches=num_microbatches, schedule=schedule)
    return plan_from_balance(profile, Cluster.uniform(len(balance)), options, balance)


def make_batch(
    case: Case, plan: Plan, *, seed: int = 1, dtype: torch.dtype | None = None
) -> tuple[Any, Tensor]:
    """A whole batch as the model takes it, and its target."""
    inputs, target = training_batch(case.spec, plan.inputs, plan.num_microbatches, seed=seed)
    if dtype is not None:
        inputs = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in inputs.items()
        }
    if isinstance(case.model, nn.Sequential):
        return tuple(inputs.values()), target
    return inputs, target


def call(model: nn.Module, batch: Any) -> Any:
    """The model on a batch of either form."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)
