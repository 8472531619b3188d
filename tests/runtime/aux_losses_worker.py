"""Ranks: balance losses kept as attributes, in stages with replicas; each prints a JSON line.

Run with the number of ranks and, as JSON, the replicas of each stage, its recomputation, and what
replicas do; or with the balance and ``is_poisoned``, for a loss that is no number.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stagewright.capture.capture import trace
from stagewright.capture.equivalence.check import relative_difference
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import NonFinite, RankFailed
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.build import build
from stagewright.runtime.ranks.process_groups import init_process_group
from tests.runtime.forked import print_line, run_forked
from tests.torch_models import Case, make_case, unmeasured_profile

MICROBATCHES, ROWS, WIDTH, WEIGHT = 4, 2, 6, 0.5
POISONED = "is_poisoned"


class Experts(nn.Module):
    """Leaves a balance loss in ``aux``."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        self.aux = 3 * shares.mean(0).square().sum()
        return x + torch.tanh(self.experts(x)) * shares.amax(-1, keepdim=True)


class Poisoned(Experts):
    """Leaves a loss that is no number, beside an output that is one."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        assert self.aux is not None
        self.aux = self.aux * float("nan")
        return y


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Experts() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(x))
        return y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def make_data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    rows = MICROBATCHES * ROWS
    return torch.randn(rows, WIDTH).double(), torch.randn(rows, 2).double()


def plan_of(model: nn.Module, balance: list[int], **options: Any) -> Plan:
    captured = trace(model, torch.randn(ROWS, WIDTH).double(), check=False)
    case = Case("experts", make_case("mlp").spec, model, None, loss_fn)
    profile = unmeasured_profile(captured.graph, case, captured.structure.to_json())
    replicas = options.pop("replicas", [1] * len(balance))
    return plan_from_balance(
        profile,
        Cluster.uniform(sum(replicas)),
        PlanOptions(num_microbatches=MICROBATCHES, **options),
        balance,
        replicas=replicas if max(replicas) > 1 else (),
    )


def unsplit(model: nn.Module, weight: float = WEIGHT) -> float:
    """A step of the model itself over the same micro-batches; gradients are left in it."""
    total = 0.0
    pieces = zip(*(whole.chunk(MICROBATCHES) for whole in make_data()), strict=True)
    for x, target in pieces:
        loss = loss_fn(model(x), target) + weight * sum(block.aux for block in model.blocks)
        (loss / MICROBATCHES).backward()
        total += float(loss.detach()) / MICROBATCHES
    return total


def rank(variant: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    init_process_group(backend="gloo", timeout_s=60)
    model = make_net()
    whole = copy.deepcopy(model)
    expected = unsplit(whole)
    plan = plan_of(
        model, variant["balance"], replicas=variant["replicas"], recompute=variant["recompute"]
    )
    x, target = make_data()
    aux_losses = {"*.aux": WEIGHT}
    with build(
        plan, model, loss_fn=loss_fn, aux_losses=aux_losses, strategy=variant.get("strategy")
    ) as training:
        loss = training.step(x, target=target)
        names = dict(whole.named_parameters())
        worst = max(
            relative_difference(full(parameter.grad), names[name].grad)
            for name, parameter in training.named_parameters()
        )
        _, alone = training.evaluate(x, target=target)
    print_line(
        {
            "worst": worst,
            "loss": None if loss is None else abs(float(loss) - expected),
            "alone": None
            if alone is None
            else float(alone) - float(loss_fn(whole(x), target).detach()),
        }
    )
    dist.destroy_process_group()


def refused(variant: dict[str, Any]) -> None:
    """Train with a loss that is no number on the first stage; print how this rank ends."""
    torch.set_num_threads(1)
    init_process_group(backend="gloo", timeout_s=60)
    model = make_net()
    model.blocks[0] = Poisoned().double()
    x, target = make_data()
    plan = plan_of(model, variant["balance"])
    try:
        with build(plan, model, loss_fn=loss_fn, aux_losses={"*.aux": WEIGHT}) as training:
            optimizer = torch.optim.SGD(training.parameters(), 0.1)
            for _ in range(2):  # the other rank learns of it in its next step at the latest
                training.step(x, target=target)
                training.update(optimizer)
    except (NonFinite, RankFailed) as error:
        print_line({"error": str(error)})


def full(gradient: Any) -> Tensor:
    found: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


if __name__ == "__main__":
    arguments = json.loads(sys.argv[2])
    run_forked(
        int(sys.argv[1]), lambda: refused(arguments) if POISONED in arguments else rank(arguments)
    )
