"""The model that several stages of the check run as a pipeline, and an even plan for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_check.models.transformers import Llama
from stagewright.capture.capture import trace
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.price_split import plan_from_balance

MICROBATCHES = 4


@dataclass(frozen=True)
class Subject:
    """A model on a device, one batch of all micro-batches, and a plan with equal stages."""

    model: nn.Module
    tokens: Tensor
    plan: Plan

    @staticmethod
    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_subject(device: torch.device, num_stages: int, *, small: bool) -> Subject:
    """Build the same model, batch and plan on every rank: no dropout, head tied to the embedding.

    Times in the plan are made up: what a plan is worth is for other stages of the check.
    """
    torch.manual_seed(0)
    blocks, width, heads, vocabulary, tokens, batch = (
        (6, 32, 4, 64, 16, 2) if small else (12, 1024, 16, 16384, 512, 4)
    )
    model = Llama(
        blocks=blocks, width=width, heads=heads, key_heads=heads // 2, inner=3 * width,
        vocabulary=vocabulary,
    )  # fmt: skip
    sample = torch.randint(0, vocabulary, (batch * MICROBATCHES, tokens))
    captured = trace(model, {"tokens": sample[:batch]}, check=False)
    graph = captured.graph
    forward, backward = Timing(median_s=1e-3), Timing(median_s=2e-3)
    profile = Profile(
        model=graph.model,
        inputs=graph.inputs,
        input_structure=captured.structure.to_json(),
        layers=tuple(
            LayerProfile(layer=layer, forward=forward, backward=backward) for layer in graph.layers
        ),
        boundaries=graph.boundaries,
        parameters=graph.parameters,
    )
    each, left = divmod(len(graph.layers), num_stages)
    balance = [each + (index < left) for index in range(num_stages)]
    options = PlanOptions(num_microbatches=MICROBATCHES)
    plan = plan_from_balance(profile, Cluster.uniform(num_stages), options, balance)
    return Subject(model.to(device), sample.to(device), plan)
